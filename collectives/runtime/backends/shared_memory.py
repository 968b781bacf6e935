"""Compile direct rounds to programs: schedules of one node's ranks that read each other's memory on the host."""

import ctypes
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import chain
from typing import Any

import numpy as np
from mpi4py import MPI

from collectives.arrays.addresses import address_of, pointer
from collectives.arrays.device import TURNS, Device
from collectives.arrays.ops import BFLOAT16
from collectives.job.launch import communication_error, refuse_after_fork
from collectives.runtime.backends import kernels
from collectives.runtime.backends.channel import Channel
from collectives.runtime.backends.compiler import run_unkept
from collectives.runtime.backends.phases import (
    BOUNCE,
    LINE_BYTES,
    NUM_REGISTERS,
    NUM_SHARED,
    SCRATCH,
    STAGING,
    Address,
    BufferPlan,
    Chunk,
    DirectBinder,
    ExportedMemory,
    Phases,
    Reduction,
    Segmentation,
    peers_of,
)
from collectives.runtime.plan import MismatchError, Step
from collectives.runtime.progress import Waitable
from collectives.schedule.moves import Parts, name_ranks
from collectives.schedule.spec import OPS

ENDED = kernels.ENDED
PIECE_BYTES = 1 << 17  # read at a time from memory that is accessed through the system
SPINS = 150_000  # polls, some 50 us, before a waiting program gives up the core
YIELDS = 20  # of the core, before it returns
BRIEF_SPINS = 20  # of a test that does not stay

FORMS = {BFLOAT16: kernels.BFLOAT16, np.dtype("float16"): kernels.FLOAT16}
OPCODES = {name: getattr(kernels, op.kernel) for name, op in OPS.items() if op.kernel}


class Assembler:
    """Writer of a program's instructions."""

    def __init__(self, reduction: Reduction):
        self.reduction = reduction
        self.code: list[int] = []

    def instruction(self, opcode: int, *operands: int) -> None:
        self.code += [opcode, 2 + len(operands), *operands]

    def add(self, target: Address, sources: Sequence[Address], nbytes: int) -> None:
        op, dtype, divisor = self.reduction
        opcode = kernels.REDUCE16 if dtype in FORMS else kernels.REDUCE
        numbers = nbytes // dtype.itemsize, OPCODES[op], divisor, FORMS.get(dtype, 0)
        self.instruction(opcode, *target[1:], *numbers, *chain(*(source[1:] for source in sources)))


class Compiler(Phases, Assembler):
    """Compiler of phases to a program."""

    def __init__(self, *arguments: Any):
        Phases.__init__(self, *arguments)
        Assembler.__init__(self, self.reduction)
        self.num_bounced = 0  # sources of one reduction that are read through a buffer

    def compile(self, parts: Parts) -> np.ndarray:
        """Return the code of all parts, with pauses between them."""
        for nth, part in enumerate(parts):
            if nth:
                self.instruction(kernels.PAUSE)
            for target, sources, nbytes in self.pipeline(part):
                if target is None:
                    self.instruction(kernels.BARRIER)
                elif len(sources) == 1:
                    self.copy(target, sources[0], nbytes)
                else:
                    self.reduce(target, sources, nbytes)
        return np.array(self.code, np.int64)

    def copy(self, target: Address, source: Address, nbytes: int) -> None:
        if source.pid:
            self.instruction(kernels.READ, *target[1:], *source[1:], nbytes, source.pid)
        elif target.pid:
            self.instruction(kernels.WRITE, *source[1:], *target[1:], nbytes, target.pid)
        elif target != source:
            opcode = kernels.STREAM if nbytes >= self.streamed_bytes else kernels.COPY
            self.instruction(opcode, *target[1:], *source[1:], nbytes)

    def reduce(self, target: Address, sources: Sequence[Address], nbytes: int) -> None:
        if not any(source.pid for source in sources):
            self.add(target, sources, nbytes)
            return
        self.num_bounced = max(self.num_bounced, len(sources))
        for begin in range(0, nbytes, PIECE_BYTES):
            length = min(PIECE_BYTES, nbytes - begin)
            here = []
            for nth, source in enumerate(sources):
                local = Address(0, BOUNCE, nth * PIECE_BYTES) if source.pid else source.after(begin)
                self.copy(local, source.after(begin), length)
                here.append(local)
            self.add(target.after(begin), here, length)


