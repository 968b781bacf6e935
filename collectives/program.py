"""Compiles direct rounds to programs: schedules of one node's ranks that read each other's memory.

The rounds between two meetings are a *phase*.  Long chunks are cut into segments, and the phases are run as a
pipeline: at each step, phase j works on segment step - j, so that one meeting a step serves all of them, and what one
phase leaves in the cache the next one finds there.  Segments do not overlap, so a schedule that is right for one is
right for all.  A stage has room for two segments, used in turn, across runs as well.
"""

import ctypes
import os
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import accumulate, chain
from typing import Any, NamedTuple

import numpy as np

from collectives import kernels, memory
from collectives.algorithms import Algorithm, Reach
from collectives.arrays import BFLOAT16, Device
from collectives.errors import CommunicationError
from collectives.memory import Lease, Place, SymmetricMemory
from collectives.schedule import Copy, Meet, Move, Parts, Pull, PullFold, Push, Recv, Round, Send, show_ranks
from collectives.schedule import Fold as FoldMessage

PIPELINED_BYTES = 1 << 20  # a segment of a chunk, where several phases follow each other
STAGED_BYTES = 1 << 18  # the same where it goes by way of a stage, which should stay in a core's cache
PIECE_BYTES = 1 << 17  # read at a time from memory that only the system reaches
STREAMED_BYTES = 1 << 15  # a copy that goes past the caches, where that is better
CACHED_BYTES = 1 << 22  # a vector that the caches hold
NEVER = 1 << 62
LINE_BYTES = 64
TURNS = 2  # how many segments a stage has room for
POLLS = 20_000  # looks before a waiting program gives control back; where ranks must give up the core:
POLLS_CROWDED = 100
BRIEF_POLLS = 20  # of who only looks in

FORMS = {BFLOAT16: kernels.BFLOAT16, np.dtype("float16"): kernels.FLOAT16}
BIT_OPCODES = {"band": kernels.BAND, "bor": kernels.BOR, "bxor": kernels.BXOR}
OPCODES = {"sum": kernels.SUM, "prod": kernels.PROD, "min": kernels.MIN, "max": kernels.MAX} | BIT_OPCODES
OPCODES["avg"] = kernels.SUM  # and divided


class Spot(NamedTuple):
    """Where some bytes are: at an address of this process, or of process `pid` where that is not 0."""

    pid: int
    address: int

    def after(self, nbytes: int) -> "Spot":
        return Spot(self.pid, self.address + nbytes)


class Layout(NamedTuple):
    """A rank's working vector as another one finds it: where each chunk begins, and how far turns are apart."""

    chunks: list[Spot]
    turn_bytes: int


class Fold(NamedTuple):
    """How to reduce: `divisor` is what a sum over all ranks is divided by, or 1."""

    op: str
    dtype: np.dtype
    divisor: int


class Cut(NamedTuple):
    """In how many segments chunks are worked on, and how long a copy must be to go past the caches."""

    num_segments: int
    streamed_bytes: int


