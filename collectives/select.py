"""What `algorithm="auto"` means: the fastest algorithm by measurement, else by the cost model.  It is never "mpi"."""

from collections.abc import Sequence
from functools import lru_cache

from collectives.algorithms import Algorithm, Reach
from collectives.algorithms.counterparts import Groups
from collectives.cost import NETWORK, Network, Nodes, predict
from collectives.tuning import Case, Tuning

UNTUNED = Tuning()
ONCE_BYTES = 1 << 16  # below this, a call without a plan goes by messages: more costs more to bind than it saves
Candidates = tuple[Algorithm, ...]  # rows of one collective that can be run


def usable(rows: Sequence[Algorithm], reach: Reach, nbytes: int, once: bool = False) -> Candidates:
    """The rows within reach, and worth binding for a single run if that is `once`."""
    if once and nbytes < ONCE_BYTES:
        reach = Reach.MESSAGES
    return tuple(row for row in rows if row.reach <= reach)


@lru_cache(maxsize=4096)
def choose(
    collective: str,
    nbytes: int,
    candidates: Candidates,
    size: int,
    nodes: Nodes,
    tuning: Tuning = UNTUNED,
    memory: str = "ordinary",
    groups: Groups | None = None,
) -> str:
    """The algorithm, one of the candidates, for a vector of `nbytes`."""
    measured = tuning.find(Case(collective, memory, size, len(nodes)), nbytes)
    if measured in [row.name for row in candidates]:
        return measured
    return ranking(nbytes, candidates, size, nodes, tuning.network, groups)[0][0]


def ranking(
    nbytes: int,
    candidates: Candidates,
    size: int,
    nodes: Nodes,
    network: Network = NETWORK,
    groups: Groups | None = None,
) -> list[tuple[str, float]]:
    """The candidates' names and predicted seconds, best first; of equal ones, the registry's first.

    >>> from collectives.algorithms import find
    >>> rows = find("all_reduce", "ring"), find("all_reduce", "recursive_doubling")
    >>> [name for name, _ in ranking(1024, rows, 8, nodes=(tuple(range(8)),))]
    ['recursive_doubling', 'ring']
    >>> [name for name, _ in ranking(1 << 20, rows, 8, nodes=(tuple(range(8)),))]
    ['ring', 'recursive_doubling']
    """
    predicted = [(row.name, predict(row, nbytes, size, nodes, network=network, groups=groups)) for row in candidates]
    return sorted(predicted, key=lambda pair: round(pair[1], 12))


def explain(
    collective: str,
    nbytes: int,
    candidates: Candidates,
    size: int,
    nodes: Nodes,
    tuning: Tuning = UNTUNED,
    memory: str = "ordinary",
    groups: Groups | None = None,
) -> str:
    """What is chosen, why, and what the model predicts for all candidates, in a few lines."""
    chosen = choose(collective, nbytes, candidates, size, nodes, tuning, memory, groups)
    case = Case(collective, memory, size, len(nodes))
    where = f"{size} rank{'s' * (size != 1)} of {len(nodes)} node{'s' * (len(nodes) != 1)}"
    lines = [f"{collective} of {nbytes} bytes on {where}: {chosen}", reason(case, nbytes, chosen, tuning)]
    for name, seconds in ranking(nbytes, candidates, size, nodes, tuning.network, groups):
        lines.append(f"{seconds * 1e6:14.1f} us  {name}{' <' * (name == chosen)}")
    return "\n".join(lines)


def reason(case: Case, nbytes: int, chosen: str, tuning: Tuning) -> str:
    if chosen == tuning.find(case, nbytes):
        return f"measured to be the fastest ({tuning.source}); the cost model, with the speeds measured, says:"
    if tuning.source:
        return f"not measured ({tuning.source}); by the cost model, with the speeds measured:"
    return "not measured (COLLECTIVES_TUNING names no file); by the cost model, with default speeds:"
