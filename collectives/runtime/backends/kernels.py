"""Compiled code that runs schedules: an interpreter of *programs* of copies, reductions, barriers and messages.

A program is an array of integers, instruction after instruction: opcode, length, operands.  Memory operands are a
register, which holds an address, and an offset; so a program runs on any arrays of a call.  At the first barrier of a
run the ranks exchange the addresses of their arrays, the collective that they run and its call number: if these two
differ, the run ends there, on all ranks.

It runs without Python's lock, and returns after waiting long, to be called again.  Numba compiles it on the first use
of a dtype, and keeps the result on disk.
"""

import sys
import time
from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, njit, typeof, types
from numba.core import event
from numba.extending import intrinsic, overload

from collectives.job import environment, system
from collectives.runtime.backends.phases import ARRAY, LINE_BYTES, NUM_REGISTERS, NUM_SHARED, OUT

BARRIER, COPY, STREAM, REDUCE, REDUCE16, READ, WRITE, PAUSE = range(8)
DIVIDE, WIDEN, NARROW, START, AWAIT, OPEN, MERGE, VERDICT, END = range(8, 17)  # of programs with messages
SUM, PROD, MIN, MAX, BAND, BOR, BXOR, LAND, LOR, LXOR = range(10)
BFLOAT16, FLOAT16 = range(2)
WAITING, ENDED, FAILED, MISMATCH, MOVED = range(5)  # results of `run`

# A frame: the state of a program of one rank, and where it was left.
(
    COUNTER,  # the next instruction
    RUNNING,  # whether the program has begun
    FIRST,  # whether its first barrier is still to come
    ARRIVED,  # whether this rank has reached the current barrier
    TURN,  # the staging buffer with which the run begins
    SPINS,
    SPUN,
    YIELDS,
    CHANNEL,  # address of the channel's state
    SLOTS,
    NUM_SLOTS,
    WORK,
    CODE,
    CODE_LENGTH,
    REGISTERS,
    BASES,
    BINDING,
    NUMBER,
    ODD,  # whether a run uses the staging buffers an odd number of times
    ON_MISMATCH,  # the instruction to continue with where ranks of a node run different programs; 0 to end there
    ERROR,  # MPI's error code of a failed message
    WAITS,  # for each slot, the address of two numbers: how often this rank waited for that one last, and nanoseconds
    LATEST,  # slot for which it has waited last at the current barrier; 0 for none
    SINCE,  # time at which it began to wait
) = range(24)
VECTORS = 24  # space for the arguments of a system call
FRAME_LENGTH = VECTORS + 4

# A channel's state on this rank: the number of barriers that it has reached, the staging buffer with which the next run
# begins; how often to sleep instead of yielding the core, and how often after the next yield that returns late.
NUM_BARRIERS, NEXT_TURN, NAPS, NEXT_NAPS, STATE_LENGTH = range(5)
LATE_NS, NAP_US, FEWEST_NAPS, MOST_NAPS, BRIEF = 500_000, 20, 8, 1024, 15_000  # BRIEF: looks before a nap, some 5 us

# A rank's slot, a cache line of shared memory, of which it has two, for even and for odd barriers: the number of the
# latest barrier that it has reached; then the collective that it runs, its call number, and the addresses of its arrays
# and their windows of symmetric memory.
SLOT_BINDING, SLOT_NUMBER, SLOT_ARRAYS = 8, 16, 24
WINDOWS = SLOT_ARRAYS + 8 * NUM_SHARED  # their windows; inside one, addresses are offsets from its beginning
BASES_LENGTH = 2 * NUM_SHARED  # per rank: the addresses of its windows in this process, and their keys

SPINS_PER_TEST = 512  # polls of memory that take as long as a test of messages
BLOCK_BYTES = 1 << 13  # the block of a reduction, which fits the first-level cache
PAGE_BYTES, ALIASING_BYTES, PIECE_BYTES = 4096, 32, 1 << 10  # of `copy`