def cut(row: Algorithm, chunk_bytes: int, size: int) -> Cut:
    """For an algorithm, and chunks of which the longest on any rank has so many bytes.

    Past the caches go copies of long vectors, and those to where others have just read: their caches would have to
    give up each line first.
    """
    segment_bytes = STAGED_BYTES if row.reach == Reach.STAGES else PIPELINED_BYTES
    num_segments = max(1, -(-chunk_bytes // segment_bytes)) if row.segmented else 1
    read_before = row.reach == Reach.ARRAYS and row.segmented
    streams = read_before or chunk_bytes * size >= CACHED_BYTES
    return Cut(num_segments, STREAMED_BYTES if streams else NEVER)


def whole(nbytes: int) -> Cut:
    """Without segments, for a vector of so many bytes."""
    return Cut(1, STREAMED_BYTES if nbytes >= CACHED_BYTES else NEVER)


def phases_of(rounds: Sequence[Round]) -> list[list[Move]]:
    """The moves between meetings, in their order.

    >>> phases_of([(Copy(range(1), range(1, 2)),), (Meet((0, 1)),), (Pull(1, range(1), range(1)),)])
    [[Copy(source=range(0, 1), run=range(1, 2))], [Pull(source=1, theirs=range(0, 1), run=range(0, 1))]]
    """
    phases: list[list[Move]] = [[]]
    for moves in rounds:
        for move in moves:
            if isinstance(move, Meet):
                phases.append([])
            else:
                phases[-1].append(move)
    return phases


class Compiler:
    """Writes programs for the phases of one rank.

    `lengths` are the own chunks' in elements; chunks from `width` on are stages, which hold a segment at a time.
    """

    def __init__(self, rank: int, layouts: list[Layout], lengths: list[int], width: int, cut: Cut, fold: Fold):
        self.rank, self.layouts, self.lengths, self.width = rank, layouts, lengths, width
        self.num_segments, self.streamed_bytes, self.fold = cut.num_segments, cut.streamed_bytes, fold
        self.bounce: list[np.ndarray] = []

    def compile(self, parts: Sequence[list[list[Move]]], turn: int) -> np.ndarray:
        """The phases of each part, with pauses between the parts."""
        code: list[int] = []
        for nth, phases in enumerate(parts):
            if nth:
                instruction(code, kernels.PAUSE)
            self.pipeline(code, phases, turn)
        return np.array(code, np.int64)

    def pipeline(self, code: list[int], phases: list[list[Move]], turn: int) -> None:
        """All steps of a pipeline, the first segment being the stages' turn `turn`."""
        num_steps = self.num_segments + len(phases) - 1
        for step in range(num_steps):
            for index in reversed(range(len(phases))):
                if 0 <= step - index < self.num_segments:
                    for move in phases[index]:
                        self.write(code, move, step - index, turn)
            if step < num_steps - 1:
                instruction(code, kernels.MEET)

    def write(self, code: list[int], move: Move, segment: int, turn: int) -> None:
        def spot(rank: int, run: range, place: int, begin: int) -> Spot:
            return self.spot(rank, run[place], begin, (segment + turn) % TURNS)

        assert not isinstance(move, Send | Recv | FoldMessage | Meet)
        me = self.rank
        own = move.source if isinstance(move, Copy) else move.run
        for place, begin, nbytes in self.pieces(own, segment):
            here = spot(me, move.run, place, begin)
            match move:
                case Copy(source, _):
                    self.copy(code, here, spot(me, source, place, begin), nbytes)
                case Pull(source, theirs, _):
                    self.copy(code, here, spot(source, theirs, place, begin), nbytes)
                case Push(to, _, theirs):
                    self.copy(code, spot(to, theirs, place, begin), here, nbytes)
                case PullFold(sources, theirs, _):
                    self.reduce(code, here, [spot(s, theirs, place, begin) for s in sources], nbytes)

    def pieces(self, run: range, segment: int) -> Iterator[tuple[int, int, int]]:
        """A run's part of a segment: at which chunk of the run, from which byte, how many bytes."""
        size = self.fold.dtype.itemsize
        lengths = [self.lengths[chunk] * size for chunk in run]
        if self.num_segments == 1:
            lengths = [sum(lengths)]
        for place, length in enumerate(lengths):
            step = step_bytes(length, self.num_segments)
            if segment * step < length:
                yield place, segment * step, min(step, length - segment * step)

    def spot(self, rank: int, chunk: int, begin: int, turn: int) -> Spot:
        layout = self.layouts[rank]
        return layout.chunks[chunk].after(turn * layout.turn_bytes if chunk >= self.width else begin)

    def copy(self, code: list[int], target: Spot, source: Spot, nbytes: int) -> None:
        if source.pid:
            instruction(code, kernels.PEEK, target.address, source.address, nbytes, source.pid)
        elif target.pid:
            instruction(code, kernels.POKE, source.address, target.address, nbytes, target.pid)
        elif target != source:
            opcode = kernels.STREAM if nbytes >= self.streamed_bytes else kernels.COPY
            instruction(code, opcode, target.address, source.address, nbytes)

    def reduce(self, code: list[int], target: Spot, sources: list[Spot], nbytes: int) -> None:
        if not any(source.pid for source in sources):
            self.add(code, target, sources, nbytes)
            return
        if not self.bounce:
            self.bounce = [np.empty(PIECE_BYTES, np.uint8) for _ in sources]
        for begin in range(0, nbytes, PIECE_BYTES):
            length = min(PIECE_BYTES, nbytes - begin)
            here = []
            for source, buffer in zip(sources, self.bounce, strict=True):
                brought = Spot(0, buffer.ctypes.data) if source.pid else source.after(begin)
                self.copy(code, brought, source.after(begin), length)
                here.append(brought)
            self.add(code, target.after(begin), here, length)

    def add(self, code: list[int], target: Spot, sources: list[Spot], nbytes: int) -> None:
        op, dtype, divisor = self.fold
        if len(sources) == 1:
            self.copy(code, target, sources[0], nbytes)
            return
        opcode = kernels.FOLD16 if dtype in FORMS else kernels.FOLD
        numbers = target.address, nbytes // dtype.itemsize, OPCODES[op], divisor, FORMS.get(dtype, 0)
        instruction(code, opcode, *numbers, *(source.address for source in sources))


def instruction(code: list[int], opcode: int, *operands: int) -> None:
    code += [opcode, 2 + len(operands), *operands]


def step_bytes(nbytes: int, num_segments: int) -> int:
    """How long a segment is: whole cache lines, unless it is the only one."""
    if num_segments == 1:
        return nbytes
    return max(LINE_BYTES, -(-nbytes // (num_segments * LINE_BYTES)) * LINE_BYTES)


class Program:
    """A program of this rank, run again and again, from pause to pause; waited for as messages are.

    `meanwhile` is done now and then while it waits.
    """

    number, moves = 0, ()

    def __init__(
        self,
        codes: list[np.ndarray],
        flags: np.ndarray,
        dtype: np.dtype,
        crowded: bool,
        meanwhile: Callable[[], Any] | None = None,
    ):
        self.meanwhile = meanwhile
        work = np.empty(2 * kernels.BLOCK_BYTES, np.uint8)
        self.keep: list[Any] = [codes, work]
        self.frame = np.zeros(kernels.FRAME_LENGTH, np.int64)
        self.frame[kernels.POLLS] = POLLS_CROWDED if crowded else POLLS
        self.frame[kernels.CROWDED] = crowded
        self.frame[kernels.FLAGS : kernels.WORK + 1] = flags.ctypes.data, len(flags), work.ctypes.data
        for turn in range(TURNS):
            code = codes[turn % len(codes)]
            place = kernels.CODE + 2 * turn
            self.frame[place : place + 2] = code.ctypes.data, len(code)
        self.arguments = self.frame.ctypes.data, like(dtype)
        self.flags = flags
        self.peers: list[int] = []  # whose flags come after the own one

    def test(self) -> bool:
        """Run on as far as the others have come; whether that was the end, or a pause."""
        polls, self.frame[kernels.POLLS] = self.frame[kernels.POLLS], BRIEF_POLLS
        ended = self.try_long()
        self.frame[kernels.POLLS] = polls
        return ended

    def try_long(self) -> bool:
        """Run on, and stay for a while where others are to come; whether that was the end, or a pause."""
        answer = kernels.run(*self.arguments)
        if answer == kernels.FAILED:
            raise CommunicationError("the memory of another rank cannot be reached any more: has it ended?")
        if answer == kernels.WAITING and self.meanwhile:
            self.meanwhile()
        return answer == kernels.ENDED

    def wait(self) -> None:
        while not self.try_long():
            pass

    def run(self, device: Device) -> Iterator["Program"]:
        if not self.test():
            yield self

    def requests(self) -> list:
        return []

    def awaits(self) -> str:
        late = [peer for peer, count in zip(self.peers, self.counts(), strict=True) if count < self.met]
        return f"to meet rank{'s' * (len(late) > 1)} {show_ranks(late)}" if late else "on its way"

    @property
    def met(self) -> int:
        """How many meetings this rank has come to, in all runs."""
        return int(self.frame[kernels.MEETINGS])

    def counts(self) -> list[int]:
        """The same of its peers, as they show it at this moment."""
        return [ctypes.c_int64.from_address(address).value for address in self.flags[1:].tolist()]


def like(dtype: np.dtype) -> Any:
    """A number for which the kernels are compiled: bools are folded as bytes, 16-bit floats by code of their own."""
    return np.dtype(np.float32 if dtype in FORMS else np.uint8 if dtype == np.dtype(bool) else dtype).type(0)


class ProgramBinder:
    """Turns a rank's direct rounds into a program: finds out where the others' chunks are, and lays out stages."""

    def __init__(
        self,
        world_ranks: Sequence[int],
        memory: SymmetricMemory,
        gather_rows: Callable,
        crowded: bool,
        meanwhile: Callable[[], Any] | None = None,
    ):
        self.world_ranks, self.memory, self.gather_rows = world_ranks, memory, gather_rows
        self.crowded, self.meanwhile = crowded, meanwhile

    def bind(
        self, parts: Parts, views: list[Any], fold: Fold, rank: int, cut: Cut, scratch: Sequence[Any] = ()
    ) -> Program:
        """Collective: `views` are the chunks of the own vector, None where it has none; stages come behind them.

        Or `scratch`: chunks that no other rank reads.
        """
        rounds = [moves for part in parts for moves in part]
        chunks = [*views, *scratch]
        width, size = len(chunks), len(self.world_ranks)
        lengths = [0 if view is None else len(view) for view in chunks]
        used = {chunk for moves in rounds for m in moves for chunk in stages_of(m, width)}
        staged = [lengths[i % size] if width + i in used else 0 for i in range(2 * size if width else 0)]
        steps = [step_bytes(length * fold.dtype.itemsize, cut.num_segments) if length else 0 for length in staged]
        turn_bytes = -(-sum(steps) // LINE_BYTES) * LINE_BYTES
        lease = self.memory.allocate(LINE_BYTES + TURNS * turn_bytes)
        memory.array(lease, 1, np.dtype(np.int64))[:] = 0  # this rank's count of meetings
        begin = lease.block.offset + LINE_BYTES
        stages = [Place(lease.block.window.key, begin + before) for before in accumulate(steps[:-1], initial=0)]
        places = [Place(0, 0) if view is None else self.memory.windows.place(view) for view in views]
        if self.memory.node_comm.rank == 0:
            compile_for(fold.dtype)  # the others find it on disk then
        rows = self.gather_rows([os.getpid(), turn_bytes, *chain(*places, *stages[: len(steps)])])
        compile_for(fold.dtype)
        layouts = [self.layout(other, row.tolist(), mine=other == rank) for other, row in enumerate(rows)]
        layouts[rank].chunks[len(views) : len(views)] = [Spot(0, view.ctypes.data) for view in scratch]
        compiler = Compiler(rank, layouts, lengths + staged, width, cut, fold)
        turns = range(TURNS) if cut.num_segments % 2 else range(1)  # the next run goes on where this one ends
        codes = [compiler.compile(list(map(phases_of, parts)), turn) for turn in turns]
        program = Program(codes, self.flags(rounds, rank, lease), fold.dtype, self.crowded, self.meanwhile)
        program.keep += [lease, compiler.bounce, chunks]
        program.peers = peers_of(rounds, rank)
        return program

    def layout(self, rank: int, row: list[int], mine: bool) -> Layout:
        """A rank's chunks as this process finds them."""
        pid, turn_bytes, *places = row
        chunks = []
        for key, offset in zip(places[::2], places[1::2], strict=True):
            window = self.memory.windows.by_key.get(key)
            base = window.bases.get(self.world_ranks[rank]) if window else None
            chunks.append(Spot(0 if mine else pid, offset) if base is None else Spot(0, base + offset))
        return Layout(chunks, turn_bytes)

    def flags(self, rounds: Sequence[Round], rank: int, lease: Lease) -> np.ndarray:
        """Addresses of the counts of meetings: the own one, then those of the ranks to meet."""
        bases, offset = lease.block.window.bases, lease.block.offset
        return np.array([bases[self.world_ranks[r]] + offset for r in (rank, *peers_of(rounds, rank))], np.int64)


def peers_of(rounds: Sequence[Round], rank: int) -> list[int]:
    """The other ranks that a rank meets."""
    groups = {m.ranks for moves in rounds for m in moves if isinstance(m, Meet)}
    assert len(groups) <= 1, f"a program's meetings are all of the same ranks, not of {groups}"
    return [peer for peer in next(iter(groups), ()) if peer != rank]


def stages_of(move: Move, width: int) -> Iterator[int]:
    """The own stages that a move reads or writes."""
    runs = () if isinstance(move, Meet) else (move.run, move.source) if isinstance(move, Copy) else (move.run,)
    return (chunk for run in runs for chunk in run if chunk >= width)


@cache
def compile_for(dtype: np.dtype) -> None:
    """Compile the kernels, or load them from disk."""
    Program([np.empty(0, np.int64)], np.zeros(1, np.int64), dtype, crowded=False).test()
