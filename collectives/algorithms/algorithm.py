"""Rows of the registry: an algorithm's schedule, its preconditions, and the memory access that it needs."""

from collections.abc import Callable
from enum import IntEnum
from math import ceil
from typing import Any, NamedTuple

from collectives.schedule.moves import Round, Schedule
from collectives.schedule.spec import COLLECTIVES

Groups = tuple[tuple[int, ...], ...]  # the ranks of each
Scheduler = Callable[..., Schedule]
Unit = Callable[[int, Groups], int]  # of a number of ranks, and the nodes


class Precondition(NamedTuple):
    """A condition as a predicate `holds(size, equal)`, `equal`: all chunks have one length; and in words."""

    holds: Callable[[int, bool], bool]
    words: str


NOTHING = Precondition(lambda size, equal: True, "")
EVEN_SIZE = Precondition(lambda size, equal: size == 1 or size % 2 == 0, "an even number of ranks, or one")
EQUAL_CHUNKS = Precondition(lambda size, equal: equal, "equal chunks")


def whole_vector(size: int, groups: Groups) -> int:
    """Return the unit of schedules that cut the whole vector into any number of chunks."""
    return 1


def each_rank(size: int, groups: Groups) -> int:
    """Return the unit of schedules that cut the part of every rank."""
    return size


def each_column(size: int, groups: Groups) -> int:
    """Return the unit of schedules that cut what counterparts of all nodes exchange."""
    width = max(map(len, groups), default=size)
    return width if width > 1 else size


def each_counterpart(size: int, groups: Groups) -> int:
    """Return the unit of schedules that cut what counterparts exchange into a chunk for each of them."""
    return each_column(size, groups) * (len(groups) if groups and max(map(len, groups)) > 1 else 1)


class Access(IntEnum):
    """The extent to which ranks read and write each other's memory; each includes those before."""

    MESSAGES = 0  # not at all
    INTRA_NODE = 1  # inside the nodes
    STAGED = 2  # everywhere, in memory that the library allocates for a plan
    DIRECT = 3  # in the callers' arrays, too


PIPELINED_BYTES = 1 << 20  # of a chunk's segment, where several phases are pipelined
STAGED_BYTES = 1 << 18  # of a segment in a staging buffer, which should stay in a core's cache
LEAST_CHUNK_BYTES = 1 << 12  # of a vector that a schedule cuts into several chunks
MOST_CUTS = 1 << 16


class Algorithm(NamedTuple):
    """A row of the registry."""

    collective: str
    name: str
    schedule: Scheduler
    precondition: Precondition = NOTHING
    over_nodes: bool = False  # the schedule depends on the nodes
    access: Access = Access.MESSAGES
    apart: bool = False  # a direct schedule can put its result in separate chunks
    segmented: bool = False  # a direct schedule whose phases follow each other, segment by segment
    in_order: bool = False  # reduces ((rank 0 op rank 1) op rank 2) op ..., for every chunk
    unit: Unit | None = None  # of a schedule that takes `num_chunks`, a multiple of this
    cut: int = 0  # that multiple; 0: one chunk for each rank

    def rounds_of(self, rank: int, size: int, root: int, groups: Groups) -> Schedule:
        """Return the schedule of a rank, with the arguments that it takes."""
        more: dict[str, Any] = {"root": root} if COLLECTIVES[self.collective].rooted else {}
        more |= {"groups": groups} if self.over_nodes else {}
        more |= {"apart": True} if self.apart else {}
        more |= {"num_chunks": self.num_chunks(size, groups)} if self.unit and self.cut else {}
        return self.schedule(rank, size, **more)

    def rounds(self, rank: int, size: int, root: int, groups: Groups) -> list[Round]:
        """Return the rounds of a rank."""
        return list(self.rounds_of(rank, size, root, groups))

    def num_chunks(self, size: int, groups: Groups) -> int:
        """Return the number of chunks into which the schedule cuts the vector."""
        return self.cut * self.unit(size, groups) if self.unit and self.cut else size

    def cut_into(self, cut: int) -> "Algorithm":
        """Return the same algorithm with another cut.

        Raises: ValueError for a cut that is out of range, or an algorithm that takes none.
        """
        if self.unit is None or self.cut:
            chunks = "a fixed number of chunks" if self.cut else "one chunk for each rank"
            raise ValueError(f"algorithm '{self.name}/{cut}': {self.name!r} has {chunks}: omit '/{cut}'")
        if not 1 <= cut <= MOST_CUTS:
            raise ValueError(f"algorithm '{self.name}/{cut}': {cut} is out of range: use 1 to {MOST_CUTS} chunks")
        return self._replace(name=f"{self.name}/{cut}", cut=cut)

    def num_segments(self, chunk_bytes: float) -> int:
        """Return the number of segments in which a host's ranks process chunks of so many bytes."""
        segment_bytes = STAGED_BYTES if self.access == Access.STAGED else PIPELINED_BYTES
        return max(1, ceil(chunk_bytes / segment_bytes)) if self.segmented else 1
