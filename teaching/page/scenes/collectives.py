"""The scene of the collectives: every registered algorithm on 1 to 16 ranks, as data that the page steps through.

Numbers of ranks and chunks are counted from the rank that they belong to, round the ring, so that symmetric ranks have
the same text, and the page is small.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from types import CodeType
from typing import Any, NamedTuple

from collectives import algorithms
from collectives.algorithms import REGISTRY, Access, Algorithm
from collectives.algorithms.algorithm import Groups, Precondition, each_rank
from collectives.algorithms.own import OwnSchedule
from collectives.algorithms.own_proof import prove
from collectives.algorithms.variants import is_open
from collectives.schedule.cost import predict, summary
from collectives.schedule.fabrics import FABRICS
from collectives.schedule.moves import even_runs
from collectives.schedule.network import NETWORK
from collectives.schedule.proof import Value, Vector
from collectives.schedule.spec import COLLECTIVES, spec_of
from teaching.page.assemble import Scene
from teaching.page.source import function, registered_function, yield_lines
from teaching.page.states import ChunkTransfer, RecordedRun, ranks_of, record

SIZES = range(1, 17)
HOSTS = (1, 2, 4, 8)
Lines = tuple[tuple[int, int], ...]  # the number of a function, and its line, outermost first
KINDS = ("Recv", "RecvReduce", "Copy", "Get", "Put", "GetReduce")
LENGTHS = (1 << 10, 1 << 16, 1 << 22, 1 << 28)
NETWORKS = {
    "default": ("two cores of a server, 10 Gbit/s Ethernet", NETWORK),
    **{name: (fabric.words, fabric.network) for name, fabric in FABRICS.items() if not fabric.network.tiers},
}


def scene(own: Sequence[Algorithm] = ()) -> Scene:
    sources, rows = SourceTable(), (*REGISTRY, *own)
    data = {f"{row.collective}.{row.name}": algorithm_data(row, sources) for row in rows}
    data |= {f"prices.{name}": prices([row for row in rows if row.collective == name]) for name in COLLECTIVES}
    return Scene("collectives", {"catalog": catalog(sources, rows), **data})


def own_row(text: str) -> Algorithm:
    """Return the row of a schedule from outside, COLLECTIVE=MODULE:FUNCTION, with a chunk for each rank.

    Raises: ValueError for an unknown one, or one that is wrong on every number of ranks.
    """
    collective, _, name = text.partition("=")
    spec_of(collective)
    row = algorithms.find(collective, name)
    own: Any = row.schedule
    if not isinstance(own, OwnSchedule):
        raise ValueError(f"--schedule {text}: write COLLECTIVE=MODULE:FUNCTION")
    row = row._replace(unit=each_rank, cut=1) if is_open(row) else row
    failures = {size: failure(row, size) for size in SIZES}
    if all(failures.values()):
        raise ValueError(f"--schedule {text}: {failures[max(SIZES)]}")
    right = Precondition(lambda size, equal: not failures.get(size), "a number of ranks on which it is right")
    passes_on = row.unit is not None and "num_chunks" not in own.takes
    schedule = own if passes_on else own.function  # whose lines are shown
    return row._replace(name=name.rpartition(":")[2], precondition=right, schedule=schedule)


def failure(row: Algorithm, size: int) -> str:
    """Return what is wrong with a schedule on so many ranks, one a node, or nothing."""
    try:
        prove(row, size, 0, nodes_of(size, 1))
    except ValueError as error:
        return str(error)
    return ""


def nodes_of(size: int, hosts: int) -> Groups:
    return tuple(tuple(run) for run in even_runs(size, hosts))


def hosts_for(row: Algorithm, size: int) -> list[int]:
    """Return the numbers of hosts over which the page spreads an algorithm's ranks; one for shared memory."""
    if row.access > Access.INTRA_NODE or size == 1:
        return [1]
    return [hosts for hosts in HOSTS if hosts < size + (row.access == Access.MESSAGES)]


def sizes_for(row: Algorithm) -> list[int]:
    return [size for size in SIZES if row.precondition.holds(size, True)]


