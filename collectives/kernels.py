"""Compiled code that runs direct schedules: an interpreter of *programs*, which copy, fold and meet in shared memory.

A program is an array of integers, instruction after instruction: opcode, length, operands.  Memory is given as
addresses.  It runs without Python's lock and gives control back when it waits long, to be called again.

Numba compiles it for a dtype when that is first used, and keeps the result on disk.
"""

import numpy as np
from llvmlite import ir
from numba import carray, njit, types
from numba.extending import intrinsic, overload

MEET, COPY, FOLD, FOLD16, PEEK, POKE = range(6)
SUM, PROD, MIN, MAX = range(4)
BFLOAT16, FLOAT16 = range(2)
PLACE, ARRIVED, MEETINGS, ERROR, VECTOR = range(5)  # the state of a program; from VECTOR on, space for a system call
STATE_LENGTH = VECTOR + 4
BLOCK_BYTES = 1 << 14  # what a fold sums up at a time, in the first cache

memcpy = types.ExternalFunction("memcpy", types.intp(types.intp, types.intp, types.intp))
sched_yield = types.ExternalFunction("sched_yield", types.int32())
VM = types.intp(types.int32, types.intp, types.uintp, types.intp, types.uintp, types.uintp)
process_vm_readv = types.ExternalFunction("process_vm_readv", VM)
process_vm_writev = types.ExternalFunction("process_vm_writev", VM)


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
    """The address as a pointer to elements such as those of array `like`."""

    def code(context, builder, signature, args):
        return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

    return types.CPointer(like.dtype)(types.int64, like), code


@intrinsic
def address_of(typing, array):
    def code(context, builder, signature, args):
        struct = context.make_array(signature.args[0])(context, builder, args[0])
        return builder.ptrtoint(struct.data, ir.IntType(64))

    return types.int64(array), code


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
    """Round to nearest, ties to even; a NaN stays one."""
    bits = bits_of_float(value)
    rounded = np.uint16((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16))
    quiet = np.uint16((bits >> np.uint32(16)) | np.uint32(0x40))
    return rounded if value == value else quiet


@njit(inline="always")
def lesser(a, b):
    return a if (a < b) | (a != a) else b


@njit(inline="always")
def greater(a, b):
    return a if (a > b) | (a != a) else b


def begin_fold(op, total, a, b):
    """total = a op b, elementwise."""


def add_fold(op, total, b):
    """total = total op b, elementwise."""


@overload(begin_fold, inline="never")
def compile_begin(op, total, a, b):
    def ordered(op, total, a, b):
        if op == SUM:
            for i in range(len(total)):
                total[i] = a[i] + b[i]
        elif op == PROD:
            for i in range(len(total)):
                total[i] = a[i] * b[i]
        elif op == MIN:
            for i in range(len(total)):
                total[i] = lesser(a[i], b[i])
        else:
            for i in range(len(total)):
                total[i] = greater(a[i], b[i])

    def unordered(op, total, a, b):
        if op == SUM:
            for i in range(len(total)):
                total[i] = a[i] + b[i]
        else:
            for i in range(len(total)):
                total[i] = a[i] * b[i]

    return unordered if isinstance(total.dtype, types.Complex) else ordered


@overload(add_fold, inline="never")
def compile_add(op, total, b):
    def ordered(op, total, b):
        if op == SUM:
            for i in range(len(total)):
                total[i] = total[i] + b[i]
        elif op == PROD:
            for i in range(len(total)):
                total[i] = total[i] * b[i]
        elif op == MIN:
            for i in range(len(total)):
                total[i] = lesser(total[i], b[i])
        else:
            for i in range(len(total)):
                total[i] = greater(total[i], b[i])

    def unordered(op, total, b):
        if op == SUM:
            for i in range(len(total)):
                total[i] = total[i] + b[i]
        else:
            for i in range(len(total)):
                total[i] = total[i] * b[i]

    return unordered if isinstance(total.dtype, types.Complex) else ordered


