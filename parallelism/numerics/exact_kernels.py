"""Compiled CPU kernels of exact sums: a gradient added in integers, integers as floating-point numbers, squares."""

import numba
import numpy as np

from collectives.runtime.backends.compiler import run_unkept


def compiled(function):
    return run_unkept(numba.njit(nogil=True, cache=True)(function))


@compiled
def add_rounded(gradient, bits, mask, scale, total, replaces):
    """Add a gradient times `scale`, rounded to integers, to `total`; return the bits of its largest absolute value.

    If it `replaces` what is in `total`, this is not read.  `bits` are those of the gradient, and `mask` has all but the
    sign's: as integers, absolute values keep their order, and those of NaN are the largest.
    """
    peak = mask & 0
    for i in range(len(gradient)):
        peak = max(peak, bits[i] & mask)
        rounded = np.int64(np.rint(np.float64(gradient[i]) * scale))
        total[i] = rounded if replaces else total[i] + rounded
    return peak


@compiled
def to_floats(total, quantum, out):
    """Write integers times `quantum` to `out`, which may begin at the same address."""
    for i in range(len(total)):
        out[i] = total[i]
        out[i] *= quantum


@compiled
def peak(bits, mask):
    """Return the largest of these bits without the sign's: those of the largest absolute value."""
    highest = mask & 0
    for i in range(len(bits)):
        highest = max(highest, bits[i] & mask)
    return highest


@compiled
def squares(x, scale, limb):
    """Return the sum of the squares of x times `scale`, each rounded to an integer, in two integers.

    The sum is the first times 2**limb, plus the second.  Neither overflows if the squares are below 2**(2 limb).
    """
    high, low = 0, 0
    for i in range(len(x)):
        y = np.float64(x[i]) * scale
        square = np.int64(np.rint(y * y))
        high += square >> limb
        low += square & ((1 << limb) - 1)
    return high, low