def catalog(sources: "SourceTable", every: Sequence[Algorithm] = REGISTRY) -> dict[str, Any]:
    """Return the page's choices, and the functions whose lines it shows."""
    rows: dict[str, dict[str, Any]] = {name: {} for name in COLLECTIVES}
    for row in every:
        schedule = registered_function(row)
        rows[row.collective][row.name] = {
            "words": (schedule.__doc__ or row.name).strip().split("\n")[0],
            "needs": row.precondition.words,
            "overHosts": row.over_nodes,
            "hosts": {size: hosts_for(row, size) for size in sizes_for(row)},
            "function": sources.number(schedule.__code__),
        }
    return {
        "collectives": rows,
        "networks": {name: words for name, (words, _) in NETWORKS.items()},
        "lengths": LENGTHS,
        "kinds": KINDS,
        "functions": [function(code)._asdict() for code in sources.codes],
    }


class SourceTable:
    """The functions that yield rounds, numbered as they appear."""

    def __init__(self) -> None:
        self.codes: dict[CodeType, int] = {}

    def number(self, code: CodeType) -> int:
        return self.codes.setdefault(code, len(self.codes))

    def rank_lines(self, row: Algorithm, rank: int, size: int, groups: Groups) -> list[Lines]:
        """Return for each round of a rank the functions that yield it, by their numbers, and the lines."""
        every = yield_lines(row, rank, size, 0, groups)
        return [tuple((self.number(code), line) for code, line in lines) for lines in every]


def algorithm_data(row: Algorithm, sources: SourceTable) -> dict[str, Any]:
    """Return an algorithm's runs by their ranks and hosts, and the lines that yield their rounds."""
    numbers: dict[Lines, int] = {}
    runs = {
        f"{size}x{hosts}": run_data(row, size, nodes_of(size, hosts), sources, numbers)
        for size in sizes_for(row)
        for hosts in (hosts_for(row, size) if row.over_nodes else [1])
    }
    return {"runs": runs, "lines": [*numbers]}


class Columns(NamedTuple):
    """The rounds of a run in columns, which pack well: entries of every round's ranks, and of their transfers.

    Numbers are counted from the rank whose round it is; `values` are only given for transfers whose result does not
    follow from the chunks before the round.
    """

    lines: list[int]  # per rank and round
    barriers: list[list[int] | int]  # its ranks, or 0 for none
    counts: list[int]  # number of transfers
    kinds: list[int]  # of each transfer
    sources: list[list[int] | int]
    dests: list[int]
    theirs: list[int]  # the first chunk there
    here: list[int]
    lengths: list[int]
    values: list[list[int]]  # preceded by the number of the transfer


def run_data(
    row: Algorithm, size: int, groups: Groups, sources: SourceTable, numbers: dict[Lines, int]
) -> dict[str, Any]:
    """Return a run: its first and last vectors, its rounds, and their costs."""
    run = record(row, size, groups)
    lines = [sources.rank_lines(row, rank, size, groups) for rank in range(size)]
    columns = Columns(*([] for _ in Columns._fields))
    for number, (ranks, vectors) in enumerate(zip(run.rounds, run.states(), strict=False)):
        for rank, each in enumerate(ranks):
            columns.lines.append(numbers.setdefault(lines[rank][number], len(numbers)))
            columns.barriers.append([(r - rank) % size for r in each.barrier] or 0)
            columns.counts.append(len(each.transfers))
            for transfer in each.transfers:
                add_transfer(columns, transfer, rank, vectors)
    return {
        "start": [vector_data(vector, rank, size) for rank, vector in enumerate(run.start)],
        "goal": [vector_data(vector, rank, size) for rank, vector in enumerate(run.goal)],
        "costs": busiest(run),
        **columns._asdict(),
    }