memcpy = types.ExternalFunction("memcpy", types.intp(types.intp, types.intp, types.intp))
sched_yield = types.ExternalFunction("sched_yield", types.int32())
usleep: Any = types.ExternalFunction("usleep", types.int32(types.uint32))
clock_gettime: Any = types.ExternalFunction("clock_gettime", types.int32(types.int32, types.intp))
VM = types.intp(types.int32, types.intp, types.uintp, types.intp, types.uintp, types.uintp)
MONOTONIC = np.int32(time.CLOCK_MONOTONIC)


@intrinsic
def load_acquire(typing, address):
    def code(context, builder, signature, args):
        pointer = builder.inttoptr(args[0], ir.IntType(64).as_pointer())
        return builder.load_atomic(pointer, ordering="acquire", align=8)

    return types.int64(types.int64), code


@intrinsic
def store_release(typing, address, value):
    def code(context, builder, signature, args):
        pointer = builder.inttoptr(args[0], ir.IntType(64).as_pointer())
        builder.store_atomic(args[1], pointer, ordering="release", align=8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), code


@intrinsic
def pointer_to(typing, address, like):
    """Return the address as a pointer to numbers of the type of `like`."""

    def code(context, builder, signature, args):
        return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

    return types.CPointer(like)(types.int64, like), code


@intrinsic
def size_of(typing, number):
    def code(context, builder, signature, args):
        size = context.get_abi_sizeof(context.get_data_type(signature.args[0]))
        return ir.Constant(ir.IntType(64), size)

    return types.int64(number), code


@intrinsic
def address_of(typing, array):
    def code(context, builder, signature, args):
        struct = context.make_array(signature.args[0])(context, builder, args[0])
        return builder.ptrtoint(struct.data, ir.IntType(64))

    return types.int64(array), code


@intrinsic
def stream_line(typing, target, source):
    """Copy 64 bytes to an aligned address, bypassing the caches."""

    def code(context, builder, signature, args):
        line = ir.VectorType(ir.IntType(64), 8)
        value = builder.load(builder.inttoptr(args[1], line.as_pointer()), align=8)
        store = builder.store(value, builder.inttoptr(args[0], line.as_pointer()), align=64)
        store.set_metadata("nontemporal", builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)]))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), code


@intrinsic
def fence(typing):
    """Order streaming stores before all that follow."""

    def code(context, builder, signature, args):
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), code


@intrinsic
def start_all(typing, function, count, requests):
    """Call MPI_Startall, which is at the address `function`."""

    def code(context, builder, signature, args):
        kind = ir.FunctionType(ir.IntType(32), [ir.IntType(32), ir.IntType(64)])
        return builder.call(builder.inttoptr(args[0], kind.as_pointer()), args[1:])

    return types.int32(types.int64, types.int32, types.int64), code


@intrinsic
def test_all(typing, function, count, requests, flag, statuses):
    """Call MPI_Testall, which is at the address `function`."""

    def code(context, builder, signature, args):
        kind = ir.FunctionType(ir.IntType(32), [ir.IntType(32), *[ir.IntType(64)] * 3])
        return builder.call(builder.inttoptr(args[0], kind.as_pointer()), args[1:])

    return types.int32(types.int64, types.int32, *[types.int64] * 3), code


@intrinsic
def float_of_half(typing, bits):
    def code(context, builder, signature, args):
        return builder.fpext(builder.bitcast(args[0], ir.HalfType()), ir.FloatType())

    return types.float32(types.uint16), code


@intrinsic
def half_of_float(typing, value):
    def code(context, builder, signature, args):
        return builder.bitcast(builder.fptrunc(args[0], ir.HalfType()), ir.IntType(16))

    return types.uint16(types.float32), code


@intrinsic
def bits_of_float(typing, value):
    def code(context, builder, signature, args):
        return builder.bitcast(args[0], ir.IntType(32))

    return types.uint32(types.float32), code


