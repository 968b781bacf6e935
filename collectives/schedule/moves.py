"""A collective as data: for one rank, its rounds; in a round, the moves that may proceed together.

A schedule moves the *chunks* of a working vector; consecutive chunks are a *run*.  It knows ranks and chunks only:
memory, offsets, tags, segments and devices are the executor's business.  All ranks' schedules have the same number
of rounds; a rank that has nothing to do in one has an empty round there.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import accumulate, groupby, pairwise
from typing import Any, NamedTuple


class Send(NamedTuple):
    """Send `run` to rank `to`."""

    to: int
    run: range


class Recv(NamedTuple):
    """Receive `run` from rank `source`, replacing its contents."""

    source: int
    run: range


class RecvReduce(NamedTuple):
    """Receive `run` from rank `source` and reduce it with the contents of `run`, at the end of the round.

    Several of one run in a round are reduced one after the other, in their order there.  The lower rank's operand
    stands on the left of the operator: two ranks that exchange and reduce the same two values get the same bits.
    """

    source: int
    run: range


class Copy(NamedTuple):
    """Copy run `source` of the own vector to `run`."""

    source: range
    run: range


class Get(NamedTuple):
    """Copy run `theirs` of rank `source`'s vector, which this rank can access, to its own `run`."""

    source: int
    theirs: range
    run: range


class Put(NamedTuple):
    """Copy this rank's `run` to run `theirs` of rank `to`'s vector, which this rank can access."""

    to: int
    run: range
    theirs: range


class GetReduce(NamedTuple):
    """Reduce run `theirs` of the ranks `sources`, in that order, into this rank's `run`."""

    sources: tuple[int, ...]
    theirs: range
    run: range


class Barrier(NamedTuple):
    """Wait until all of `ranks` are here: their earlier writes can be read after.  Alone in its round."""

    ranks: tuple[int, ...]


Move = Send | Recv | RecvReduce | Copy | Get | Put | GetReduce | Barrier
Round = tuple[Move, ...]
Schedule = Iterable[Round]
Parts = Sequence[Sequence[Round]]

MESSAGES = 8  # the most from one rank to another in a round


def chunk(index: int, size: int) -> range:
    """Return the run of one chunk, counted round a ring of `size`."""
    return range(index % size, index % size + 1)


def arc(first: int, length: int, size: int) -> list[range]:
    """Return `length` consecutive chunks round a ring of `size`, as runs: two where they pass the ring's end.

    >>> arc(1, 2, 4), arc(3, 2, 4), arc(3, 0, 4)
    ([range(1, 3)], [range(3, 4), range(0, 1)], [])
    """
    first %= size
    return [run for run in (range(first, min(first + length, size)), range(first + length - size)) if run]


def even_runs(num_chunks: int, parts: int) -> list[range]:
    """Split `num_chunks` chunks into `parts` consecutive runs, the first ones one longer where it must be.

    >>> even_runs(5, 2)
    [range(0, 3), range(3, 5)]
    """
    length, extra = divmod(num_chunks, parts)
    return laid(0, (length + (i < extra) for i in range(parts)))


def laid(begin: int, lengths: Iterable[int]) -> list[range]:
    """Return adjacent runs of these lengths, the first from chunk `begin` on."""
    return [range(a, b) for a, b in pairwise(accumulate(lengths, initial=begin))]


def span(runs: Sequence[range], those: range) -> range:
    """Join the runs whose indices are in `those`; those that are not empty must be adjacent."""
    joined = [run for run in runs[those.start : those.stop] if run]
    return range(joined[0].start, joined[-1].stop) if joined else range(0)


def embed(schedule: Schedule, ranks: Sequence[int], runs: Sequence[range]) -> Iterator[Round]:
    """Place a group's schedule in the world: its rank i is `ranks[i]`, its chunk i is the run `runs[i]`.

    Moves whose runs are empty in the world are dropped.
    """

    to_world = partial(span, runs)
    for moves in schedule:
        nonempty = (m for m in moves if isinstance(m, Barrier) or to_world(m.run) or not m.run)
        yield tuple(replaced(m, ranks.__getitem__, to_world) for m in nonempty)


def among(
    rank: int, group: Sequence[int], runs: Sequence[range], algorithm: Callable[[int, int], Schedule]
) -> Schedule:
    """Embed an algorithm in a group of the ranks: the others have empty rounds."""
    if rank in group:
        return embed(algorithm(group.index(rank), len(group)), group, runs)
    return [()] * len(list(algorithm(0, len(group))))


def replaced(move: Move, rank: Callable[[int], int], run: Callable[[range], range]) -> Move:
    """Return a move with its ranks and runs replaced."""

    def other(value: Any) -> Any:
        if isinstance(value, range):
            return run(value)
        return rank(value) if isinstance(value, int) else tuple(map(rank, value))

    return type(move)(*map(other, move))


def runs_of(move: Move) -> list[range]:
    return [value for value in move if isinstance(value, range)]


