"""Reductions of arrays with various alignments, on a GPU or its stand-in, compared with the host's."""

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from collectives.arrays import addresses, cuda_kernels, views
from collectives.arrays.ops import HALVES

COUNTS = (0, 1, 7, 8, 9, 100, 1000)
ALIGNED, SHIFTED, MIXED, IN_PLACE = CASES = ("aligned", "shifted", "mixed", "in place")
REAL = {"complex64": "float32", "complex128": "float64"}


class Guarded:
    """A device array some elements after an aligned address, between guard bytes that must not change."""

    def __init__(self, cupy: Any, values: np.ndarray, offset: int = 0):
        gap = offset * values.dtype.itemsize
        self.cupy, self.bytes = cupy, cupy.full(values.nbytes + gap + 192, 0xA5, np.uint8)
        start = -addresses.pointer(self.bytes) % 64 + 64 + gap
        self.span = slice(start, start + values.nbytes)
        self.bytes[self.span] = cupy.asarray(values.view(np.uint8))
        self.array = self.bytes[self.span].view(values.dtype)

    def get(self) -> np.ndarray:
        around = self.cupy.asnumpy(self.bytes)
        values = around[self.span].view(self.array.dtype).copy()
        around[self.span] = 0xA5
        assert (around == 0xA5).all()
        return values


def draw(rng, count, dtype):
    """Draw random bits; of floats, half have similar magnitudes instead, and some are infinite."""
    values = rng.integers(0, 256, count * dtype.itemsize, np.uint8)
    if dtype.kind == "b":
        return values % 2 == 1
    values = values.view(dtype)
    if dtype.kind in "iu":
        return values
    parts = values.view(REAL.get(str(dtype), dtype))
    near = rng.permutation(len(parts)) < len(parts) // 2
    parts[near] = rng.normal(size=near.sum()).astype(parts.dtype)
    parts[rng.permutation(len(parts)) < len(parts) // 20] = np.inf
    return values


def reduced(op, xs, divisor=1):
    """Reduce on the host from left to right: 16-bit floats in float32, rounded once."""
    host, dtype = views.host(), xs[0].dtype
    with np.errstate(all="ignore"):
        wide = [x.astype(np.float32) if dtype in HALVES else x.copy() for x in xs]
        total = functools.reduce(lambda low, high: host.reduce(op, low, high, low) or low, wide)
        host.divide(total, divisor) if op == "avg" else None
        return total.astype(dtype)


def same(actual, want, op="sum", where=()):
    """Assert bitwise equality, except that all NaNs are equal, and so are 0 and -0 as a minimum or maximum."""
    np.testing.assert_array_equal(canonical(actual, op), canonical(want, op), err_msg=str(where), strict=True)


@np.errstate(invalid="ignore")
def canonical(x, op):
    if x.dtype.kind in "iub":
        return x
    parts = x.view(REAL.get(str(x.dtype), x.dtype)).copy()
    parts[np.isnan(parts)] = np.nan
    if op in ("min", "max"):
        parts[parts == 0] = 0
    return parts.view(f"u{parts.dtype.itemsize}")


def reduce(op: str, out: Any, sources: Sequence[Any], divisor: int = 1) -> None:
    """Compute out = (sources[0] op sources[1] op ...) / divisor on the current stream."""
    cuda_kernels.bind_reduction(op, out, sources, divisor)()


def check_reduction(cupy: Any, op: str, xs: list[np.ndarray], case: str) -> None:
    num, divisor = len(xs), 3 if op == "avg" else 1
    offsets = {ALIGNED: [0] * (num + 1), SHIFTED: [1] * (num + 1), MIXED: range(num + 1), IN_PLACE: [1] * num}[case]
    inputs = [Guarded(cupy, x, offset) for x, offset in zip(xs, offsets, strict=False)]
    out = inputs[num // 2] if case == IN_PLACE else Guarded(cupy, np.zeros_like(xs[0]), offsets[-1])
    reduce(op, out.array, [x.array for x in inputs], divisor)
    same(out.get(), reduced(op, xs, divisor), op, (op, num, len(xs[0]), case))
    for x, original in zip(inputs, xs, strict=True):
        if x is not out:
            same(x.get(), original)
