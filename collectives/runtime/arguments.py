"""What a collective's arguments mean: what each rank gives and gets, chunk by chunk, checked as far as one rank can."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from operator import index
from typing import Any

import numpy as np

from collectives.algorithms import ROOTED, Algorithm, Reach, rows
from collectives.arrays.device import Device, host
from collectives.arrays.views import BFLOAT16, check_op, flat, is_a, overlap, pointer, same_memory, writable
from collectives.schedule.moves import shares

IN_PLACE = frozenset({"all_reduce", "broadcast", "reduce", "barrier"})  # without an `out`
REDUCTIONS = frozenset({"all_reduce", "reduce_scatter", "reduce"})

# What each collective takes besides `x` and `algorithm`.
TAKES = {
    "all_reduce": ("op", "out", "wire_dtype", "reproducible"),
    "reduce_scatter": ("out", "op", "counts", "wire_dtype", "reproducible"),
    "all_gather": ("out", "counts"),
    "all_to_all": ("out", "send_counts", "recv_counts"),
    "broadcast": ("root",),
    "reduce": ("root", "op", "out", "wire_dtype", "reproducible"),
    "gather": ("root", "out", "counts"),
    "scatter": ("root", "out", "counts"),
    "barrier": (),
}


@dataclass
class Arguments:
    """A collective's arguments on one rank, checked as far as one rank can."""

    collective: str
    rank: int
    size: int
    x: Any = None
    out: Any = None
    op: str = "sum"
    root: int = 0
    counts: Sequence[int] | None = None
    send_counts: Sequence[int] | None = None
    recv_counts: Sequence[int] | None = None
    wire_dtype: Any = None
    reproducible: bool = False

    def __post_init__(self) -> None:
        if self.collective in ROOTED:
            check_rank("root", self.root, self.size)
        self.device: Device
        self.flat: Any
        self.device, self.flat = (host(), None) if self.collective == "barrier" else flat(self.given)
        if self.flat is not None and self.collective in REDUCTIONS:
            check_op(self.op, self.flat.dtype)
        if self.wire_dtype is not None:
            self.wire_dtype = checked_wire_dtype(self.wire_dtype, self.flat.dtype)
        self.counts = self.checked_counts("counts", self.counts)
        self.send_counts = self.checked_counts("send_counts", self.send_counts)
        self.recv_counts = self.checked_counts("recv_counts", self.recv_counts)
        if self.recv_counts is not None and self.send_counts is None:
            raise ValueError(f"recv_counts={self.recv_counts} need send_counts: pass them too")

    @property
    def given(self) -> Any:
        """The array that says dtype and device: `x`, or what a scatter's receiver passes for it."""
        return self.out if self.x is None and self.collective == "scatter" and self.rank != self.root else self.x

    @property
    def total(self) -> int:
        """How many elements the call is about, the same on every rank."""
        if self.x is not None:
            return len(self.flat)
        return sum(self.counts) if self.counts is not None else self.size * len(self.flat)

    def checked_counts(self, name: str, given: Sequence[int] | None) -> list[int] | None:
        if given is None:
            return None
        try:
            counts = [index(n) for n in given]
        except TypeError:
            counts = []
        if len(counts) != self.size or min(counts) < 0:
            raise ValueError(f"{name}={given} must be {self.size} integers, one for each rank, none below 0")
        return counts

    @property
    def asked(self) -> list[str]:
        """What is asked of the algorithm besides, in the caller's words."""
        wire = [] if self.wire_dtype is None else [f"wire_dtype={self.wire_dtype}"]
        return wire + ["reproducible=True"] * bool(self.reproducible)

    def suits(self, row: Algorithm) -> bool:
        """Whether an algorithm does it as asked: in the order of the ranks, by messages that can be rounded."""
        return (row.in_order or not self.reproducible) and (not row.reach or self.wire_dtype is None)

    def able(self, reach: Reach = Reach.ARRAYS) -> list[str]:
        """The names of the algorithms that can do what was asked."""
        usable = [r for r in rows(self.collective, self.size, self.send_counts is None) if r.reach <= reach]
        return ["auto", *(row.name for row in usable if self.suits(row)), *([] if self.asked else ["mpi"])]

    def check_algorithm(self, name: str) -> None:
        """Refuse an algorithm that cannot do what was asked.

        Raises: ValueError with the names of those that can.
        """
        if name not in self.able():
            raise ValueError(f"algorithm {name!r} cannot do {', '.join(self.asked)}: use {', '.join(self.able())}")

    def describe(self, algorithm: str) -> str:
        """The call as every rank must make it, for comparison between ranks."""
        said = []
        if self.flat is not None:
            uneven = "uneven counts" if self.send_counts is not None else f"{self.total} elements"
            said += [uneven if self.counts is None else f"counts {self.counts}", str(self.flat.dtype)]
        said += [f"op={self.op}"] * (self.collective in REDUCTIONS) + [f"root={self.root}"] * (
            self.collective in ROOTED
        )
        return f"{self.collective}({', '.join([*said, *self.asked, f'algorithm={algorithm}'])})"

    def lent(self, o: "Operands") -> "Arguments":
        """The same call on the same memory, without keeping the caller's arrays; the result's is its `out`."""
        views = self.flat if self.x is not None else None, None if o.out is o.given else o.out
        x, out = (None if view is None else self.borrow(pointer(view), view) for view in views)
        return replace(self, x=x, out=out)

    def moved(self, place: tuple[int, ...]) -> "Arguments":
        """The same call on memory at two other addresses."""
        x, out = (
            None if view is None else self.borrow(address, view)
            for address, view in zip(place, (self.x, self.out), strict=True)
        )
        return replace(self, x=x, out=out)

    def borrow(self, address: int, like: Any) -> Any:
        return self.device.borrow(address, len(like), like.dtype)

    def output(self, count: int) -> tuple[Any, Any]:
        """The caller's `out`, or a new array: as the caller sees it, and flat."""
        if self.out is None:
            new = like(self.device, self.given, count)
            return new, flat(new)[1]
        device, out = flat(self.out)
        if device.place != self.device.place or out.dtype != self.flat.dtype or len(out) != count:
            raise ValueError(
                f"out has {len(out)} elements of {out.dtype} on {device.place}: pass one of {count} of "
                f"{self.flat.dtype} on {self.device.place}, or none"
            )
        check_writable(out, "out")
        return self.out, out