@intrinsic
def float_of_bits(typing, bits):
    def code(context, builder, signature, args):
        return builder.bitcast(args[0], ir.FloatType())

    return types.float32(types.uint32), code


@njit(inline="always")
def float_of_bfloat16(bits):
    return float_of_bits(np.uint32(np.uint32(bits) << np.uint32(16)))


@njit(inline="always")
def bfloat16_of_float(value):
    """Round to nearest, ties to even; a NaN stays a NaN."""
    bits = bits_of_float(value)
    rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    is_number = (bits & np.uint32(0x7FFFFFFF)) <= np.uint32(0x7F800000)
    return np.uint16((rounded if is_number else bits | np.uint32(0x400000)) >> np.uint32(16))


@njit(inline="always")
def plus(a, b):
    return a + b


@njit(inline="always")
def times(a, b):
    return a * b


def for_kinds(*kinds):
    """Compile a function of two numbers for operands of these kinds.

    For other kinds it returns its first operand, which nobody sees: the loops below are compiled with all ops for each
    dtype, and calls with an op that does not suit their dtype are refused before.
    """

    def compiled(function):
        @overload(function, inline="always")
        def choose(a, b):
            return function if isinstance(a, kinds) else lambda a, b: a

        return function

    return compiled


@for_kinds(types.Integer, types.Float)
def lesser(a, b):
    """Return the smaller of two numbers, or the NaN."""
    return a if (a < b) | (a != a) else b


@for_kinds(types.Integer, types.Float)
def greater(a, b):
    """Return the larger of two numbers, or the NaN."""
    return a if (a > b) | (a != a) else b


@for_kinds(types.Integer)
def common(a, b):
    """Return the bitwise and of two numbers."""
    return a & b


@for_kinds(types.Integer)
def united(a, b):
    """Return the bitwise or of two numbers."""
    return a | b


@for_kinds(types.Integer)
def differing(a, b):
    """Return the bitwise exclusive or of two numbers."""
    return a ^ b


@for_kinds(types.Integer)
def both(a, b):
    """Return 1 if neither is 0, and else 0."""
    return (a != 0) & (b != 0)


@for_kinds(types.Integer)
def either(a, b):
    """Return 0 if both are 0, and else 1."""
    return (a != 0) | (b != 0)


@for_kinds(types.Integer)
def one_only(a, b):
    """Return 1 if one of them is 0 and the other is not, and else 0."""
    return (a != 0) ^ (b != 0)


def quotient(a, divisor):
    """Divide a number by an integer: rounded correctly, or toward zero if the number is an integer, too."""


@overload(quotient, inline="always")
def compile_quotient(a, divisor):
    if isinstance(a, types.Complex):
        return lambda a, divisor: complex(a.real / divisor, a.imag / divisor)
    if isinstance(a, types.Integer):
        return signed_quotient if a in types.signed_domain else lambda a, divisor: np.uint64(a) // np.uint64(divisor)
    return lambda a, divisor: a / divisor


def signed_quotient(a, divisor):
    floor = a // divisor
    return floor + ((floor < 0) & (floor * divisor != a))


# The reduction of two operands, by target: a loop over arrays that may overlap would not be vectorised.


@njit
def reduce_apart(op, total, a, b):
    """Compute total = a op b."""
    if op == SUM:
        for i in range(len(total)):
            total[i] = plus(a[i], b[i])
    elif op == PROD:
        for i in range(len(total)):
            total[i] = times(a[i], b[i])
    elif op == MIN:
        for i in range(len(total)):
            total[i] = lesser(a[i], b[i])
    elif op == MAX:
        for i in range(len(total)):
            total[i] = greater(a[i], b[i])
    elif op == BAND:
        for i in range(len(total)):
            total[i] = common(a[i], b[i])
    elif op == BOR:
        for i in range(len(total)):
            total[i] = united(a[i], b[i])
    elif op == BXOR:
        for i in range(len(total)):
            total[i] = differing(a[i], b[i])
    elif op == LAND:
        for i in range(len(total)):
            total[i] = both(a[i], b[i])
    elif op == LOR:
        for i in range(len(total)):
            total[i] = either(a[i], b[i])
    else:
        for i in range(len(total)):
            total[i] = one_only(a[i], b[i])


