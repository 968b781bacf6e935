"""The sum of squares of many arrays of a GPU, in one launch of a kernel of our own (squares.cu)."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np

from collectives.arrays import cuda_kernels
from collectives.arrays.cuda_kernels import BLOCK_THREADS, FLOATS

SOURCE = Path(__file__).with_name("squares.cu")
BLOCKS = 256  # of an array, at most


def table_of(addresses: list[int], counts: list[int]) -> np.ndarray:
    """Return the table of arrays that the kernel reads."""
    return np.array([addresses, counts], np.int64).T.copy()


def add_squares(table: int, counts: list[int], dtype: str, scale: int, limb: int, sums: int, stream: int) -> None:
    """Add the sum of the squares of flat arrays of floats, each times `scale`, to the two integers `sums`.

    They are those of `table_of`, with these counts.  Table, scale and sums are addresses on the current device, and
    `stream` is the handle of one of its streams.  The sum is that of `exact_kernels.squares`.
    """
    import cupy

    kernel = cuda_kernels.kernel(f"squares<{FLOATS[dtype]}>", cupy.cuda.runtime.getDevice(), SOURCE)
    blocks = min(BLOCKS, -(-max(counts) // BLOCK_THREADS))
    arguments = np.uintp(table), np.uintp(scale), np.int32(limb), np.uintp(sums)
    if blocks:
        kernel((blocks, len(counts)), (BLOCK_THREADS,), arguments, stream=SimpleNamespace(ptr=stream))
