"""Compiled CPU kernels for pointwise operations, which read and write each tensor once.

Dropout, alone or with the softmax that it follows; GELU; a gated MLP's product; rotations of queries and keys.  Loops
are compiled for vector units: the hash multiplies 32 bits, and the exponential is a polynomial of float32.

Source: Appleby, MurmurHash3, 2011, `fmix32`; Moshier, Cephes, 1992, expf.c (range reduction and polynomial).
"""

from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from collectives.runtime.backends.compiler import run_unkept

F = np.float32
GAMMA, FIRST, SECOND = map(np.uint32, (0x9E3779B1, 0x85EBCA6B, 0xC2B2AE35))
PER_LN2, LN2, LN2_REST = F(1.44269504), F(0.693359375), F(-2.12194440e-4)
C0, C1, C2, C3, C4, C5 = map(F, (1.98756915e-4, 1.39819995e-3, 8.33345191e-3, 4.16657959e-2, 1.66666655e-1, 0.5))
LONG_GAMMA, LONG_FIRST, LONG_SECOND = map(np.uint64, (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
LEAST = F(-87)  # smallest argument used, whose exponential is a normal number
LOWEST = F(-3e38)
ONE, SLOPE, CUBIC = F(1), F(2 * (2 / np.pi) ** 0.5), F(0.044715)  # GELU = x sigmoid(SLOPE (x + CUBIC x^3))


def compiled(function: Any) -> Any:
    return run_unkept(numba.njit(nogil=True, cache=True, fastmath={"nsz", "contract", "reassoc"})(function))


def pointwise(function: Any) -> Any:
    return run_unkept(numba.njit(nogil=True, cache=True, error_model="numpy", fastmath={"nsz", "contract"})(function))


@intrinsic
def float_of(typing, bits):
    def code(context, builder, signature, args):
        return builder.bitcast(args[0], ir.FloatType())

    return types.float32(types.int32), code


@numba.njit(inline="always")
def exp(x):
    """Compute the exponential of x <= 0 with a relative error of 2e-7; NaN stays NaN."""
    x = LEAST if x < LEAST else x
    n = np.floor(x * PER_LN2 + F(0.5))
    r = x - n * LN2 - n * LN2_REST
    y = ((((C0 * r + C1) * r + C2) * r + C3) * r + C4) * r + C5
    power = np.int32((np.int32(n) + np.int32(127)) << np.int32(23))
    return (y * r * r + r + F(1)) * float_of(power)  # type: ignore[call-arg]


@numba.njit(inline="always")
def stays(row, column, bound):
    """Return whether dropout keeps an element, by the hash of `parallelism.numerics.dropout.short_hash`."""
    h = np.uint32(np.uint32(column) * GAMMA + np.uint32(row))
    h = np.uint32(np.uint32((h ^ (h >> np.uint32(16))) * FIRST) ^ np.uint32(row >> 32))
    h = np.uint32((h ^ (h >> np.uint32(13))) * SECOND)
    return np.uint32(h ^ (h >> np.uint32(16))) >= bound


@compiled
def drop(x, rows, columns, least, scale, out):
    """Write x to `out`, times `scale` where an element is kept, else 0.  Shapes: x, out (rows, columns)."""
    zero, bound = scale * 0, np.uint32(least)
    for i in range(len(rows)):
        row = rows[i]
        for j in range(len(columns)):
            out[i, j] = x[i, j] * scale if stays(row, columns[j], bound) else zero


@compiled
def softmax(s, rows, columns, least, scale, slope, num_causal, log):
    """Replace scores by the softmax of `slope` times them, with dropout; write each row's log-sum-exp to `log`.

    With `num_causal`, the sequence length, query i attends to the first i + 1 keys.

    Shapes: s (rows, columns), log (rows); of float32.
    """
    bound = np.uint32(least)
    for i in range(len(rows)):
        row, end = rows[i], i % num_causal + 1 if num_causal else len(columns)
        highest, total = LOWEST, F(0)
        for j in range(end):
            score = s[i, j] * slope
            highest = score if score > highest else highest
        for j in range(end):
            e = exp(s[i, j] * slope - highest)
            s[i, j] = e
            total += e
        log[i] = highest + np.log(total)
        factor = scale / total
        for j in range(end):
            s[i, j] *= factor if stays(row, columns[j], bound) else F(0)
        s[i, end:] = 0


@compiled
def softmax_backward(s, d, rows, columns, least, scale, slope, num_causal, log, delta):
    """Replace scores `s` by their softmax with dropout, and its gradient `d` by that of the scores.

    Shapes: s, d (rows, columns), log, and delta, each row's sum of results times their gradients, (rows); of float32.
    """
    bound = np.uint32(least)
    for i in range(len(rows)):
        row, end, subtracted, mean = rows[i], i % num_causal + 1 if num_causal else len(columns), log[i], delta[i]
        for j in range(end):
            x = s[i, j] * slope - subtracted
            p = exp(F(0) if x > F(0) else x)
            factor = scale if stays(row, columns[j], bound) else F(0)
            s[i, j] = p * factor
            d[i, j] = p * (d[i, j] * factor - mean) * slope
        s[i, end:] = 0
        d[i, end:] = 0


@numba.njit(inline="always")
def sigmoid(x):
    """Compute the sigmoid of x and its derivative."""
    e = exp(x if x < F(0) else -x)
    larger = ONE / (ONE + e)
    return (larger if x >= F(0) else e * larger), e * larger * larger


@pointwise
def gelu(x, out):
    """Write the GELU of x, in its tanh approximation, to `out`.  Shapes: x, out (n), of float32."""
    for i in range(len(x)):
        s, _ = sigmoid(SLOPE * x[i] * (ONE + CUBIC * x[i] * x[i]))
        out[i] = x[i] * s


@pointwise
def gelu_backward(x, gradient, out):
    """Write the gradient of x to `out`, given that of its GELU.  Shapes: all (n), of float32."""
    for i in range(len(x)):
        square = CUBIC * x[i] * x[i]
        s, slope = sigmoid(SLOPE * x[i] * (ONE + square))
        out[i] = gradient[i] * (s + x[i] * slope * SLOPE * (ONE + F(3) * square))


@pointwise
def gate(x, out):
    """Write the product of the values and the SiLU of their gates.

    Shapes: x (rows, 2 width), the gates followed by the values; out (rows, width); of float32.
    """
    for i in range(len(out)):
        gates, passing = x[i, : out.shape[1]], x[i, out.shape[1] :]
        for j in range(out.shape[1]):
            s, _ = sigmoid(gates[j])
            out[i, j] = gates[j] * s * passing[j]


@pointwise
def gate_backward(x, gradient, out):
    """Write the gradient of x, given that of the product.  Shapes: x, out as x in `gate`, gradient (rows, width)."""
    width = gradient.shape[1]
    for i in range(len(x)):
        gates, passing = x[i, :width], x[i, width:]
        of_gates, of_passing = out[i, :width], out[i, width:]
        for j in range(width):
            s, slope = sigmoid(gates[j])
            of_passing[j] = gradient[i, j] * gates[j] * s
            of_gates[j] = gradient[i, j] * passing[j] * (s + gates[j] * slope)


@pointwise
def rotate(x, first, cos, sin, out, to, count):
    """Write `count` heads, whose elements i and i + half are rotated as a point, by the angle of their token and i.

    They are read from head `first` of x on, and written from head `to` of `out` on.

    Shapes: x, out (tokens, heads, 2 half), cos, sin (angles, half), repeated over the tokens; of float32.
    """
    half = cos.shape[1]
    for i in range(len(x)):
        c, s = cos[i % len(cos)], sin[i % len(cos)]
        for h in range(count):
            left, right = x[i, first + h, :half], x[i, first + h, half:]
            to_left, to_right = out[i, to + h, :half], out[i, to + h, half:]
            for j in range(half):
                to_left[j] = left[j] * c[j] - right[j] * s[j]
                to_right[j] = right[j] * c[j] + left[j] * s[j]


@numba.njit(inline="always")
def mix(key, number):
    """Return the hash of `parallelism.numerics.dropout.mix`."""
    x = np.uint64(key) * LONG_GAMMA + np.uint64(number)
    x = (x ^ (x >> np.uint64(30))) * LONG_FIRST
    x = (x ^ (x >> np.uint64(27))) * LONG_SECOND
    return x ^ (x >> np.uint64(31))


@compiled
def add_mixed(bits, runs, sums):
    """Add two hashes of each element's position and bits, modulo 2^64.

    Shapes: bits (n), of signed integers; runs (runs, 3), in rows: index in `bits`, position, count; sums (2), of int64.
    """
    first = second = np.uint64(0)
    for r in range(len(runs)):
        here, there, count = runs[r]
        for i in range(count):
            x = mix(there + i, np.int64(bits[here + i]))
            first += x
            second += mix(x, 1)
    sums[0] += np.int64(first)
    sums[1] += np.int64(second)


@compiled
def weighted(integers, first):
    """Return the sum of integers times the odd numbers of their positions, from `first` on, modulo 2^64."""
    total = np.int64(0)
    for i in range(len(integers)):
        total += np.int64(integers[i]) * (2 * (first + i) + 1)
    return total
