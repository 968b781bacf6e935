"""Direct rounds as phases: accesses of a node's ranks to each other's memory between two barriers.

Long chunks are cut into segments, and the phases are run as a pipeline: at each step, phase j works on segment
step - j, so that one barrier per step serves all of them, and the data of one phase are in the cache for the next one.
Segments do not overlap, so a schedule that is right for one is right for all.  A staging buffer has room for two
segments, used in turn, across runs as well.  Memory is addressed by registers, whose values are set per run.  Phases
become programs of the host in `shared_memory`, and of a device in `on_device`.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from collectives.algorithms import Access, Algorithm
from collectives.arrays.addresses import address_of
from collectives.arrays.device import TURNS
from collectives.schedule.moves import Barrier, Copy, Get, GetReduce, Move, Put, Recv, RecvReduce, Round, Send

if TYPE_CHECKING:
    from collectives.runtime.context import Context

DEVICE_BYTES = 1 << 26  # of a chunk's segment on a device, where it only bounds the staging buffers
STREAMED_BYTES = 1 << 15  # of a copy that bypasses the caches, where that is faster
CACHED_BYTES = 1 << 22  # of a vector that fits into the caches
NEVER = 1 << 62
LINE_BYTES = 64

# A rank's registers hold addresses: of the arrays of its call, the first `NUM_SHARED` of which other ranks know, of
# private memory, and of its two staging buffers, in the order in which the run uses them.
ARRAY, OUT, SCRATCH, BOUNCE, STAGING, NEXT_STAGING, NUM_REGISTERS = range(7)
NUM_SHARED = 2


class Address(NamedTuple):
    """The address of some bytes: an offset from the one in a register, in process `pid` if that is not 0.

    Registers of all ranks are numbered consecutively.
    """

    pid: int
    register: int
    offset: int

    def after(self, nbytes: int) -> "Address":
        return self._replace(offset=self.offset + nbytes)


class Chunk(NamedTuple):
    """A chunk of this rank's vector: its array's register, its offset in bytes, and its length in elements."""

    register: int
    offset: int
    length: int


class Reduction(NamedTuple):
    """The op of a reduction; a sum over all ranks is divided by `divisor`, or 1."""

    op: str
    dtype: np.dtype
    divisor: int


class Segmentation(NamedTuple):
    """The number of segments of chunks, and the length from which a copy bypasses the caches."""

    num_segments: int
    streamed_bytes: int


def segmentation(row: Algorithm, chunk_bytes: int, size: int, on_host: bool = True) -> Segmentation:
    """Choose the segments for an algorithm, and for chunks of which the longest on any rank has so many bytes.

    Copies of long vectors bypass the caches, and so do copies to memory that others have just read: each line would
    have to be invalidated in their caches first.
    """
    num_segments = row.num_segments(chunk_bytes)
    if not on_host and row.segmented:
        num_segments = max(1, -(-chunk_bytes // DEVICE_BYTES))
    read_before = row.access == Access.DIRECT and row.segmented
    streams = read_before or (row.access != Access.STAGED and chunk_bytes * size >= CACHED_BYTES)
    return Segmentation(num_segments, STREAMED_BYTES if streams else NEVER)


def whole(nbytes: int) -> Segmentation:
    """Choose a single segment, for a vector of so many bytes."""
    return Segmentation(1, STREAMED_BYTES if nbytes >= CACHED_BYTES else NEVER)


def phases_of(rounds: Sequence[Round]) -> list[list[Move]]:
    """Return the moves between barriers, in their order.

    >>> phases_of([(Copy(range(1), range(1, 2)),), (Barrier((0, 1)),), (Get(1, range(1), range(1)),)])
    [[Copy(source=range(0, 1), run=range(1, 2))], [Get(source=1, theirs=range(0, 1), run=range(0, 1))]]
    """
    phases: list[list[Move]] = [[]]
    for moves in rounds:
        for move in moves:
            if isinstance(move, Barrier):
                phases.append([])
            else:
                phases[-1].append(move)
    return phases


class PhaseWork(NamedTuple):
    """A copy from one source, or a reduction of several; a barrier where there is no target."""

    target: Address | None = None
    sources: Sequence[Address] = ()
    nbytes: int = 0


class Phases:
    """The phases of one rank, as work at addresses.

    `layouts` has the addresses of each rank's chunks; `lengths` are this rank's in elements.  Chunks from `width` on
    are staging buffers, which hold one segment at a time: each in two successive registers, for alternate segments.
    """

    def __init__(
        self,
        rank: int,
        layouts: Mapping[int, Sequence[Address]],
        buffers: "BufferPlan",
        segmentation: Segmentation,
        reduction: Reduction,
    ):
        self.rank, self.layouts, self.lengths, self.width = rank, layouts, buffers.lengths, buffers.width
        self.num_segments, self.streamed_bytes = segmentation
        self.reduction = reduction

    def pipeline(self, rounds: Sequence[Round]) -> Iterator[PhaseWork]:
        """Yield the work of all steps of a pipeline."""
        phases = phases_of(rounds)
        num_steps = self.num_segments + len(phases) - 1
        for step in range(num_steps):
            for index in reversed(range(len(phases))):
                if 0 <= step - index < self.num_segments:
                    for move in phases[index]:
                        yield from self.work(move, step - index)
            if step < num_steps - 1:
                yield PhaseWork()

    def work(self, move: Move, segment: int) -> Iterator[PhaseWork]:
        def at(rank: int, run: range, position: int, begin: int) -> Address:
            return self.address(rank, run[position], begin, segment % TURNS)

        assert not isinstance(move, Send | Recv | RecvReduce | Barrier)
        me = self.rank
        own = move.source if isinstance(move, Copy) else move.run
        for position, begin, nbytes in self.pieces(own, segment):
            here = at(me, move.run, position, begin)
            match move:
                case Copy(source, _):
                    yield PhaseWork(here, [at(me, source, position, begin)], nbytes)
                case Get(source, theirs, _):
                    yield PhaseWork(here, [at(source, theirs, position, begin)], nbytes)
                case Put(to, _, theirs):
                    yield PhaseWork(at(to, theirs, position, begin), [here], nbytes)
                case GetReduce(sources, theirs, _):
                    yield PhaseWork(here, [at(s, theirs, position, begin) for s in sources], nbytes)

    def pieces(self, run: range, segment: int) -> Iterator[tuple[int, int, int]]:
        """Yield a run's parts of a segment: the chunk of the run, the offset and the number of bytes."""
        size = self.reduction.dtype.itemsize
        lengths = [self.lengths[chunk] * size for chunk in run]
        if self.num_segments == 1:
            lengths = [sum(lengths)]
        for position, length in enumerate(lengths):
            step = step_bytes(length, self.num_segments)
            if segment * step < length:
                yield position, segment * step, min(step, length - segment * step)

    def address(self, rank: int, chunk: int, begin: int, turn: int) -> Address:
        first = self.layouts[rank][chunk]
        return first._replace(register=first.register + turn) if chunk >= self.width else first.after(begin)