class Program(Step, Waitable):
    """A program of this rank, run repeatedly, from pause to pause; waited for as messages are.

    `addresses` are those of its two arrays, which may change with each run; `number`, if not 0, is the run's, which
    ranks compare.  `meanwhile` is called now and then while it waits.
    """

    is_short = True

    def __init__(
        self,
        code: np.ndarray,
        channel: Channel,
        dtype: np.dtype,
        oversubscribed: bool,
        meanwhile: Callable[[], Any] | None = None,
        binding: int = 0,
        is_odd: bool = False,
    ):
        self.channel, self.meanwhile = channel, meanwhile
        num_slots = len(channel.slots)
        self.registers = np.zeros((TURNS, num_slots, NUM_REGISTERS), np.int64)
        self.bases = np.zeros((num_slots, kernels.BASES_LENGTH), np.int64)
        self.keys: tuple[int, ...] = (0,) * NUM_SHARED  # of the windows that its arrays are in
        work = np.empty(2 * kernels.BLOCK_BYTES, np.uint8)
        self.keep: list[Any] = [code, work]
        self.frame = np.zeros(kernels.FRAME_LENGTH, np.int64)
        self.frame[kernels.SPINS] = 0 if oversubscribed else SPINS
        self.frame[kernels.YIELDS] = YIELDS
        self.frame[kernels.CHANNEL] = channel.state.ctypes.data
        self.frame[kernels.SLOTS : kernels.WORK + 1] = channel.slots.ctypes.data, num_slots, work.ctypes.data
        self.frame[kernels.WAITS] = channel.waits.ctypes.data
        self.frame[kernels.CODE : kernels.CODE_LENGTH + 1] = code.ctypes.data, len(code)
        self.frame[kernels.REGISTERS : kernels.BASES + 1] = self.registers.ctypes.data, self.bases.ctypes.data
        self.frame[kernels.BINDING], self.frame[kernels.ODD] = binding, is_odd
        self.address, self.like, self.interpreter = self.frame.ctypes.data, like(dtype), compile_for(dtype)
        self.arguments: tuple = (self.address, self.like, 0, 0, 0)

    def use(self, number: int, addresses: tuple[int, ...], keys: tuple[int, ...], binding: int | None = None) -> None:
        """Set the next run's number, and the addresses and windows of the arrays that it and later runs use."""
        self.arguments = (*self.arguments[:2], number, *addresses)
        if keys != self.keys:
            self.lie_in(keys)
        if binding is not None:
            self.frame[kernels.BINDING] = binding

    def lie_in(self, keys: tuple[int, ...]) -> None:
        """Publish these windows of this rank's arrays to the other ranks, from the next run on."""
        self.keys = keys
        self.bases[0] = [*(self.channel.base(0, key) if key else 0 for key in keys), *keys]

    def launch(self, number: int, array: int, out: int) -> bool:
        """Begin a run on arrays at two addresses, and poll for a while; return whether it has ended.

        Raises: MismatchError.
        """
        answer = self.interpreter(self.address, self.like, number, array, out)
        if answer == ENDED:
            return True
        self.arguments = self.address, self.like, number, array, out
        return self.interpret(answer)

    def windows(self) -> list[Any]:
        by_key = self.channel.memory.windows.by_key
        return [by_key[key] for key in self.bases[:, NUM_SHARED:].ravel().tolist() if key in by_key]

    def follow(self) -> None:
        """Update the addresses of other ranks' arrays, whose windows have changed."""
        parity = self.channel.num_barriers % 2
        registers = self.registers[self.frame[kernels.TURN]]
        for nth, slot in enumerate(self.channel.slots.tolist()[1:], 1):
            line = (ctypes.c_int64 * 8).from_address(slot + parity * LINE_BYTES)
            for index in range(NUM_SHARED):
                offset, key = line[kernels.SLOT_ARRAYS // 8 + index], line[kernels.WINDOWS // 8 + index]
                if key != self.bases[nth, NUM_SHARED + index]:
                    base = self.channel.base(nth, key) if key else 0
                    self.bases[nth, index], self.bases[nth, NUM_SHARED + index] = base, key
                    registers[nth, index] = base + offset

    def test(self) -> bool:
        """Continue as far as the other ranks allow; return whether it is at the end, or at a pause."""
        limits = slice(kernels.SPINS, kernels.YIELDS + 1)
        spins, spun, yields = self.frame[limits].tolist()
        self.frame[limits] = BRIEF_SPINS, spun, 0
        try:
            return self.spin()
        finally:
            self.frame[kernels.SPINS], self.frame[kernels.YIELDS] = spins, yields

    def spin(self) -> bool:
        """Continue, polling for a while where others are late; return whether it is at the end, or at a pause.

        Raises: MismatchError where the ranks run different programs.
        """
        return self.interpret(self.interpreter(*self.arguments))

    def interpret(self, answer: int) -> bool:
        """Act on the interpreter's answer; return whether it is at the end, or at a pause."""
        if answer == kernels.MOVED:
            self.follow()
            answer = self.interpreter(*self.arguments)
        if answer == kernels.FAILED and self.frame[kernels.ERROR]:
            code = int(self.frame[kernels.ERROR])
            raise communication_error(f"a message between nodes has failed: {MPI.Get_error_string(code)}")
        if answer == kernels.FAILED:
            raise communication_error("another rank's memory is no longer accessible: has that rank ended?")
        if answer == kernels.MISMATCH:
            raise MismatchError("ranks run different programs")
        if answer == kernels.WAITING and self.meanwhile:
            self.meanwhile()
        return answer == kernels.ENDED

    def run(self, device: Device) -> Iterator["Program"]:
        if not self.test():
            yield self

    def awaits(self) -> str:
        if not (late := self.channel.late()):
            return super().awaits()
        return f"a barrier that {name_ranks(late)} {'have' if len(late) > 1 else 'has'} not come to"

    @property
    def num_barriers(self) -> int:
        """The number of barriers that this rank has reached, in all runs."""
        return self.channel.num_barriers


refuse_after_fork(Program)


def like(dtype: np.dtype) -> Any:
    """Return a number to compile the kernels for: bools are reduced as bytes, 16-bit floats by separate code.

    Pairs are only moved, as bytes.
    """
    is_of_bytes = dtype == np.dtype(bool) or dtype.names
    return np.dtype(np.float32 if dtype in FORMS else np.uint8 if is_of_bytes else dtype).type(0)


class ProgramBinder(DirectBinder):
    """Binder of a rank's direct rounds to a program."""

    def bind(
        self,
        parts: Parts,
        arrays: Sequence[Any],
        chunks: Sequence[Chunk],
        reduction: Reduction,
        segmentation: Segmentation,
        channel: Channel | None = None,
        binding: int = 0,
    ) -> Program:
        """Bind a program for arrays like these: the input, the result, and one that no other rank reads; None for none.

        On a channel of its own, or on one that it shares with others, among which it is `binding`.  Collective.
        """
        rounds = [moves for part in parts for moves in part]
        buffers = BufferPlan.of(rounds, chunks, len(self.world_ranks), segmentation, reduction.dtype)
        if channel is None:
            ranks = [self.rank, *peers_of(rounds, self.rank)]
            channel = Channel(self.memory, self.world_ranks, ranks, buffers.turn_bytes)
        else:
            channel.reserve(buffers.turn_bytes, self.agreement.highest)
        if self.memory.node_comm.rank == 0:
            compile_for(reduction.dtype)  # then the others find it on disk
        rows = self.exchange(arrays, chunks, buffers, channel.turn_bytes)
        compiler = Compiler(self.rank, self.layouts(channel.ranks, rows, chunks), buffers, segmentation, reduction)
        code = compiler.compile(parts)
        is_odd = segmentation.num_segments % 2 == 1
        program = Program(code, channel, reduction.dtype, self.oversubscribed, self.meanwhile, binding or 1, is_odd)
        self.fill(program, rows, channel)
        program.keep.append(channel.staging)
        own = program.registers[:, 0]
        if compiler.num_bounced:
            bounce = np.empty(compiler.num_bounced * PIECE_BYTES, np.uint8)
            program.keep.append(bounce)
            own[:, BOUNCE] = bounce.ctypes.data
        if arrays[SCRATCH] is not None:
            program.keep.append(arrays[SCRATCH])
            own[:, SCRATCH] = pointer(arrays[SCRATCH])
        program.use(0, tuple(map(address_of, arrays[:NUM_SHARED])), program.keys)
        return program

    def gate(self, channel: Channel, binding: int = 0) -> Program:
        """Make a program of one barrier, at which ranks compare their next calls."""
        dtype = np.dtype(np.uint8)
        if self.memory.node_comm.rank == 0:
            compile_for(dtype)
        self.agreement.highest([0])
        code = np.array([kernels.BARRIER, 2], np.int64)
        return Program(code, channel, dtype, self.oversubscribed, self.meanwhile, binding)

    def fill(self, program: Program, rows: Sequence[ExportedMemory], channel: Channel) -> None:
        """Fill a program's registers with the addresses of the ranks' staging buffers and windows."""
        program.keys = tuple(rows[self.rank].keys)
        for nth, rank in enumerate(channel.ranks):
            memory = rows[rank]
            bases = zip(self.mapped(rank, memory), memory.windows, strict=True)
            program.bases[nth] = [*(far if near is None else near for near, far in bases), *memory.keys]
            stage = channel.staging.at(self.world_ranks[rank]) + channel.begin
            for turn in range(TURNS):
                pair = stage + turn * memory.turn_bytes, stage + (1 - turn) * memory.turn_bytes
                program.registers[turn, nth, STAGING : STAGING + TURNS] = pair


@cache
def compile_for(dtype: np.dtype) -> Callable[..., int]:
    """Return the interpreter for a dtype, compiled now or loaded from disk."""
    return run_unkept(kernels.interpreter)(like(dtype))
