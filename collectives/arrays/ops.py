"""Dtypes, and reduction ops in NumPy: those of the table, and user-defined ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from collectives.schedule.spec import OPS

Function = Callable[[Any, Any], Any]

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
HALVES = {np.dtype("float16"), BFLOAT16}
FLOATS = {np.dtype("float32"), np.dtype("float64")} | HALVES
INTEGERS = {np.dtype(f"{kind}{bits}") for kind in ("int", "uint") for bits in (8, 16, 32, 64)}
COMPLEX = {np.dtype("complex64"), np.dtype("complex128")}
DTYPES = FLOATS | INTEGERS | COMPLEX | {np.dtype(bool)}


@dataclass(frozen=True)
class Op:
    """A user-defined op: `function` combines two flat NumPy arrays of one length, element by element.

    It must be associative, and give the same on all ranks.  16-bit floats come as float32.  Where it is not
    commutative, the operands stand in the order of the ranks.  Ops with the same function are equal.

    >>> print(Op(np.hypot))
    Op(hypot, commutative=True)
    """

    function: Function
    commutative: bool = True

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise ValueError(f"Op({self.function!r}) is not callable: pass a function of two NumPy arrays")

    def __str__(self) -> str:
        code = getattr(getattr(self.function, "py_func", self.function), "__code__", None)  # Numba's have a py_func
        name = getattr(self.function, "__qualname__", "") or getattr(self.function, "__name__", "")
        source = f" of {Path(code.co_filename).name}:{code.co_firstlineno}" if code else ""
        return f"Op({name or type(self.function).__name__}{source}, commutative={self.commutative})"

    def check(self, dtype: np.dtype) -> None:
        """Try the op on two arrays of ones, of several lengths.

        Raises: ValueError where it fails, or its result has another shape, or a dtype of another kind.
        """
        for shape in ((2,), (1,), (5,)):
            try:
                result = np.asarray(self.function(np.ones(shape, dtype), np.ones(shape, dtype)))
            except Exception as error:  # all ranks must be told of any error
                raise ValueError(f"op {self} of {dtype} fails: {type(error).__name__}: {error}") from None
            if result.shape != shape or not np.can_cast(result.dtype, dtype, "same_kind"):
                what = f"arrays of {dtype} and shape {shape} returns {result.dtype} of shape {result.shape}"
                raise ValueError(f"op {self} of two {what}: return one like them")


def sum_dtype(dtype: np.dtype, op: str | Op) -> np.dtype:
    """Return the dtype of partial results: 16-bit floats are summed up and multiplied in float32.

    >>> sum_dtype(BFLOAT16, "avg"), sum_dtype(BFLOAT16, "max")
    (dtype('float32'), dtype(bfloat16))
    """
    return np.dtype("float32") if dtype in HALVES and op not in ("min", "max") else dtype


def has_kernel(op: str | Op) -> bool:
    """Return whether host and device programs can reduce with it; over messages, any op is reduced."""
    return not isinstance(op, Op) and bool(OPS[op].kernel)


def located(precedes: np.ufunc, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return the pairs whose values precede, and those of the lesser index where these are equal; a NaN precedes all.

    >>> pairs = np.array([(1, 5), (2, 0)], "f4,i4"), np.array([(1, 3), (3, 1)], "f4,i4")
    >>> LOCATING["minloc"](*pairs).tolist(), LOCATING["maxloc"](*pairs).tolist()
    ([(1.0, 3), (2.0, 0)], [(1.0, 3), (3.0, 1)])
    """
    value, index = a.dtype.names or ()
    a_is_nan, b_is_nan = a[value] != a[value], b[value] != b[value]
    is_equal = (a[value] == b[value]) | (a_is_nan & b_is_nan)
    is_first = ~a_is_nan & (b_is_nan | precedes(b[value], a[value]))
    return np.where(is_first | (is_equal & (b[index] < a[index])), b, a)


LOCATING: dict[str, Function] = {"minloc": partial(located, np.less), "maxloc": partial(located, np.greater)}
