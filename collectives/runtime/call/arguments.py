"""Arguments of a call on one rank, with the checks that one rank can make."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from operator import index
from typing import Any

import numpy as np

from collectives.algorithms import Access, Algorithm, rows
from collectives.arrays.addresses import address_of
from collectives.arrays.device import Device, host
from collectives.arrays.ops import BFLOAT16, Op, has_kernel
from collectives.arrays.views import check_op, flat, is_a, writable
from collectives.schedule.spec import SOURCES, Chunks, spec_of

REFUSALS = (ValueError, TypeError, RuntimeError, MemoryError)  # exceptions of NumPy, CuPy and torch for an argument


@dataclass
class Arguments:
    """A collective's arguments on one rank, after the checks that one rank can make."""

    collective: str
    rank: int
    size: int
    x: Any = None
    out: Any = None
    op: str | Op = "sum"
    root: int = 0
    counts: Sequence[int] | None = None
    send_counts: Sequence[int] | None = None
    recv_counts: Sequence[int] | None = None
    wire_dtype: Any = None
    reproducible: bool = False

    def __post_init__(self) -> None:
        self.spec = spec_of(self.collective)
        if self.spec.rooted:
            check_rank("root", self.root, self.size)
        self.device: Device
        self.flat: Any
        self.device, self.flat = (host(), None) if self.spec.gives is Chunks.NONE else flat(self.exemplar)
        if self.flat is not None and self.spec.reduces:
            check_op(self.op, self.flat.dtype)
            if self.is_reduced_by_numpy and self.device is not host():
                raise ValueError(f"op {self.op} reduces only host arrays: copy x to the host, or use another op")
            if self.op == "avg" and self.spec.sources is not SOURCES["everyone"]:
                raise ValueError("op 'avg' needs all ranks, but a scan reduces only some: use 'sum', and divide")
        if self.wire_dtype is not None:
            self.wire_dtype = checked_wire_dtype(self.wire_dtype, self.flat.dtype)
        self.counts = self.checked_counts("counts", self.counts)
        self.send_counts = self.checked_counts("send_counts", self.send_counts)
        self.recv_counts = self.checked_counts("recv_counts", self.recv_counts)
        if self.recv_counts is not None and self.send_counts is None:
            raise ValueError(f"recv_counts={self.recv_counts} need send_counts: pass them too")

    @property
    def holds_x(self) -> bool:
        """Whether this rank passes an `x`, even if only for the result; a scatter's receivers do not."""
        return self.spec.in_place or self.spec.reads(self.rank, self.root)

    @property
    def exemplar(self) -> Any:
        """The array that determines dtype and device: `x`, or the one that a scatter's receiver passes."""
        return self.out if self.x is None and not self.holds_x else self.x

    @property
    def total(self) -> int:
        """The number of elements of the call, the same on every rank."""
        if self.x is not None:
            return len(self.flat)
        return sum(self.counts) if self.counts is not None else self.size * len(self.flat)

    @property
    def lengths(self) -> Sequence[int]:
        """The lengths in elements of the call, or of its chunks, as ranks compare them."""
        if self.flat is None:
            return []
        return self.counts or [self.total]

    def checked_counts(self, name: str, values: Sequence[int] | None) -> list[int] | None:
        if values is None:
            return None
        try:
            counts = [index(n) for n in values]
        except TypeError:
            counts = []
        if len(counts) != self.size or min(counts) < 0:
            raise ValueError(f"{name}={values} must be {self.size} integers, one for each rank, none below 0")
        return counts

    @property
    def demands(self) -> list[str]:
        """The caller's other requirements of the algorithm, as written in the call."""
        wire = [] if self.wire_dtype is None else [f"wire_dtype={self.wire_dtype}"]
        op = [f"op={self.op}"] * self.is_reduced_by_numpy
        return op + wire + ["reproducible=True"] * bool(self.reproducible)

    @property
    def is_reduced_by_numpy(self) -> bool:
        return self.spec.reduces and not has_kernel(self.op)

    @property
    def kernel_op(self) -> str:
        """The op with which programs reduce."""
        assert isinstance(self.op, str), f"{self.op} has no kernel"
        return self.op

    def suits(self, row: Algorithm) -> bool:
        """Return whether an algorithm meets the call's demands: reduction in rank order, by messages only."""
        in_order = self.reproducible or (isinstance(self.op, Op) and not self.op.commutative)
        by_messages = self.is_reduced_by_numpy or self.wire_dtype is not None
        return (row.in_order or not in_order) and not (row.access and by_messages)

    def able(self, access: Access = Access.DIRECT) -> list[str]:
        """Return the names of the algorithms that meet the call's demands."""
        usable = [r for r in rows(self.collective, self.size, self.send_counts is None) if r.access <= access]
        return ["auto", *(row.name for row in usable if self.suits(row)), *([] if self.demands else ["mpi"])]

    def check_algorithm(self, name: str) -> None:
        """Refuse an algorithm that does not meet the call's demands.

        Raises: ValueError with the names of those that can.
        """
        if name not in self.able():
            raise ValueError(f"algorithm {name!r} cannot do {', '.join(self.demands)}: use {', '.join(self.able())}")

    def describe(self, algorithm: str) -> str:
        """Return the call as every rank must make it, for comparison between ranks."""
        words = []
        if self.flat is not None:
            uneven = "uneven counts" if self.send_counts is not None else f"{self.total} elements"
            words += [uneven if self.counts is None else f"counts {self.counts}", str(self.flat.dtype)]
        words += [f"op={self.op}"] * self.spec.reduces + [f"root={self.root}"] * self.spec.rooted
        words += [demand for demand in self.demands if demand not in words]
        return f"{self.collective}({', '.join([*words, f'algorithm={algorithm}'])})"

    def lent(self, out: Any) -> Arguments:
        """Return the same call on the same memory, without the caller's arrays; `out` is that of the result, if any."""
        views = self.flat if self.x is not None else None, out
        return self.moved(tuple(map(address_of, views)), views)

    def moved(self, addresses: tuple[int, ...], like: tuple[Any, Any] | None = None) -> Arguments:
        """Return the same call on memory at two other addresses, like its own flat arrays or these.

        It follows the same library's stream.
        """
        moved = copy(self)
        moved.x, moved.out = self.arrays_at(addresses, like)
        moved.flat = None if self.flat is None else moved.exemplar
        return moved

    def arrays_at(self, addresses: tuple[int, ...], like: tuple[Any, Any] | None = None) -> list[Any]:
        """Return flat arrays at two addresses, like `x` and `out` or these."""
        return [
            None if view is None else self.device.borrow(address, len(view), view.dtype)
            for address, view in zip(addresses, like or (self.x, self.out), strict=True)
        ]

    def output(self, count: int, new: Callable[[Any], Any]) -> tuple[Any, Any]:
        """Return the caller's `out`, or a new array: as the caller sees it, and flat."""
        if self.out is None:
            result = new(self.exemplar)
            return result, flat(result)[1]
        device, out = flat(self.out)
        if device.device_name != self.device.device_name or out.dtype != self.flat.dtype or len(out) != count:
            raise ValueError(
                f"out has {len(out)} elements of {out.dtype} on {device.device_name}: pass one of {count} of "
                f"{self.flat.dtype} on {self.device.device_name}, or none"
            )
        check_writable(out, "out")
        return self.out, out