def is_direct(moves: Round) -> bool:
    """Return whether a round reaches into other ranks' memory, or waits for them at a barrier."""
    return any(isinstance(m, Get | Put | GetReduce | Barrier) for m in moves)


def in_parts(schedule: Schedule) -> Iterator[tuple[bool, list[tuple[int, Round]]]]:
    """Yield a schedule's rounds with their numbers, in parts that are direct, or not."""
    for direct, part in groupby(enumerate(schedule), key=lambda numbered: is_direct(numbered[1])):
        yield direct, list(part)


def backwards(schedule: Schedule, take: type[Recv] | type[RecvReduce]) -> Iterator[Round]:
    """Yield a schedule from its end to its start: sends become receives, and receives and reductions become sends."""

    def move(m: Move) -> Move:
        match m:
            case Send(to, run):
                return take(to, run)
            case Recv(source, run) | RecvReduce(source, run):
                return Send(source, run)
        raise AssertionError(m)

    for moves in reversed(list(schedule)):
        yield tuple(move(m) for m in moves)


def show_run(run: range) -> str:
    """Return a run as the pictures and the error messages write it.

    >>> show_run(range(3, 4)), show_run(range(0, 4)), show_run(range(0))
    ('[3]', '[0-3]', '[]')
    """
    return f"[{run.start}-{run.stop - 1}]" if len(run) > 1 else str(list(run))


def show(move: Move) -> str:
    """Return one move in words, for error messages."""
    match move:
        case Send(to, run):
            return f"send {show_run(run)} to rank {to}"
        case Recv(source, run):
            return f"receive {show_run(run)} from rank {source}"
        case RecvReduce(source, run):
            return f"receive and reduce {show_run(run)} from rank {source}"
        case Copy(source, run):
            return f"copy {show_run(source)} to {show_run(run)}"
        case Get(source, theirs, run):
            return f"get {show_run(theirs)} of rank {source} into {show_run(run)}"
        case Put(to, run, theirs):
            return f"put {show_run(run)} into {show_run(theirs)} of rank {to}"
        case GetReduce(sources, theirs, run):
            return f"get and reduce {show_run(theirs)} of ranks {show_ranks(sources)} into {show_run(run)}"
        case Barrier(ranks):
            return f"wait at a barrier of ranks {show_ranks(ranks)}"


def show_ranks(ranks: Sequence[int]) -> str:
    """Return some ranks in few characters.

    >>> show_ranks((0, 1, 2, 3)), show_ranks((0, 2, 4))
    ('0-3', '0,2,4')
    """
    whole = list(ranks) == list(range(ranks[0], ranks[0] + len(ranks)))
    return f"{ranks[0]}-{ranks[-1]}" if whole and len(ranks) > 1 else ",".join(map(str, ranks))


def name_ranks(ranks: Sequence[int]) -> str:
    """Name ranks in a sentence.

    >>> name_ranks([1]), name_ranks([0, 1, 2])
    ('rank 1', 'ranks 0-2')
    """
    return f"rank{'s' * (len(ranks) > 1)} {show_ranks(ranks)}"


def render(algorithm: Callable[..., Schedule], size: int, **kwargs: int) -> str:
    """Draw all ranks' schedules: a line a round, `source->dest [chunk]`, `+` where it is reduced.

    A local copy is `rank: [from]>[to]`; in shared memory `source=>dest` is a get, `source~>dest` a put, and
    `(ranks)` is a barrier.
    """
    schedules = [list(algorithm(rank, size, **kwargs)) for rank in range(size)]
    lines = []
    for index, rounds in enumerate(zip(*schedules, strict=True)):
        pictures = []
        for rank, moves in enumerate(rounds):
            for move in moves:
                if isinstance(move, Send):
                    reduced = any(isinstance(m, RecvReduce) and m.source == rank for m in rounds[move.to])
                    pictures.append(f"{rank}->{move.to} {show_run(move.run)}" + "+" * reduced)
                else:
                    pictures += picture(rank, move)
        lines.append(f"round {index}:  " + "   ".join(dict.fromkeys(pictures)))
    return "\n".join(lines)


def picture(rank: int, move: Move) -> list[str]:
    """Draw a move of `rank` that needs no counterpart, as `render` does."""

    def ends(a: range, b: range) -> str:
        return show_run(a) if a == b else f"{show_run(a)}>{show_run(b)}"

    match move:
        case Copy(source, run):
            return [f"{rank}: {show_run(source)}>{show_run(run)}"]
        case Get(source, theirs, run):
            return [f"{source}=>{rank} {ends(theirs, run)}"]
        case Put(to, run, theirs):
            return [f"{rank}~>{to} {ends(run, theirs)}"]
        case GetReduce(sources, theirs, run):
            return [f"{show_ranks(sources)}=>{rank} {ends(theirs, run)}+"]
        case Barrier(ranks):
            return [f"({show_ranks(ranks)})"]
    return []