@njit
def reduce_left(op, total, b):
    """Compute total = total op b."""
    if op == SUM:
        for i in range(len(total)):
            total[i] = plus(total[i], b[i])
    elif op == PROD:
        for i in range(len(total)):
            total[i] = times(total[i], b[i])
    elif op == MIN:
        for i in range(len(total)):
            total[i] = lesser(total[i], b[i])
    elif op == MAX:
        for i in range(len(total)):
            total[i] = greater(total[i], b[i])
    elif op == BAND:
        for i in range(len(total)):
            total[i] = common(total[i], b[i])
    elif op == BOR:
        for i in range(len(total)):
            total[i] = united(total[i], b[i])
    elif op == BXOR:
        for i in range(len(total)):
            total[i] = differing(total[i], b[i])
    elif op == LAND:
        for i in range(len(total)):
            total[i] = both(total[i], b[i])
    elif op == LOR:
        for i in range(len(total)):
            total[i] = either(total[i], b[i])
    else:
        for i in range(len(total)):
            total[i] = one_only(total[i], b[i])


@njit
def reduce_right(op, total, a):
    """Compute total = a op total."""
    if op == SUM:
        for i in range(len(total)):
            total[i] = plus(a[i], total[i])
    elif op == PROD:
        for i in range(len(total)):
            total[i] = times(a[i], total[i])
    elif op == MIN:
        for i in range(len(total)):
            total[i] = lesser(a[i], total[i])
    elif op == MAX:
        for i in range(len(total)):
            total[i] = greater(a[i], total[i])
    elif op == BAND:
        for i in range(len(total)):
            total[i] = common(a[i], total[i])
    elif op == BOR:
        for i in range(len(total)):
            total[i] = united(a[i], total[i])
    elif op == BXOR:
        for i in range(len(total)):
            total[i] = differing(a[i], total[i])
    elif op == LAND:
        for i in range(len(total)):
            total[i] = both(a[i], total[i])
    elif op == LOR:
        for i in range(len(total)):
            total[i] = either(a[i], total[i])
    else:
        for i in range(len(total)):
            total[i] = one_only(a[i], total[i])


@njit(error_model="numpy")
def divide(total, divisor):
    for i in range(len(total)):
        total[i] = quotient(total[i], divisor)


@njit(inline="always")
def address(code, registers, at):
    """Return the address of a memory operand."""
    return registers[code[at]] + code[at + 1]


@njit
def reduce(code, at, registers, like, work):
    """Compute target = source0 op source1 op ..., in order, block by block; the target may be one of the sources."""
    target = address(code, registers, at + 2)
    count, op, divisor = code[at + 4], code[at + 5], code[at + 6]
    first, num_sources = at + 8, (code[at + 1] - 8) // 2
    own = num_sources  # the index of the source that is the target
    for index in range(num_sources):
        if address(code, registers, first + 2 * index) == target:
            own = index
    source0, source1 = address(code, registers, first), address(code, registers, first + 2)
    size = size_of(like)
    step = BLOCK_BYTES // size
    for begin in range(0, count, step):
        here, length = begin * size, min(step, count - begin)
        result = carray(pointer_to(target + here, like), length)
        a = carray(pointer_to(source0 + here, like), length)
        b = carray(pointer_to(source1 + here, like), length)
        total = result if own < 2 or own == num_sources else carray(pointer_to(work, like), length)
        if own == 0:
            reduce_left(op, total, b)
        elif own == 1:
            reduce_right(op, total, a)
        else:
            reduce_apart(op, total, a, b)
        for index in range(2, num_sources):
            if index == own:
                reduce_right(op, result, total)
                total = result
            else:
                source = address(code, registers, first + 2 * index)
                reduce_left(op, total, carray(pointer_to(source + here, like), length))
        if divisor > 1:
            divide(result, divisor)