@dataclass
class Operands:
    """Flat arrays of a call on one rank: `given`, and `out` for the result; and where in them each chunk lies.

    `counts` are the chunks' lengths.  A rank that gives or gets one chunk only has None for the others.
    """

    result: Any  # as the caller sees it
    given: Any
    out: Any
    counts: list[int]
    inputs: list[Any]
    outputs: list[Any]


def check_rank(name: str, rank: Any, size: int) -> None:
    """Raises: ValueError for what is no rank of a communicator of that size."""
    if not isinstance(rank, int | np.integer) or not 0 <= rank < size:
        raise ValueError(f"{name} {rank!r} is out of range: use a rank from 0 to {size - 1}")


def checked_wire_dtype(wire_dtype: Any, dtype: np.dtype) -> np.dtype:
    if str(wire_dtype) != "bfloat16":
        raise ValueError(f"wire_dtype {wire_dtype!r} is not supported: use 'bfloat16', or None")
    if dtype != np.dtype("float32"):
        raise ValueError(f"wire_dtype 'bfloat16' is for float32, but x is of {dtype}: leave it out, or cast x")
    return BFLOAT16


def like(device: Device, x: Any, count: int) -> Any:
    """A new array of the library that `x` is of."""
    if is_a(x, "torch", "Tensor"):
        return x.new_empty(count)
    return device.empty(count, x.dtype)


def check_writable(view: Any, name: str) -> None:
    if not writable(view):
        raise ValueError(f"{name} is read-only: pass an array that may be written")


def check_overlap(x: Any, out: Any, x_part: Any, out_part: Any, allowed: str) -> None:
    """Refuse an `out` that overlaps `x`, unless those parts of them are the same memory: then the call is in place."""
    if overlap(x, out) and not same_memory(x_part, out_part):
        raise ValueError(f"out overlaps x: pass {allowed}, an out with memory of its own, or none")


def even(count: int, size: int) -> list[int]:
    """Lengths of `size` chunks of `count` elements, the first ones one longer where it must be."""
    return [len(share) for share in shares(count, size)]


def split(array: Any, counts: Sequence[int]) -> list[Any]:
    """An array's chunks of those lengths."""
    return [array[begin:end] for begin, end in pairwise(accumulate(counts, initial=0))]


def only(place: int, view: Any, size: int) -> list[Any]:
    return [view if i == place else None for i in range(size)]