def add_transfer(columns: Columns, t: ChunkTransfer, rank: int, vectors: Sequence[Vector]) -> None:
    """Append a transfer of `rank`'s to the columns; before its round all ranks hold `vectors`."""
    size = len(vectors)
    sources = [(source - rank) % size for source in t.sources]
    columns.kinds.append(KINDS.index(t.kind))
    columns.sources.append(sources if len(sources) > 1 else sources[0])
    columns.dests.append((t.dest - rank) % size)
    columns.theirs.append(relative(t.theirs.start, rank, size))
    columns.here.append(relative(t.run.start, rank, size))
    columns.lengths.append(len(t.run))
    if t.values != expected(t, vectors):
        values = [value_data(value, chunk, t.dest, size) for value, chunk in zip(t.values, t.run, strict=True)]
        columns.values.append([len(columns.kinds) - 1, *values])


def expected(t: ChunkTransfer, vectors: Sequence[Vector]) -> tuple[Value, ...] | None:
    """Return the result of a transfer from the chunks before its round; None if one did not exist."""
    locations = [[(source, there) for source in t.sources] for there in t.theirs]
    if t.kind == "RecvReduce":
        locations = [[*of_sources, (t.dest, here)] for of_sources, here in zip(locations, t.run, strict=True)]
    if any(chunk not in vectors[owner] for several in locations for owner, chunk in several):
        return None
    values = [[vectors[owner][chunk] for owner, chunk in several] for several in locations]
    return tuple(Value(several[0].chunk, sum(value.ranks for value in several)) for several in values)


def relative(chunk: int, rank: int, size: int) -> int:
    """Count a chunk from `rank`, round its p chunks.

    >>> relative(chunk=5, rank=2, size=4)
    7
    """
    return chunk - chunk % size + (chunk - rank) % size


def value_data(value: Value, chunk: int, rank: int, size: int) -> int:
    """Encode a value as one number: its chunk, relative to its place, and its ranks, relative to its owner.

    >>> from collectives.schedule.proof import contributions
    >>> value_data(Value(1, contributions((1, 2))), chunk=1, rank=1, size=4)
    3
    """
    mask = ranks_of(value)
    turned = (mask >> rank | mask << size - rank) & (1 << size) - 1
    return (value.chunk - chunk) % size << max(SIZES) | turned


def vector_data(vector: Vector, rank: int, size: int) -> list[int]:
    """Return the chunks of a vector, each followed by its value, in their order from `rank` on."""
    ordered = sorted((relative(chunk, rank, size), chunk, value) for chunk, value in vector.items())
    return [n for position, chunk, value in ordered for n in (position, value_data(value, chunk, rank, size))]


def busiest(run: RecordedRun) -> list[tuple[int, ...]]:
    """Return, after each round, the chunks that the busiest ranks have sent, reached in others' memory, and reduced."""
    by_rank = [list(accumulate(round_work(rounds, rank), add)) for rank, rounds in enumerate(run.programs)]
    return [tuple(map(max, zip(*counts, strict=True))) for counts in zip(*by_rank, strict=True)]


def round_work(rounds: Iterable[Any], rank: int) -> Iterator[tuple[int, int, int]]:
    for moves in rounds:
        work = summary(moves, rank)
        reduced = work.reduced + sum(message.reduced for message in work.messages)
        yield sum(message.chunks for message in work.messages if message.is_send), work.pulled, reduced


def add(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(x + y for x, y in zip(a, b, strict=True))


def prices(rows: Sequence[Algorithm]) -> dict[str, dict[str, list[list[float]]]]:
    """Return the microseconds of a collective's algorithms, by ranks and hosts, then by network and length."""
    table: dict[str, dict[str, list[list[float]]]] = {}
    for row in rows:
        for size in sizes_for(row):
            for hosts in hosts_for(row, size):
                nodes = nodes_of(size, hosts)
                lengths = LENGTHS if COLLECTIVES[row.collective].takes else (0,)
                times = [
                    [predict(row, nbytes, size, nodes, 0, network) for nbytes in lengths]
                    for _, network in NETWORKS.values()
                ]
                table.setdefault(f"{size}x{hosts}", {})[row.name] = [
                    [float(f"{t * 1e6:.3g}") for t in ts] for ts in times
                ]
    return table
