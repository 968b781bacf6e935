"""Single arguments: their checks, what NumPy, CuPy and torch raise for a wrong one, and ops of MPI's."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from mpi4py import MPI

from collectives.arrays.ops import BFLOAT16, Op
from collectives.arrays.views import writable
from collectives.schedule.spec import OPS

MPI_OPS = {name: getattr(MPI, op.mpi) for name, op in OPS.items()}
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


@dataclass(frozen=True)
class CreatedOp:
    """The function of an op that a program has created by MPI.Op.Create."""

    op: MPI.Op

    def __call__(self, low: np.ndarray, high: np.ndarray) -> np.ndarray:
        self.op.Reduce_local(low, high)
        return high

    def __hash__(self) -> int:
        return id(self.op)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CreatedOp) and other.op is self.op


def op_name(op: str | Op | MPI.Op) -> str | Op:
    """Return the name of an op of MPI's, as "sum" for MPI.SUM, or our op for a user-defined one; others unchanged.

    An op without a name here gets MPI's, which is refused as any unknown one.
    """
    if not isinstance(op, MPI.Op):
        return op
    if not op.is_predefined:
        return Op(CreatedOp(op), op.Is_commutative())
    names = {name: own for name, own in MPI_OPS.items() if name != "avg"}
    names |= {f"MPI.{name}": own for name, own in vars(MPI).items() if isinstance(own, MPI.Op)}
    return next(name for name, own in names.items() if own == op)