@njit(error_model="numpy")
def divide(total, divisor):
    for i in range(len(total)):
        total[i] = total[i] / divisor


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
def peek(pid, target, address, nbytes, vector, write):
    """Copy from, or to, another process's memory; returns whether all of it was."""
    vector[0], vector[1], vector[2], vector[3] = target, nbytes, address, nbytes
    here = address_of(vector)
    if write:
        return process_vm_writev(np.int32(pid), here, np.uintp(1), here + 16, np.uintp(1), np.uintp(0)) == nbytes
    return process_vm_readv(np.int32(pid), here, np.uintp(1), here + 16, np.uintp(1), np.uintp(0)) == nbytes


@njit
def fold(code, at, like, work):
    """target = source0 op source1 op ..., elementwise, block by block; the target may be one of the sources."""
    target, count, op, divisor, first, end = (
        code[at + 2],
        code[at + 3],
        code[at + 4],
        code[at + 5],
        at + 7,
        at + code[at + 1],
    )
    size = like.itemsize
    total_at = address_of(work)
    step = BLOCK_BYTES // size
    for begin in range(0, count, step):
        length = min(step, count - begin)
        here = begin * size
        total = carray(pointer_to(total_at, like), length)
        a = carray(pointer_to(code[first] + here, like), length)
        begin_fold(op, total, a, carray(pointer_to(code[first + 1] + here, like), length))
        for index in range(first + 2, end):
            add_fold(op, total, carray(pointer_to(code[index] + here, like), length))
        if divisor > 1:
            divide(total, divisor)
        memcpy(target + here, total_at, length * size)


@njit
def fold16(code, at, narrow, wide, work):
    """The same of 16-bit floats, summed up in float32 and rounded once."""
    target, count, op, divisor, form, first = (
        code[at + 2],
        code[at + 3],
        code[at + 4],
        code[at + 5],
        code[at + 6],
        at + 7,
    )
    total_at = address_of(work)
    step = BLOCK_BYTES // 4
    for begin in range(0, count, step):
        length = min(step, count - begin)
        total = carray(pointer_to(total_at, wide), length)
        more = carray(pointer_to(total_at + BLOCK_BYTES, wide), length)
        widen(form, total, carray(pointer_to(code[first] + 2 * begin, narrow), length))
        for index in range(first + 1, at + code[at + 1]):
            widen(form, more, carray(pointer_to(code[index] + 2 * begin, narrow), length))
            add_fold(op, total, more)
        if divisor > 1:
            divide(total, divisor)
        narrow_down(form, carray(pointer_to(target + 2 * begin, narrow), length), total)


@njit
def meet(state, flags, polls, crowded):
    """Show the others that this rank is here; whether all of them are, too, after so many looks."""
    if not state[ARRIVED]:
        state[ARRIVED] = 1
        state[MEETINGS] += 1
        store_release(flags[0], state[MEETINGS])
    for peer in range(1, len(flags)):
        while load_acquire(flags[peer]) < state[MEETINGS]:
            polls -= 1
            if polls < 0:
                return False
            if crowded:
                sched_yield()
    state[ARRIVED] = 0
    return True


@njit(nogil=True, error_model="numpy", cache=True)
def run(code, state, flags, like, narrow, wide, work, polls, crowded):
    """Run a program from where it was left, until its end or until it waits longer than `polls` looks.

    `flags`: the address of this rank's count of meetings, then of each other's.
    Returns whether the program has ended; `state[ERROR]` is set where another process's memory cannot be read.
    """
    at = state[PLACE]
    while at < len(code):
        opcode = code[at]
        if opcode == MEET:
            if not meet(state, flags, polls, crowded):
                state[PLACE] = at
                return False
        elif opcode == COPY:
            memcpy(code[at + 2], code[at + 3], code[at + 4])
        elif opcode == FOLD:
            fold(code, at, like, work)
        elif opcode == FOLD16:
            fold16(code, at, narrow, wide, work)
        elif not peek(code[at + 5], code[at + 2], code[at + 3], code[at + 4], state[VECTOR:], opcode == POKE):
            state[ERROR] = 1
            break
        at += code[at + 1]
    state[PLACE] = 0
    return True
