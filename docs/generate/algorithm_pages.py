"""A page for each collective, from the registry: what each algorithm does, its rounds, its cost, and where it wins."""

import inspect
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

from docstrings import markdown

from collectives import algorithms
from collectives.algorithms import Access, Algorithm
from collectives.job.settings import ladder, size_in_words
from collectives.runtime.choose.auto import ranking
from collectives.schedule.cost import summary
from collectives.schedule.fabrics import FABRICS
from collectives.schedule.moves import render
from collectives.schedule.network import NETWORK, Network, Nodes
from collectives.schedule.spec import COLLECTIVES
from teaching.page.scenes.collectives import nodes_of
from teaching.page.source import registered_function

COUNTED = (4, 8, 64)  # ranks
ON_NODES = 2  # nodes of a schedule that is drawn, if it knows nodes
SIZES = ladder(8, 256 << 20, 2)
ACCESS = {
    Access.MESSAGES: "messages; ranks may be anywhere",
    Access.INTRA_NODE: "shared memory inside each node, messages between nodes",
    Access.STAGED: "staging buffers in the shared memory of one node",
    Access.DIRECT: "the callers' arrays, in the memory of one node",
}


class Machine(NamedTuple):
    """Ranks for which the cost model names the fastest algorithm."""

    words: str
    nodes: Nodes
    network: Network
    access: Access  # the most that these ranks have


MACHINES = (
    Machine("8 ranks of one node", nodes_of(8, 1), NETWORK, Access.DIRECT),
    Machine("16 hosts of one rank each, 10 Gbit/s Ethernet", nodes_of(16, 16), NETWORK, Access.MESSAGES),
    Machine("8 nodes of 8 GPUs, InfiniBand NDR", nodes_of(64, 8), FABRICS["ndr"].network, Access.INTRA_NODE),
)


class Cost(NamedTuple):
    """Rounds, and what the busiest rank of each does, in chunks: sends, or gets and puts in others' memory; reduces."""

    rounds: int
    sent: int
    reached: int
    reduced: int


def pages() -> dict[str, str]:
    """Return the pages by their paths below docs/."""
    every = {f"algorithms/{collective}.md": "\n".join(page(collective)) for collective in COLLECTIVES}
    return {"algorithms/index.md": "\n".join(index()), **every}


def index() -> Iterator[str]:
    yield "# Algorithms\n"
    yield "Every algorithm that `algorithm=` takes, from the registry, `collectives.algorithms`. The drawings are"
    yield "rendered from the schedules, the costs are counted from them, and each is proved by the tests.\n"
    yield from NOTATION
    yield "\n| collective | algorithms |\n|---|---|"
    for collective in COLLECTIVES:
        links = [f"[{name}]({collective}.md#{name})" for name in algorithms.names(collective)]
        yield f"| [{collective}]({collective}.md) | {', '.join(links)} |"


NOTATION = (
    "How to read a drawing: a vector is divided into p *chunks*, one for each rank; moves of one *round* may proceed",
    "together. `0->1 [3]` is a message of chunk 3 from rank 0 to rank 1, with `+` where rank 1 reduces it with its",
    "own. `0=>1 [3]` is a read of rank 0's memory by rank 1, `0~>1 [3]` a write by rank 0 to rank 1's, `2: [0]>[4]` a",
    "copy inside rank 2, and `(0-3)` a barrier of ranks 0 to 3. Chunks from p on are working space, or a result apart",
    "from `x`. In cost lines alpha is the time of a message without contents or of a barrier, beta that of a byte on",
    "its way, gamma that of reducing one, p the number of ranks and n the bytes of the whole vector.",
)


def page(collective: str) -> Iterator[str]:
    """Write a collective's page."""
    spec, rows = COLLECTIVES[collective], algorithms.rows(collective)
    yield f"# {collective}\n"
    yield f"Chunks in `x`: {spec.gives.value}. Chunks in the result: {spec.gets.value}. In MPI: {calls(spec.mpi)}.\n"
    yield "## Which one wins\n"
    yield "By the cost model, for arrays in symmetric memory; `auto` follows it where nothing was measured, and"
    yield "`python -m collectives.bench --tune` measures. [How to read the drawings](index.md).\n"
    ranked = {machine.words: rankings(collective, machine) for machine in MACHINES}
    yield "| machine | vector | fastest |\n|---|---|---|"
    for words, of in ranked.items():
        for name, sizes in winners(of):
            yield f"| {words} | {sizes} | [{name}](#{name.partition('/')[0]}) |"
    for row in rows:
        yield from section(row, verdict(row.name, ranked))


def calls(names: str) -> str:
    return " and ".join(f"`MPI_{name}`" for name in names.split())


def section(row: Algorithm, wins: str) -> Iterator[str]:
    """Write what there is to say about an algorithm."""
    function = registered_function(row)
    home = inspect.getmodule(function)
    assert home is not None
    yield f"\n## {row.name}\n"
    yield f"`{home.__name__.replace('.', '/')}.py:{function.__name__}`\n"
    yield markdown(described(inspect.getdoc(function) or "")) + "\n"
    yield from drawing(row)
    yield from costs(row)
    yield f"- Needs: {', '.join(filter(None, (ACCESS[row.access], row.precondition.words)))}."
    if row.in_order:
        yield "- Reduces in the order of the ranks, whatever the length: `reproducible=True` may take it."
    yield f"- {wins}"
    yield f'\n??? quote "Family and sources: {home.__name__}"\n'
    yield "\n".join(f"    {line}" for line in markdown(inspect.getdoc(home) or "").splitlines())


