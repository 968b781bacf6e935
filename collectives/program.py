"""Compiles direct rounds to programs: schedules of one node's ranks that read each other's memory on the host."""

import ctypes
import os
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import accumulate, chain
from typing import Any

import numpy as np

from collectives import kernels, memory
from collectives.arrays import BFLOAT16, pointer
from collectives.device import Device
from collectives.errors import CommunicationError
from collectives.memory import Lease, Place, SymmetricMemory
from collectives.phases import LINE_BYTES, TURNS, Cut, Fold, Layout, Space, Spot, Walk, peers_of
from collectives.schedule import Parts, Round, show_ranks

PIECE_BYTES = 1 << 17  # read at a time from memory that only the system reaches
SPINS = 150_000  # looks, some 50 us, before a waiting program gives up the core
YIELDS = 20  # of the core, before it gives control back
BRIEF_SPINS = 20  # of who only looks in

FORMS = {BFLOAT16: kernels.BFLOAT16, np.dtype("float16"): kernels.FLOAT16}
BIT_OPCODES = {"band": kernels.BAND, "bor": kernels.BOR, "bxor": kernels.BXOR}
OPCODES = {"sum": kernels.SUM, "prod": kernels.PROD, "min": kernels.MIN, "max": kernels.MAX} | BIT_OPCODES
OPCODES["avg"] = kernels.SUM  # and divided


class Compiler(Walk):
    """Writes phases as a program."""

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        self.code: list[int] = []
        self.bounce: list[np.ndarray] = []

    def compile(self, parts: Parts, turn: int) -> np.ndarray:
        self.code = []
        self.walk(parts, turn)
        return np.array(self.code, np.int64)

    def meet(self) -> None:
        self.instruction(kernels.MEET)

    def pause(self) -> None:
        self.instruction(kernels.PAUSE)

    def instruction(self, opcode: int, *operands: int) -> None:
        self.code += [opcode, 2 + len(operands), *operands]

    def copy(self, target: Spot, source: Spot, nbytes: int) -> None:
        if source.pid:
            self.instruction(kernels.PEEK, target.address, source.address, nbytes, source.pid)
        elif target.pid:
            self.instruction(kernels.POKE, source.address, target.address, nbytes, target.pid)
        elif target != source:
            opcode = kernels.STREAM if nbytes >= self.streamed_bytes else kernels.COPY
            self.instruction(opcode, target.address, source.address, nbytes)

    def reduce(self, target: Spot, sources: list[Spot], nbytes: int) -> None:
        if not any(source.pid for source in sources):
            self.add(target, sources, nbytes)
            return
        if not self.bounce:
            self.bounce = [np.empty(PIECE_BYTES, np.uint8) for _ in sources]
        for begin in range(0, nbytes, PIECE_BYTES):
            length = min(PIECE_BYTES, nbytes - begin)
            here = []
            for source, buffer in zip(sources, self.bounce, strict=True):
                brought = Spot(0, buffer.ctypes.data) if source.pid else source.after(begin)
                self.copy(brought, source.after(begin), length)
                here.append(brought)
            self.add(target.after(begin), here, length)

    def add(self, target: Spot, sources: list[Spot], nbytes: int) -> None:
        op, dtype, divisor = self.fold
        if len(sources) == 1:
            self.copy(target, sources[0], nbytes)
            return
        opcode = kernels.FOLD16 if dtype in FORMS else kernels.FOLD
        numbers = target.address, nbytes // dtype.itemsize, OPCODES[op], divisor, FORMS.get(dtype, 0)
        self.instruction(opcode, *numbers, *(source.address for source in sources))


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
        self.frame[kernels.SPINS] = 0 if crowded else SPINS
        self.frame[kernels.YIELDS] = YIELDS
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
        limits = slice(kernels.SPINS, kernels.YIELDS + 1)
        spins, spun, yields = self.frame[limits].tolist()
        self.frame[limits] = BRIEF_SPINS, spun, 0
        ended = self.linger()
        self.frame[kernels.SPINS], self.frame[kernels.YIELDS] = spins, yields
        return ended

    def linger(self) -> bool:
        """Run on, and stay for a while where others are to come; whether that was the end, or a pause."""
        answer = kernels.run(*self.arguments)
        if answer == kernels.FAILED:
            raise CommunicationError("the memory of another rank cannot be reached any more: has it ended?")
        if answer == kernels.WAITING and self.meanwhile:
            self.meanwhile()
        return answer == kernels.ENDED

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
        space = self.space(rounds, [*views, *scratch], cut, fold)
        lease = self.memory.allocate(LINE_BYTES + TURNS * space.turn_bytes)
        flags = self.flags(rounds, rank, lease)
        begin = Place(lease.block.window.key, lease.block.offset + LINE_BYTES)
        if self.memory.node_comm.rank == 0:
            compile_for(fold.dtype)  # the others find it on disk then
        layouts = self.layouts(space, views, scratch, rank, begin)
        compile_for(fold.dtype)
        compiler = Compiler(rank, layouts, space, cut, fold)
        turns = range(TURNS) if cut.num_segments % 2 else range(1)  # the next run goes on where this one ends
        codes = [compiler.compile(parts, turn) for turn in turns]
        program = Program(codes, flags, fold.dtype, self.crowded, self.meanwhile)
        program.keep += [lease, compiler.bounce, views, scratch]
        program.peers = peers_of(rounds, rank)
        return program

    def space(self, rounds: Sequence[Round], chunks: list[Any], cut: Cut, fold: Fold) -> Space:
        lengths = [0 if view is None else len(view) for view in chunks]
        return Space.of(rounds, lengths, len(self.world_ranks), cut, fold.dtype)

    def layouts(self, space: Space, views: list[Any], scratch: Sequence[Any], rank: int, begin: Place) -> list[Layout]:
        """Where every rank's chunks, and its stages, which begin at `begin`, are for this process.  Collective."""
        stages = [Place(begin.key, begin.offset + before) for before in accumulate(space.steps[:-1], initial=0)]
        places = [Place(0, 0) if view is None else self.memory.windows.place(view) for view in views]
        rows = self.gather_rows([os.getpid(), space.turn_bytes, *chain(*places, *stages[: len(space.steps)])])
        layouts = [self.layout(other, row.tolist(), mine=other == rank) for other, row in enumerate(rows)]
        layouts[rank].chunks[len(views) : len(views)] = [Spot(0, pointer(view)) for view in scratch]
        return layouts

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
        """Addresses of the counts of meetings: the own one, which begins at 0, then those of the ranks to meet."""
        memory.array(lease, 1, np.dtype(np.int64))[:] = 0
        bases, offset = lease.block.window.bases, lease.block.offset
        return np.array([bases[self.world_ranks[r]] + offset for r in (rank, *peers_of(rounds, rank))], np.int64)


@cache
def compile_for(dtype: np.dtype) -> None:
    """Compile the kernels, or load them from disk."""
    Program([np.empty(0, np.int64)], np.zeros(1, np.int64), dtype, crowded=False).test()