def check_integer(name: str, value: Any, least: int, most: int, remedy: str = "") -> None:
    if not isinstance(value, int | np.integer) or not least <= value <= most:
        raise ValueError(f"{name} {value!r} is out of range: use an integer from {least} to {most}{remedy}")


def check_rank(name: str, rank: Any, size: int) -> None:
    if not isinstance(rank, int | np.integer) or not 0 <= rank < size:
        raise ValueError(f"{name} {rank!r} is out of range: use a rank from 0 to {size - 1}")


def checked_wire_dtype(wire_dtype: Any, dtype: np.dtype) -> np.dtype:
    if str(wire_dtype) != "bfloat16":
        raise ValueError(f"wire_dtype {wire_dtype!r} is not supported: use 'bfloat16', or None")
    if dtype != np.dtype("float32"):
        raise ValueError(f"wire_dtype 'bfloat16' is for float32, but x is of {dtype}: omit it, or cast x")
    return BFLOAT16


def like(device: Device, count: int, unit: int, rows_of: Callable[[int], int], dtype: np.dtype, x: Any) -> Any:
    """Return a new array of `count` elements, of the library that `x` is of, whose rows are like those of `x`.

    It is flat where chunks, whose lengths `unit` divides, are not of whole rows.  Rows without elements cannot be
    counted by them: `rows` of `x` give `rows_of(rows)`, unless other ranks have rows with elements.
    """
    rows, *row = getattr(x, "shape", ()) or (0,)
    length = math.prod(row)
    shape: tuple[int, ...] = (count,)
    if row and not length and not count:
        shape = (rows_of(rows), *row)
    elif row and length and unit % length == 0:
        shape = (count // length, *row)
    if type(x) is np.ndarray:
        return np.empty(shape, x.dtype)
    if is_a(x, "torch", "Tensor"):
        return x.new_empty(shape)
    return device.empty(shape, dtype)


def check_writable(view: Any, name: str) -> None:
    if not writable(view):
        raise ValueError(f"{name} is read-only: pass an array that may be written")