def all_reduce_operands(a: Arguments) -> Operands:
    counts = even(len(a.flat), a.size)
    if a.out is None:
        check_writable(a.flat, "x")
    result, out = (a.x, a.flat) if a.out is None else a.output(len(a.flat))
    check_overlap(a.flat, out, a.flat, out, "x itself")
    return Operands(result, a.flat, out, counts, split(a.flat, counts), split(out, counts))


def reduce_scatter_operands(a: Arguments) -> Operands:
    counts = list(a.counts or even(len(a.flat), a.size))
    if sum(counts) != len(a.flat):
        raise ValueError(f"counts={counts} add up to {sum(counts)}, but x has {len(a.flat)} elements")
    result, out = a.output(counts[a.rank])
    inputs = split(a.flat, counts)
    check_overlap(a.flat, out, inputs[a.rank], out, f"chunk {a.rank} of x")
    return Operands(result, a.flat, out, counts, inputs, only(a.rank, out, a.size))


def all_gather_operands(a: Arguments) -> Operands:
    counts = gathered_counts(a)
    result, out = a.output(sum(counts))
    outputs = split(out, counts)
    check_overlap(a.flat, out, a.flat, outputs[a.rank], f"an out whose chunk {a.rank} is x")
    return Operands(result, a.flat, out, counts, only(a.rank, a.flat, a.size), outputs)


def gathered_counts(a: Arguments) -> list[int]:
    counts = list(a.counts or [len(a.flat)] * a.size)
    if counts[a.rank] != len(a.flat):
        raise ValueError(f"counts={counts} say {counts[a.rank]} for rank {a.rank}, but x has {len(a.flat)} elements")
    return counts


def all_to_all_operands(a: Arguments) -> Operands:
    if a.send_counts is None and len(a.flat) % a.size:
        raise ValueError(f"x has {len(a.flat)} elements, which {a.size} ranks can't share evenly: pass send_counts")
    send_counts = list(a.send_counts or [len(a.flat) // a.size] * a.size)
    if sum(send_counts) != len(a.flat):
        raise ValueError(f"send_counts={send_counts} add up to {sum(send_counts)}, but x has {len(a.flat)} elements")
    recv_counts = list(a.recv_counts or send_counts)
    result, out = a.output(sum(recv_counts))
    if overlap(a.flat, out):
        raise ValueError(
            "out overlaps x: all_to_all does not work in place; pass an out with memory of its own, or none"
        )
    return Operands(result, a.flat, out, send_counts, split(a.flat, send_counts), split(out, recv_counts))


def broadcast_operands(a: Arguments) -> Operands:
    if a.rank != a.root:
        check_writable(a.flat, "x")
    counts = even(len(a.flat), a.size)
    chunks = split(a.flat, counts)
    return Operands(a.x, a.flat, a.flat, counts, chunks, chunks)


def reduce_operands(a: Arguments) -> Operands:
    if a.rank == a.root:
        return all_reduce_operands(a)
    counts = even(len(a.flat), a.size)
    return Operands(a.x, a.flat, None, counts, split(a.flat, counts), [None] * a.size)


def gather_operands(a: Arguments) -> Operands:
    if a.rank == a.root:
        return all_gather_operands(a)
    return Operands(None, a.flat, None, gathered_counts(a), only(a.rank, a.flat, a.size), [None] * a.size)


def scatter_operands(a: Arguments) -> Operands:
    counts = list(a.counts or even(a.total, a.size))
    if sum(counts) != a.total:
        raise ValueError(f"counts={counts} add up to {sum(counts)}, but x has {a.total} elements")
    result, out = a.output(counts[a.rank])
    inputs = split(a.flat, counts) if a.rank == a.root else [None] * a.size
    if a.rank == a.root:
        check_overlap(a.flat, out, inputs[a.rank], out, f"chunk {a.rank} of x")
    return Operands(result, a.flat if a.rank == a.root else None, out, counts, inputs, only(a.rank, out, a.size))


def barrier_operands(a: Arguments) -> Operands:
    return Operands(None, None, None, [], [], [])


OPERANDS: dict[str, Callable[[Arguments], Operands]] = {
    "all_reduce": all_reduce_operands,
    "reduce_scatter": reduce_scatter_operands,
    "all_gather": all_gather_operands,
    "all_to_all": all_to_all_operands,
    "broadcast": broadcast_operands,
    "reduce": reduce_operands,
    "gather": gather_operands,
    "scatter": scatter_operands,
    "barrier": barrier_operands,
}
