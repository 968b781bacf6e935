"""Numbers whose reductions are exact in any order, for every dtype and op, on any number of ranks.

In each element a few ranks give a small whole number, or for a product 1 or 2, and the others what changes nothing: no
partial result is beyond 64, which int8 holds, and bfloat16 exactly.  Where bits are combined, a rank has one of 6, or
lacks it.
"""

import functools

import numpy as np

from collectives import arrays
from collectives.arrays import COMPLEX

GIVERS, PERIOD = 6, 7  # a product's 2^6, and unlike the lengths of chunks, so that one in another's place shows
MOVED = 113  # different numbers where nothing is reduced
BITS = {"band": np.bitwise_and, "bor": np.bitwise_or, "bxor": np.bitwise_xor}
COMBINE = BITS | {"sum": np.add, "avg": np.add, "prod": np.multiply, "min": np.minimum, "max": np.maximum}
NUM_BITS = 6
EVERY_BIT = 2**NUM_BITS - 1
NEVER = 120  # is in no result


def vector(count: int, dtype: np.dtype, rank: int, size: int, op: str) -> np.ndarray:
    """What a rank gives to a reduction.

    >>> vector(9, np.dtype("int8"), rank=1, size=2, op="sum")
    array([1, 2, 3, 4, 5, 6, 0, 1, 2], dtype=int8)
    """
    return resized(share(dtype, rank, size, op), count, dtype, op)


def reduced(count: int, dtype: np.dtype, size: int, op: str) -> np.ndarray:
    """What all ranks' vectors give.

    >>> reduced(4, np.dtype("float32"), size=2, op="sum"), reduced(4, np.dtype("float32"), size=2, op="avg")
    (array([1., 3., 5., 7.], dtype=float32), array([0.5, 1.5, 2.5, 3.5], dtype=float32))
    """
    total = functools.reduce(COMBINE[op], (share(dtype, rank, size, op) for rank in range(size)))
    result = resized(total, count, dtype, op)
    if op == "avg":
        arrays.host().divide(result, size)
    return result


def moved(count: int, dtype: np.dtype, rank: int) -> np.ndarray:
    """What a rank gives where nothing is reduced: as good as any other's.

    >>> moved(4, np.dtype("float32"), rank=0), moved(4, np.dtype("float32"), rank=1)
    (array([0., 1., 2., 3.], dtype=float32), array([31., 32., 33., 34.], dtype=float32))
    """
    numbers = (np.arange(MOVED) + 31 * rank) % MOVED
    return resized(numbers % 2 if dtype == np.dtype(bool) else numbers, count, dtype)


def share(dtype: np.dtype, rank: int, size: int, op: str) -> np.ndarray:
    """A rank's numbers, until they repeat."""
    places = np.arange(PERIOD * size)
    numbers = (places + rank) % PERIOD
    if op == "prod":
        numbers = 1 + numbers % 2
    elif dtype == np.dtype(bool):
        numbers %= 2
    elif op in BITS:
        numbers = 1 << numbers % NUM_BITS
        numbers = EVERY_BIT - numbers if op == "band" else numbers
    neutral = {"prod": 1, "min": PERIOD, "band": EVERY_BIT}.get(op, 0)
    return np.where((places - rank) % size < GIVERS, numbers, neutral)


def resized(numbers: np.ndarray, count: int, dtype: np.dtype, op: str = "sum") -> np.ndarray:
    """So many elements of a dtype; complex ones have two different parts, but for a product."""
    given = numbers * (1 + 2j) if dtype in COMPLEX and op != "prod" else numbers
    return np.resize(given.astype(dtype), count)