@njit
def copy(target, source, nbytes):
    """Copy by memcpy, in pieces where it would be ten times slower.

    Above 2 KiB glibc's memcpy is `rep movsb`, which AMD's Zen 3 executes slowly where the target lies up to 31 bytes
    behind the source, modulo pages: as NumPy's long arrays do behind staging buffers and symmetric memory.
    Source: lunnova.dev/articles/ryzen-slow-short-rep-mov; measured here, 2.9 instead of 33 GB/s.
    """
    if 0 < (target - source) % PAGE_BYTES < ALIASING_BYTES:
        for begin in range(0, nbytes, PIECE_BYTES):
            memcpy(target + begin, source + begin, min(PIECE_BYTES, nbytes - begin))
    else:
        memcpy(target, source, nbytes)


@njit
def stream(target, source, nbytes):
    """Copy data that are too long to stay in a cache, without reading the target's cache lines first."""
    head = min(nbytes, -target % LINE_BYTES)
    memcpy(target, source, head)
    end = head + (nbytes - head) // LINE_BYTES * LINE_BYTES
    for at in range(head, end, LINE_BYTES):
        stream_line(target + at, source + at)
    memcpy(target + end, source + end, nbytes - end)
    fence()


@njit
def widen(form, wide, narrow):
    if form == BFLOAT16:
        for i in range(len(wide)):
            wide[i] = float_of_bfloat16(narrow[i])
    else:
        for i in range(len(wide)):
            wide[i] = float_of_half(narrow[i])


@njit
def narrow_down(form, narrow, wide):
    if form == BFLOAT16:
        for i in range(len(wide)):
            narrow[i] = bfloat16_of_float(wide[i])
    else:
        for i in range(len(wide)):
            narrow[i] = half_of_float(wide[i])


@njit
def reduce16(code, at, registers, work):
    """Reduce 16-bit floats as `reduce` does, in float32, and round once."""
    target = address(code, registers, at + 2)
    count, op, divisor, form = code[at + 4], code[at + 5], code[at + 6], code[at + 7]
    first, num_sources = at + 8, (code[at + 1] - 8) // 2
    bits, number = np.uint16(0), np.float32(0)
    step = BLOCK_BYTES // 4
    for begin in range(0, count, step):
        here, length = 2 * begin, min(step, count - begin)
        total = carray(pointer_to(work, number), length)
        more = carray(pointer_to(work + BLOCK_BYTES, number), length)
        widen(form, total, carray(pointer_to(address(code, registers, first) + here, bits), length))
        for index in range(1, num_sources):
            source = address(code, registers, first + 2 * index)
            widen(form, more, carray(pointer_to(source + here, bits), length))
            reduce_left(op, total, more)
        if divisor > 1:
            divide(total, divisor)
        narrow_down(form, carray(pointer_to(target + here, bits), length), total)


if system.function("process_vm_readv"):
    process_vm_readv = types.ExternalFunction("process_vm_readv", VM)
    process_vm_writev = types.ExternalFunction("process_vm_writev", VM)

    @njit
    def through_system(pid, here, there, nbytes, vectors, write):
        """Copy from, or to, another process's memory; return whether all of it was copied."""
        vectors[0], vectors[1], vectors[2], vectors[3] = here, nbytes, there, nbytes
        at = address_of(vectors)
        if write:
            return process_vm_writev(np.int32(pid), at, np.uintp(1), at + 16, np.uintp(1), np.uintp(0)) == nbytes
        return process_vm_readv(np.int32(pid), at, np.uintp(1), at + 16, np.uintp(1), np.uintp(0)) == nbytes