def described(docstring: str) -> str:
    """Return a docstring up to its doctest, whose drawing is shown for 4 ranks instead."""
    return docstring.partition("\n>>> ")[0].strip()


def drawing(row: Algorithm) -> Iterator[str]:
    groups = nodes_of(4, ON_NODES) if row.over_nodes else ()
    where = f"On 4 ranks of {ON_NODES} nodes" if groups else "On 4 ranks"
    yield f"{where}:\n\n```text"
    yield render(lambda rank, size: row.rounds_of(rank, size, 0, groups), 4)
    yield "```\n"


def costs(row: Algorithm) -> Iterator[str]:
    """Write a table of what is counted from the schedules of all ranks."""
    yield "| ranks | rounds | sent | read or written in others' memory | reduced |\n|---:|---:|---:|---:|---:|"
    for size in COUNTED:
        nodes = nodes_of(size, ON_NODES) if row.over_nodes else nodes_of(size, 1)
        cost = count([row.rounds(rank, size, 0, nodes if row.over_nodes else ()) for rank in range(size)])
        yield f"| {size} | {cost.rounds} | {' | '.join(of_vector(chunks, size) for chunks in cost[1:])} |"
    many = f", in {ON_NODES} nodes" if row.over_nodes else ""
    yield f"\nBytes are of each round's busiest rank, added up, in vectors of n bytes{many}.\n"


def of_vector(chunks: int, size: int) -> str:
    return f"{chunks / size:.2f} n" if chunks else "none"


def count(programs: Sequence[Sequence[tuple]]) -> Cost:
    """Count from the schedules of all ranks."""
    sums = Cost(len(programs[0]), 0, 0, 0)
    for rounds in zip(*programs, strict=True):
        works = [summary(moves, rank) for rank, moves in enumerate(rounds)]
        sent = max(sum(message.chunks for message in work.messages if message.is_send) for work in works)
        reduced = max(work.reduced + sum(message.reduced for message in work.messages) for work in works)
        reached = max(work.pulled for work in works)
        sums = Cost(sums.rounds, sums.sent + sent, sums.reached + reached, sums.reduced + reduced)
    return sums


Rankings = dict[int, list[tuple[str, float]]]  # by bytes: algorithms and their seconds, the fastest first


def rankings(collective: str, machine: Machine) -> Rankings:
    """Return the cost model's order of the algorithms that run on a machine, for each size."""
    size = sum(map(len, machine.nodes))
    usable = [row for row in algorithms.rows(collective, size) if row.access <= machine.access]
    if max(map(len, machine.nodes)) == 1 or len(machine.nodes) == 1:  # nothing to compose
        usable = [row for row in usable if not row.over_nodes]
    sizes = SIZES if COLLECTIVES[collective].takes else (0,)
    ranked = {nbytes: ranking(nbytes, tuple(usable), machine.nodes, machine.network) for nbytes in sizes}
    return {nbytes: [(without_cut(name), seconds) for name, seconds in order] for nbytes, order in ranked.items()}


def without_cut(name: str) -> str:
    """Return the name of a variant without the number of chunks, which is another one for each size."""
    base, _, cut = name.rpartition("/")
    return base if cut.isdecimal() else name


def winners(ranked: Rankings) -> list[tuple[str, str]]:
    """Return the fastest algorithms, each with the span of sizes where it is."""
    by_name = groupby(ranked.items(), key=lambda item: item[1][0][0])
    return [(name, span([nbytes for nbytes, _ in run])) for name, run in by_name]


def verdict(name: str, ranked: dict[str, Rankings]) -> str:
    """Say where an algorithm is the fastest, or else where it comes nearest to that."""
    spans = [
        (words, [span for winner, span in winners(of) if winner.partition("/")[0] == name])
        for words, of in ranked.items()
    ]
    if won := [f"{' and '.join(of)} on {words}" for words, of in spans if of]:
        return f"Fastest: {'; '.join(won)}."
    ratios = [
        (seconds / order[0][1], nbytes, words)
        for words, of in ranked.items()
        for nbytes, order in of.items()
        for other, seconds in order
        if other.partition("/")[0] == name
    ]
    if not ratios:
        return "Not a candidate on the machines above."
    ratio, nbytes, words = min(ratios)
    nearest = f"nearest on {words}, {ratio:.2f} times the fastest's time at {size_in_words(nbytes)}"
    return f"Nowhere the fastest of the machines above; {nearest}."


def span(sizes: Sequence[int]) -> str:
    """Say which sizes these are: of the ladder's ends, up to or from."""
    if sizes[0] == 0:
        return "always"
    first, last = size_in_words(sizes[0]), size_in_words(sizes[-1])
    if sizes[0] == SIZES[0]:
        return "all sizes" if sizes[-1] == SIZES[-1] else f"up to {last}"
    if sizes[-1] == SIZES[-1]:
        return f"from {first}"
    return first if first == last else f"{first} to {last}"
