"""What `algorithm="auto"` means: the fastest algorithm by measurement, else by the cost model.  It is never "mpi"."""

from collections.abc import Sequence
from functools import lru_cache

from collectives.algorithms import Algorithm, Reach
from collectives.algorithms.algorithm import Groups
from collectives.runtime.choose.tuning import Case, Tuning
from collectives.schedule.cost import NETWORK, Network, Nodes, predict

UNTUNED = Tuning()
Candidates = tuple[Algorithm, ...]  # rows of one collective that can be run


def usable(rows: Sequence[Algorithm], reach: Reach) -> Candidates:
    """The rows within reach."""
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
    return ranking(nbytes, candidates, size, nodes, tuning.network, groups, memory)[0][0]


def ranking(
    nbytes: int,
    candidates: Candidates,
    size: int,
    nodes: Nodes,
    network: Network = NETWORK,
    groups: Groups | None = None,
    memory: str = "symmetric",
) -> list[tuple[str, float]]:
    """The candidates' names and predicted seconds, best first; of equal ones, the registry's first.

    >>> from collectives.algorithms import find
    >>> rows = find("all_reduce", "ring"), find("all_reduce", "recursive_doubling")
    >>> [name for name, _ in ranking(1024, rows, 8, nodes=(tuple(range(8)),))]
    ['recursive_doubling', 'ring']
    >>> [name for name, _ in ranking(1 << 20, rows, 8, nodes=(tuple(range(8)),))]
    ['ring', 'recursive_doubling']
    """

    def seconds(row: Algorithm) -> float:
        speeds = speeds_of(row, network, memory)
        around = copied_before(row, nbytes, size) * network.copy_s_per_byte
        return predict(row, nbytes, size, nodes, network=speeds, groups=groups) + around

    predicted = [(row.name, seconds(row)) for row in candidates]
    return sorted(predicted, key=lambda pair: round(pair[1], 12))


def speeds_of(row: Algorithm, network: Network, memory: str) -> Network:
    """The speeds at which ranks read each other's arrays: through the system, more slowly than in shared memory."""
    if row.reach < Reach.ARRAYS or memory != "ordinary":
        return network
    alpha, beta = network.system
    return network._replace(meet_s=network.meet_s + alpha, pull_s_per_byte=beta)


def copied_before(row: Algorithm, nbytes: int, size: int) -> float:
    """Bytes that go to a working vector ahead of the rounds, where an algorithm by messages needs one."""
    share = {"all_gather": 1 / size, "reduce_scatter": 1.0}.get(row.collective, 0.0)
    return 0.0 if row.reach >= Reach.STAGES else nbytes * share


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
    for name, seconds in ranking(nbytes, candidates, size, nodes, tuning.network, groups, memory):
        lines.append(f"{seconds * 1e6:14.1f} us  {name}{' <' * (name == chosen)}")
    return "\n".join(lines)


def reason(case: Case, nbytes: int, chosen: str, tuning: Tuning) -> str:
    if chosen == tuning.find(case, nbytes):
        return f"measured to be the fastest ({tuning.source}); the cost model, with the speeds measured, says:"
    if tuning.source:
        return f"not measured ({tuning.source}); by the cost model, with the speeds measured:"
    speeds = "the speeds measured on these hosts" if tuning.measured else "default speeds"
    return f"not measured (COLLECTIVES_TUNING names no file); by the cost model, with {speeds}:"
