"""Compile the kernels for every dtype on all cores, so that tests on ranks do not wait for a rank that compiles.

python -m mpi_tests.helpers.compile_kernels
"""

import multiprocessing

import numpy as np

from collectives.runtime.backends import kernels
from collectives.runtime.backends.shared_memory import like
from parallelism.numerics import exact_kernels, pointwise_kernels
from parallelism.numerics.clipping import bits_of

DTYPES = [*"bBhHiIlLfdFD", "?"]


def compile_for(char: str) -> None:
    """Load the kernels for a dtype from Numba's cache, or compile them into it."""
    kernels.interpreter(like(np.dtype(char)))


def main() -> None:
    with multiprocessing.get_context("spawn").Pool() as pool:
        pool.map(compile_for, DTYPES, chunksize=1)
    for char in DTYPES:  # again, as processes that write Numba's index at the same time lose entries
        compile_for(char)
    compile_pointwise()
    compile_exact()


def compile_exact() -> None:
    """Load or compile the kernels of exact sums."""
    for dtype in (np.float32, np.float64):
        x, total = np.zeros(1, dtype), np.zeros(1, np.int64)
        exact_kernels.add_rounded(x, *bits_of(x), 1.0, total, False)
        exact_kernels.to_floats(total, dtype(1), x)
        exact_kernels.peak(*bits_of(x))
        exact_kernels.squares(x, 1.0, 24)


def compile_pointwise() -> None:
    """Load or compile the element-wise kernels of the models."""
    for dtype in (np.float32, np.float64):
        x, number, rows = np.zeros((1, 1), dtype), dtype(1), np.zeros(1, np.int64)
        pointwise_kernels.drop(x, rows, rows, 0, number, x)
    for dtype in (np.int16, np.int32, np.int64):
        pointwise_kernels.add_mixed(np.zeros(1, dtype), np.zeros((1, 3), np.int64), np.zeros(2, np.int64))
    x, number, log = np.zeros((1, 1), np.float32), np.float32(1), np.zeros(1, np.float32)
    pointwise_kernels.softmax(x, rows, rows, 0, number, number, 0, log)
    pointwise_kernels.softmax_backward(x, x, rows, rows, 0, number, number, 0, log, log)
    flat, heads = np.zeros(1, np.float32), np.zeros((1, 1, 2), np.float32)
    pointwise_kernels.gelu(flat, flat)
    pointwise_kernels.gelu_backward(flat, flat, flat)
    pointwise_kernels.gate(heads[0], x)
    pointwise_kernels.gate_backward(heads[0], x, heads[0])
    pointwise_kernels.rotate(heads, 0, x, x, heads, 0, 1)


if __name__ == "__main__":
    main()