else:  # code that names a missing function cannot be linked

    @njit
    def through_system(pid, here, there, nbytes, vectors, write):
        """Copy nothing: no program reads other processes, as none could be read when it was bound."""
        return False


@njit
def load(address):
    return carray(pointer_to(address, np.int64(0)), 1)[0]


@njit
def publish(frame, slot, registers):
    """Write this rank's call to its slot, before it shows its arrival there."""
    line = carray(pointer_to(slot, np.int64(0)), LINE_BYTES // 8)
    line[SLOT_BINDING // 8], line[SLOT_NUMBER // 8] = frame[BINDING], frame[NUMBER]
    bases = carray(pointer_to(frame[BASES], np.int64(0)), BASES_LENGTH)
    for index in range(NUM_SHARED):
        line[SLOT_ARRAYS // 8 + index] = registers[ARRAY + index] - bases[index]
        line[WINDOWS // 8 + index] = bases[NUM_SHARED + index]


@njit
def leave_core(frame, channel):
    """Give up the core: to other ranks by a yield, or, where a computing process would keep it for long, by a sleep.

    The system wakes a process that has slept before it continues one that computes, for which a yield waits.
    """
    if channel[NAPS] > 0:
        channel[NAPS] -= 1
        usleep(np.uint32(NAP_US))
        return
    begin = now_ns(frame[VECTORS:])
    sched_yield()
    if now_ns(frame[VECTORS:]) - begin > LATE_NS:
        channel[NAPS] = channel[NEXT_NAPS] = min(2 * channel[NEXT_NAPS] + FEWEST_NAPS, MOST_NAPS)
    else:
        channel[NEXT_NAPS] -= channel[NEXT_NAPS] // 8


@njit
def now_ns(scratch):
    clock_gettime(MONOTONIC, address_of(scratch))
    return scratch[0] * 1_000_000_000 + scratch[1]


@njit
def barrier(frame, channel, slots, registers):
    """Show this rank's arrival to the others; return whether all of them have arrived, too.

    It polls SPINS times in all the calls of one barrier, then gives up the core between polls, YIELDS times per call.
    """
    if not frame[ARRIVED]:
        frame[ARRIVED] = 1
        frame[SPUN] = 0
        channel[NUM_BARRIERS] += 1
        slot = slots[0] + channel[NUM_BARRIERS] % 2 * LINE_BYTES
        if frame[FIRST]:
            publish(frame, slot, registers)
        store_release(slot, channel[NUM_BARRIERS])
    number = channel[NUM_BARRIERS]
    spun, yields = frame[SPUN], frame[YIELDS]
    spins = min(frame[SPINS], BRIEF) if channel[NAPS] else frame[SPINS]  # who uses the core less gets it sooner
    for peer in range(1, len(slots)):
        while load_acquire(slots[peer] + number % 2 * LINE_BYTES) < number:
            if spun < spins:
                spun += 1
            elif yields > 0:
                yields -= 1
                if not frame[LATEST]:
                    frame[SINCE] = now_ns(frame[VECTORS:])
                frame[LATEST] = peer
                leave_core(frame, channel)
            else:
                frame[SPUN] = spun
                return False
    frame[ARRIVED] = 0
    if frame[LATEST]:
        count_wait(frame)
    return True


@njit
def count_wait(frame):
    """Count this rank's wait at a barrier as one for the slot that it has polled last, which is the last to arrive."""
    waits = carray(pointer_to(frame[WAITS], np.int64(0)), frame[NUM_SLOTS])
    counted = carray(pointer_to(waits[frame[LATEST]], np.int64(0)), 2)
    counted[0] += 1
    counted[1] += now_ns(frame[VECTORS:]) - frame[SINCE]
    frame[LATEST] = 0


@njit
def messages_arrived(frame, channel, code, at):
    """Return whether the started messages are complete, after polling as `barrier` does; an error is left in ERROR."""
    count, requests, statuses = np.int32(code[at + 3]), code[at + 4], code[at + 5]
    flag = carray(pointer_to(statuses, np.int32(0)), 1)  # the flag, and after it the statuses
    yields = frame[YIELDS]
    while True:
        frame[ERROR] = test_all(code[at + 2], count, requests, statuses, statuses + LINE_BYTES)
        if flag[0] or frame[ERROR]:
            return True
        if frame[SPUN] < frame[SPINS]:
            frame[SPUN] += SPINS_PER_TEST
        elif yields > 0:
            yields -= 1
            leave_core(frame, channel)
        else:
            return False


@njit
def open_header(frame, seen, differs):
    """Write the key of this rank's call, and the negated one, as the highest that it has seen; 0 without a binding."""
    key = 0 if differs or not frame[BINDING] else frame[BINDING] << 32 | frame[NUMBER]
    header = carray(pointer_to(seen, np.int64(0)), 2)
    header[0], header[1] = key, -key


@njit
def merge_header(seen, arrived):
    header, other = carray(pointer_to(seen, np.int64(0)), 2), carray(pointer_to(arrived, np.int64(0)), 2)
    header[0], header[1] = max(header[0], other[0]), max(header[1], other[1])


@njit
def take_over(frame, channel, slots, registers):
    """Take the addresses of the others' arrays from their slots.

    Returns ENDED, MISMATCH if ranks run different programs, or MOVED if arrays are in other windows than before.
    """
    frame[FIRST] = 0
    bases = carray(pointer_to(frame[BASES], np.int64(0)), BASES_LENGTH * len(slots))
    same, stayed = frame[BINDING] != 0, True
    for peer in range(1, len(slots)):
        slot = slots[peer] + channel[NUM_BARRIERS] % 2 * LINE_BYTES
        same &= load(slot + SLOT_BINDING) == frame[BINDING]
        same &= load(slot + SLOT_NUMBER) == frame[NUMBER]
        for index in range(NUM_SHARED):
            there, of_peer = load(slot + SLOT_ARRAYS + 8 * index), BASES_LENGTH * peer + index
            registers[NUM_REGISTERS * peer + ARRAY + index] = bases[of_peer] + there
            stayed &= load(slot + WINDOWS + 8 * index) == bases[of_peer + NUM_SHARED]
    if not same:
        return MISMATCH
    return ENDED if stayed else MOVED


@njit(nogil=True, error_model="numpy", cache=True)
def run(frame_address, like, number, array, out):
    """Start or continue a program's run on arrays at two addresses until it pauses, ends or has waited too long.

    `like`: a number of the dtype to be reduced.  `number` is compared with that of the other ranks.  Returns

    - WAITING;
    - ENDED;
    - MISMATCH if ranks run different programs, or calls of different numbers: nothing has been done then;
    - MOVED if registers of other ranks' arrays must be set before it can continue;
    - FAILED if another process's memory cannot be accessed, or, with a code in ERROR, a message cannot be completed.
    """
    integer, wide, bits = np.int64(0), np.float32(0), np.uint16(0)
    frame = carray(pointer_to(frame_address, integer), FRAME_LENGTH)
    channel = carray(pointer_to(frame[CHANNEL], integer), STATE_LENGTH)
    slots = carray(pointer_to(frame[SLOTS], integer), frame[NUM_SLOTS])
    code = carray(pointer_to(frame[CODE], integer), frame[CODE_LENGTH])
    begins = not frame[RUNNING]
    if begins:
        frame[RUNNING] = frame[FIRST] = 1
        frame[ERROR] = 0
        frame[NUMBER], frame[TURN] = number, channel[NEXT_TURN]
    num_registers = NUM_REGISTERS * len(slots)
    registers = carray(pointer_to(frame[REGISTERS] + frame[TURN] * num_registers * 8, integer), num_registers)
    if begins:
        registers[ARRAY], registers[OUT] = array, out
    at = frame[COUNTER]
    while at < len(code):
        opcode = code[at]
        if opcode == BARRIER:
            if not barrier(frame, channel, slots, registers):
                frame[COUNTER] = at
                return WAITING
            if frame[FIRST]:
                answer = take_over(frame, channel, slots, registers)
                if answer == MISMATCH and frame[ON_MISMATCH]:
                    at = frame[ON_MISMATCH]
                    continue
                if answer == MISMATCH:
                    frame[COUNTER] = frame[RUNNING] = 0
                    return MISMATCH
                if answer == MOVED:
                    frame[COUNTER] = at + code[at + 1]
                    return MOVED
        elif opcode in (COPY, STREAM):
            target, source = address(code, registers, at + 2), address(code, registers, at + 4)
            if target == source:
                pass
            elif opcode == COPY:
                copy(target, source, code[at + 6])
            else:
                stream(target, source, code[at + 6])
        elif opcode == REDUCE:
            reduce(code, at, registers, like, frame[WORK])
        elif opcode == REDUCE16:
            reduce16(code, at, registers, frame[WORK])
        elif opcode == PAUSE:
            frame[COUNTER] = at + code[at + 1]
            return ENDED
        elif opcode == DIVIDE:
            divide(carray(pointer_to(address(code, registers, at + 2), like), code[at + 4]), code[at + 5])
        elif opcode == WIDEN:
            target, source, count = address(code, registers, at + 2), address(code, registers, at + 4), code[at + 6]
            widen(code[at + 7], carray(pointer_to(target, wide), count), carray(pointer_to(source, bits), count))
        elif opcode == NARROW:
            target, source, count = address(code, registers, at + 2), address(code, registers, at + 4), code[at + 6]
            narrow_down(code[at + 7], carray(pointer_to(target, bits), count), carray(pointer_to(source, wide), count))
        elif opcode == START:
            frame[SPUN] = 0
            frame[ERROR] = start_all(code[at + 2], np.int32(code[at + 3]), code[at + 4])
        elif opcode == AWAIT:
            if not messages_arrived(frame, channel, code, at):
                frame[COUNTER] = at
                return WAITING
        elif opcode == OPEN:
            open_header(frame, code[at + 2], code[at + 3])
        elif opcode == MERGE:
            merge_header(code[at + 2], code[at + 3])
        elif opcode == END:
            break
        elif opcode == VERDICT:
            if load(code[at + 2]) != -load(code[at + 2] + 8):
                frame[COUNTER] = frame[RUNNING] = 0
                return MISMATCH
        else:
            here, there = address(code, registers, at + 2), address(code, registers, at + 4)
            if not through_system(code[at + 7], here, there, code[at + 6], frame[VECTORS:], opcode == WRITE):
                frame[COUNTER] = frame[RUNNING] = 0
                return FAILED
        if frame[ERROR]:
            frame[COUNTER] = frame[RUNNING] = 0
            return FAILED
        at += code[at + 1]
    frame[COUNTER] = frame[RUNNING] = 0
    if frame[ODD]:
        channel[NEXT_TURN] = 1 - channel[NEXT_TURN]
    return ENDED


def interpreter(like):
    """Return `run` compiled for numbers of this type, to be called without Numba's dispatch by types."""
    return run.compile((types.int64, typeof(like), types.int64, types.int64, types.int64))


def check() -> None:
    """Load from disk, or compile, what every communicator uses."""
    interpreter(np.uint8(0))


class FirstCompilation(event.Listener):
    """Message on stderr, once, that a kernel of the collectives is compiled, as it is not on disk."""

    is_announced = False

    def on_start(self, event: event.Event) -> None:
        if event.data["dispatcher"].py_func.__module__ == __name__ and not self.is_announced:
            self.is_announced = True
            print("collectives: compiling kernels, once; they stay on disk", file=sys.stderr, flush=True)

    def on_end(self, event: event.Event) -> None:
        pass


if environment.launched_rank() == 0 and environment.launched_size() > 1:
    event.register("numba:compile", FirstCompilation())
