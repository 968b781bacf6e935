"""Checks of single arguments, and what NumPy, CuPy and torch raise for one that is wrong."""

from typing import Any

import numpy as np

from collectives.arrays.ops import BFLOAT16
from collectives.arrays.views import writable

REFUSALS = (ValueError, TypeError, RuntimeError, MemoryError)  # exceptions of NumPy, CuPy and torch for an argument


def check_integer(name: str, value: Any, least: int, most: int, remedy: str = "") -> None:
    if not isinstance(value, int | np.integer) or not least <= value <= most:
        raise ValueError(f"{name} {value!r} is out of range: use an integer from {least} to {most}{remedy}")


def check_rank(name: str, rank: Any, size: int) -> None:
    if not isinstance(rank, int | np.integer) or not 0 <= rank < size:
        raise ValueError(f"{name} {rank!r} is out of range: use a rank from 0 to {size - 1}")


def checked_wire_dtype(wire_dtype: Any, x: Any) -> np.dtype | None:
    if wire_dtype is None:
        return None
    if str(wire_dtype) != "bfloat16":
        raise ValueError(f"wire_dtype {wire_dtype!r} is not supported: use 'bfloat16', or None")
    if x.dtype != np.dtype("float32"):
        raise ValueError(f"wire_dtype 'bfloat16' is for float32, but x is of {x.dtype}: omit it, or cast x")
    return BFLOAT16


def check_writable(view: Any, name: str) -> None:
    if not writable(view):
        raise ValueError(f"{name} is read-only: pass an array that may be written")
