"""Schedules of thousands of ranks in little space and time.

In a *program* peers are counted from the rank itself, and equal rounds that follow each other are one *stretch*.  Most
algorithms have few programs: in a ring, all ranks have the same; in a tree, every second rank, every fourth, and so on;
along a chain, each rank does what the one before does, a round later.  Such *families* are guessed from some of their
members: mpi_tests/without_ranks/test_simulate.py holds the guess against every rank's program, for each algorithm.
"""

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import NamedTuple

from collectives.algorithms import Algorithm
from collectives.algorithms.algorithm import Groups
from collectives.schedule.moves import Barrier, Copy, Get, GetReduce, Put, Recv, RecvReduce, Round, Send

Nodes = tuple[tuple[int, ...], ...]  # the ranks of each


class PeerTraffic(NamedTuple):
    """All that a rank sends another in a round, or receives from it."""

    is_send: bool
    offset: int  # of the peer, from the rank itself round the ring
    chunks: int
    folded: int  # of the chunks


class Shape(NamedTuple):
    """A rank's work in a round; `copied` and `folded` are chunks in its node's memory, `pulled` those of others."""

    messages: tuple[PeerTraffic, ...] = ()
    copied: int = 0
    folded: int = 0
    pulled: int = 0
    meets: tuple[int, ...] = ()  # offsets of those who meet, as they are


IDLE = Shape()


class RankProgram(NamedTuple):
    """A rank's stretches: what it does in each, and the round in which it is over."""

    shapes: tuple[Shape, ...]
    ends: tuple[int, ...]

    def flat(self) -> tuple[list[int], list[int]]:
        """Return the program's structure and its numbers, from which programs of one family differ linearly.

        A stretch has its numbers of messages and of those who meet, and which messages are sent; and its end, chunks
        copied, folded and pulled, offset and chunks of each message, and offsets of those who meet.
        """
        structure: list[int] = []
        numbers: list[int] = []
        for (messages, copied, folded, pulled, meets), end in zip(self.shapes, self.ends, strict=True):
            structure += len(messages), len(meets), *(m.is_send for m in messages)
            numbers += end, copied, folded, pulled, *(n for m in messages for n in m[1:]), *meets
        return structure, numbers


class RankClass(NamedTuple):
    """Ranks whose programs differ linearly: the numbers of the i-th are `numbers` and i times `slopes`."""

    ranks: Sequence[int]
    structure: list[int]
    numbers: list[int]
    slopes: list[int]

    def has(self, nth: int, program: RankProgram) -> bool:
        numbers = [n + nth * slope for n, slope in zip(self.numbers, self.slopes, strict=True)]
        return program.flat() == (self.structure, numbers)


class RankPrograms:
    """The programs of an algorithm's ranks, of which each is made when it is asked for."""

    def __init__(self, row: Algorithm, nodes: Nodes, root: int = 0, groups: Groups | None = None):
        self.row, self.nodes, self.root, self.groups = row, nodes, root, groups or nodes
        self.size = sum(map(len, nodes))
        self.programs: dict[int, RankProgram] = {}

    def of(self, rank: int) -> RankProgram:
        if rank not in self.programs:
            self.programs[rank] = program(self.row.rounds(rank, self.size, self.root, self.groups), rank, self.size)
        return self.programs[rank]

    def families(self) -> Iterator[RankClass]:
        """Yield classes that have all ranks, each in one."""
        if self.everyone:
            yield self.everyone
        else:
            for ranks in self.by_place():
                yield from self.divided(ranks)

    @cached_property
    def everyone(self) -> RankClass | None:
        return self.family(range(self.size))

    def singles(self) -> Iterator[RankClass]:
        """Yield a class for each rank, without a guess."""
        return (self.alone(rank) for rank in range(self.size))

    def by_place(self) -> list[range]:
        """Return the first rank of each node, the second, and so on, where nodes have one length and are in order."""
        length = len(self.nodes[0])
        regular = self.nodes == tuple(tuple(range(at, at + length)) for at in range(0, self.size, length))
        return [range(place, self.size, length) for place in range(length)] if regular else [range(self.size)]

    def divided(self, ranks: Sequence[int]) -> Iterator[RankClass]:
        """Yield classes, of halves where neighbours do alike, and else of every second rank and the others."""
        if family := self.family(ranks):
            yield family
            return
        middle, quarter = len(ranks) // 2, len(ranks) // 4
        alike = quarter and any(self.family(ranks[at - 1 : at + 2]) for at in (quarter, middle + quarter))
        for part in (ranks[:middle], ranks[middle:]) if alike else (ranks[::2], ranks[1::2]):
            yield from self.divided(part)

    def family(self, ranks: Sequence[int]) -> RankClass | None:
        """Guess from some of the ranks that they are one class; return it, or None."""
        steps = len(ranks) - 1
        if steps == 0:
            return self.alone(ranks[0])
        (structure, numbers), (same, last) = (self.of(ranks[nth]).flat() for nth in (0, -1))
        if same != structure or any((b - a) % steps for a, b in zip(numbers, last, strict=True)):
            return None
        family = RankClass(ranks, structure, numbers, [(b - a) // steps for a, b in zip(numbers, last, strict=True)])
        some = sorted({1, 2, steps // 3, steps // 2, steps - 1} & set(range(1, steps)))
        return family if all(family.has(nth, self.of(ranks[nth])) for nth in some) else None

    def alone(self, rank: int) -> RankClass:
        structure, numbers = self.of(rank).flat()
        return RankClass([rank], structure, numbers, [0] * len(numbers))


def program(rounds: Sequence[Round], rank: int, size: int) -> RankProgram:
    """Return a rank's rounds as stretches."""
    shapes: list[Shape] = []
    ends: list[int] = []
    for number, moves in enumerate(rounds, 1):
        shape = shape_of(moves, rank, size) if moves else IDLE
        if shapes and shapes[-1] == shape:
            ends[-1] = number
        else:
            shapes.append(shape)
            ends.append(number)
    return RankProgram(tuple(shapes), tuple(ends))


def shape_of(moves: Round, rank: int, size: int) -> Shape:
    chunks: dict[tuple[bool, int], list[int]] = {}
    copied = folded = pulled = 0
    meets: tuple[int, ...] = ()
    for move in moves:
        match move:
            case Send(peer, run) | Recv(peer, run) | RecvReduce(peer, run):
                sums = chunks.setdefault((isinstance(move, Send), (peer - rank) % size), [0, 0])
                sums[0] += len(run)
                sums[1] += len(run) * isinstance(move, RecvReduce)
            case Copy(_, run) | Get(_, _, run) | Put(_, run, _):
                copied += len(run)
                pulled += len(run) * (not isinstance(move, Copy))
            case GetReduce(sources, _, run):
                folded += len(sources) * len(run)
                pulled += (len(sources) - (rank in sources)) * len(run)
            case Barrier(ranks):
                meets = tuple(other - rank for other in ranks)
    return Shape(tuple(PeerTraffic(*way, *sums) for way, sums in chunks.items()), copied, folded, pulled, meets)