class BufferPlan(NamedTuple):
    """A rank's chunks, and its staging buffers after them: `steps` are the buffers' bytes per segment, of one turn."""

    lengths: list[int]  # in elements
    width: int  # the number of chunks
    steps: list[int]

    @classmethod
    def of(
        cls, rounds: Sequence[Round], chunks: Sequence[Chunk], size: int, segmentation: Segmentation, dtype: np.dtype
    ) -> "BufferPlan":
        """Return the buffers that the rounds of a rank among `size` need."""
        lengths, width = [chunk.length for chunk in chunks], len(chunks)
        stages = {chunk for moves in rounds for m in moves for chunk in stages_of(m, width)}
        stage_lengths = [lengths[i % size] if width + i in stages else 0 for i in range(2 * size if width else 0)]
        steps = [step_bytes(n * dtype.itemsize, segmentation.num_segments) if n else 0 for n in stage_lengths]
        return cls(lengths + stage_lengths, width, steps)

    @property
    def turn_bytes(self) -> int:
        """The stride in bytes between turns."""
        return -(-sum(self.steps) // LINE_BYTES) * LINE_BYTES


def step_bytes(nbytes: int, num_segments: int) -> int:
    """Return the bytes of a segment: whole cache lines, unless it is the only one."""
    if num_segments == 1:
        return nbytes
    return max(LINE_BYTES, -(-nbytes // (num_segments * LINE_BYTES)) * LINE_BYTES)


def peers_of(rounds: Sequence[Round], rank: int) -> list[int]:
    """Return the other ranks at a rank's barriers."""
    groups = {m.ranks for moves in rounds for m in moves if isinstance(m, Barrier)}
    assert len(groups) <= 1, f"a program's meetings are all of the same ranks, not of {groups}"
    return [peer for peer in next(iter(groups), ()) if peer != rank]


def stages_of(move: Move, width: int) -> Iterator[int]:
    """Yield this rank's staging buffers that a move reads or writes."""
    runs = () if isinstance(move, Barrier) else (move.run, move.source) if isinstance(move, Copy) else (move.run,)
    return (chunk for run in runs for chunk in run if chunk >= width)


# --- where the ranks' memory is ---


class ExportedMemory(NamedTuple):
    """A rank's memory as the others see it: its process, and the addresses of its shared arrays.

    An array is in a window of symmetric memory, which has a key and an address in the process; or in none, 0.
    """

    pid: int
    turn_bytes: int
    keys: list[int]
    windows: list[int]
    addresses: list[int]
    offsets: list[int]  # of its chunks and staging buffers


class DirectBinder:
    """Binder of direct schedules: exchanges the addresses of chunks, and lays out staging buffers.

    `meanwhile` is called now and then while a program waits.
    """

    def __init__(self, context: "Context", meanwhile: Callable[[], Any] | None = None):
        self.context, self.meanwhile = context, meanwhile
        self.rank, self.world_ranks, self.agreement = context.rank, context.world_ranks, context.agreement
        self.memory, self.oversubscribed = context.memory.of_host, context.progress.oversubscribed

    def exchange(
        self, arrays: Sequence[Any], chunks: Sequence[Chunk], buffers: BufferPlan, turn_bytes: int
    ) -> list[ExportedMemory]:
        """Return every rank's memory.  Collective."""
        windows = [self.memory.windows.window_of(array) for array in arrays[:NUM_SHARED]]
        exported = [window.key if window else 0 for window in windows]
        exported += [window.address if window else 0 for window in windows]
        exported += [address_of(array) for array in arrays[:NUM_SHARED]]
        stages = list(accumulate(buffers.steps[:-1], initial=0))[: len(buffers.steps)]
        shared = [chunk.offset for chunk in chunks if chunk.register < NUM_SHARED]
        rows = self.agreement.gather_rows([os.getpid(), turn_bytes, *exported, *shared, *stages]).tolist()
        return [
            ExportedMemory(pid, nbytes, words[:2], words[2:4], words[4:6], offsets=words[6:])
            for pid, nbytes, *words in rows
        ]

    def layouts(
        self, ranks: Sequence[int], rows: Sequence[ExportedMemory], chunks: Sequence[Chunk]
    ) -> dict[int, list[Address]]:
        """Return the addresses of the chunks and staging buffers of these ranks, whose registers are consecutive."""
        layouts: dict[int, list[Address]] = {}
        for nth, rank in enumerate(ranks):
            memory, offsets = rows[rank], rows[rank].offsets
            num_shared = sum(chunk.register < NUM_SHARED for chunk in chunks)
            own = [chunk.offset for chunk in chunks[num_shared:]]  # not read by other ranks
            offsets = offsets[:num_shared] + own + offsets[num_shared:]
            pids = [0 if nth == 0 or base is not None else memory.pid for base in self.mapped(rank, memory)]
            addresses = []
            for position, offset in enumerate(offsets):
                register = chunks[position].register if position < len(chunks) else STAGING
                pid = pids[register] if register < NUM_SHARED else 0
                addresses.append(Address(pid, nth * NUM_REGISTERS + register, offset))
            layouts[rank] = addresses
        return layouts

    def mapped(self, rank: int, exported: ExportedMemory) -> list[int | None]:
        """Return the addresses in this process of the windows of a rank's shared arrays; None where there is none."""
        windows = [self.memory.windows.by_key.get(key) for key in exported.keys]
        return [window.bases.get(self.world_ranks[rank]) if window else None for window in windows]
