"""What a collective's arguments mean: the working vector, the copies into and out of it, and the result."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from collectives.algorithms import ROOTED
from collectives.arrays import Device, check_op, flat, host, is_a, same_memory, writable
from collectives.executor import Vector
from collectives.schedule import shares

REDUCTIONS = frozenset({"all_reduce", "reduce_scatter", "reduce"})


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

    def __post_init__(self) -> None:
        if self.collective in ROOTED and not 0 <= self.root < self.size:
            raise ValueError(f"root {self.root} is no rank of this communicator: use 0 to {self.size - 1}")
        self.device: Device
        self.flat: Any
        self.device, self.flat = (host(), None) if self.collective == "barrier" else flat(self.given)
        if self.flat is not None and self.collective in REDUCTIONS:
            check_op(self.op, self.flat.dtype)
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

    @property
    def nbytes(self) -> int:
        """The bytes of the working vector, the same on every rank; 0 where ranks don't know: an uneven all-to-all."""
        if self.flat is None or self.send_counts is not None:
            return 0
        own_share = self.collective in ("all_gather", "gather") and self.counts is None
        elements = self.size * len(self.flat) if own_share else sum(self.counts or [self.total])
        return elements * self.flat.dtype.itemsize

    def checked_counts(self, name: str, given: Sequence[int] | None) -> list[int] | None:
        if given is None:
            return None
        counts = [int(n) for n in given]
        if len(counts) != self.size or min(counts) < 0:
            raise ValueError(f"{name}={counts} must be {self.size} counts, one for each rank, none below 0")
        return counts

    def describe(self, algorithm: str) -> str:
        """The call as every rank must make it, for comparison between ranks."""
        said = []
        if self.flat is not None:
            uneven = "uneven counts" if self.send_counts is not None else f"{self.total} elements"
            said += [uneven if self.counts is None else f"counts {self.counts}", str(self.flat.dtype)]
        said += [f"op={self.op}"] * (self.collective in REDUCTIONS) + [f"root={self.root}"] * (
            self.collective in ROOTED
        )
        return f"{self.collective}({', '.join([*said, f'algorithm={algorithm}'])})"

    def output(self, count: int) -> tuple[Any, Any]:
        """The caller's `out`, or a new array: as the caller sees it, and flat."""
        if self.out is None:
            new = like(self.device, self.given, count)
            return new, flat(new)[1]
        device, out = flat(self.out)
        if device is not self.device or out.dtype != self.flat.dtype or len(out) != count:
            raise ValueError(
                f"out has {len(out)} elements of {out.dtype} on {device.name}: pass one of {count} of "
                f"{self.flat.dtype} on {self.device.name}, or none"
            )
        check_writable(out, "out")
        return self.out, out


@dataclass
class Binding:
    """A working vector, the copies ahead of and after the rounds, what to divide in the end, and the result."""

    vector: Vector
    result: Any
    before: list[tuple[Any, Any]] = field(default_factory=list)
    after: list[tuple[Any, Any]] = field(default_factory=list)
    divide: Any = None


def like(device: Device, x: Any, count: int) -> Any:
    """A new array of the library that `x` is of."""
    if is_a(x, "torch", "Tensor"):
        return x.new_empty(count)
    return device.empty(count, x.dtype)


def check_writable(view: Any, name: str) -> None:
    if not writable(view):
        raise ValueError(f"{name} is read-only: pass an array that may be written")


def even(count: int, size: int) -> list[int]:
    """Lengths of `size` chunks of `count` elements, the first ones one longer where it must be."""
    return [len(share) for share in shares(count, size)]


def in_place_or_out(a: Arguments) -> tuple[Any, Any, list[tuple[Any, Any]]]:
    """Result, working array, and the copy there: `out` if there is one, else `x` itself."""
    if a.out is None:
        check_writable(a.flat, "x")
        return a.x, a.flat, []
    result, out = a.output(len(a.flat))
    return result, out, [] if same_memory(out, a.flat) else [(out, a.flat)]


def bind_all_reduce(a: Arguments) -> Binding:
    result, work, before = in_place_or_out(a)
    return Binding(Vector((work, even(len(work), a.size))), result, before, divide=work)


def bind_reduce_scatter(a: Arguments) -> Binding:
    counts = a.counts or even(len(a.flat), a.size)
    if sum(counts) != len(a.flat):
        raise ValueError(f"counts={counts} add up to {sum(counts)}, but x has {len(a.flat)} elements")
    result, out = a.output(counts[a.rank])
    begin = sum(counts[: a.rank])
    own = a.flat[begin : begin + counts[a.rank]]
    if same_memory(out, own) and len(out):
        return Binding(Vector((a.flat, counts)), result, divide=out)
    work = a.device.empty(len(a.flat), a.flat.dtype)
    vector = Vector((work, counts))
    return Binding(vector, result, [(work, a.flat)], [(out, vector.view(range(a.rank, a.rank + 1)))], divide=out)


def gathered_counts(a: Arguments) -> list[int]:
    counts = list(a.counts or [len(a.flat)] * a.size)
    if counts[a.rank] != len(a.flat):
        raise ValueError(f"counts={counts} say {counts[a.rank]} for rank {a.rank}, but x has {len(a.flat)} elements")
    return counts


def bind_all_gather(a: Arguments) -> Binding:
    counts = gathered_counts(a)
    result, out = a.output(sum(counts))
    vector = Vector((out, counts))
    own = vector.view(range(a.rank, a.rank + 1))
    return Binding(vector, result, [] if same_memory(own, a.flat) else [(own, a.flat)])


def bind_all_to_all(a: Arguments) -> Binding:
    if a.send_counts is None and len(a.flat) % a.size:
        raise ValueError(f"x has {len(a.flat)} elements, which {a.size} ranks can't share evenly: pass send_counts")
    send_counts = a.send_counts or [len(a.flat) // a.size] * a.size
    if sum(send_counts) != len(a.flat):
        raise ValueError(f"send_counts={send_counts} add up to {sum(send_counts)}, but x has {len(a.flat)} elements")
    recv_counts = a.recv_counts or send_counts
    result, out = a.output(sum(recv_counts))
    if same_memory(out, a.flat) and len(out):
        raise ValueError("all_to_all cannot work in place: pass an out of its own, or none")
    return Binding(Vector((a.flat, send_counts), (out, recv_counts)), result)


def bind_broadcast(a: Arguments) -> Binding:
    if a.rank != a.root:
        check_writable(a.flat, "x")
    return Binding(Vector((a.flat, even(len(a.flat), a.size))), a.x)


def bind_reduce(a: Arguments) -> Binding:
    if a.rank == a.root:
        return bind_all_reduce(a)
    work = a.device.empty(len(a.flat), a.flat.dtype)  # partial sums, so that x stays as it is
    return Binding(Vector((work, even(len(work), a.size))), a.x, [(work, a.flat)])


def bind_gather(a: Arguments) -> Binding:
    if a.rank == a.root:
        return bind_all_gather(a)
    counts = gathered_counts(a)
    vector = Vector((a.device.empty(sum(counts), a.flat.dtype), counts))  # for what this rank passes on
    return Binding(vector, None, [(vector.view(range(a.rank, a.rank + 1)), a.flat)])


def bind_scatter(a: Arguments) -> Binding:
    counts = a.counts or even(a.total, a.size)
    if sum(counts) != a.total:
        raise ValueError(f"counts={counts} add up to {sum(counts)}, but x has {a.total} elements")
    result, out = a.output(counts[a.rank])
    work = a.flat if a.rank == a.root else a.device.empty(a.total, a.flat.dtype)
    vector = Vector((work, counts))
    own = vector.view(range(a.rank, a.rank + 1))
    return Binding(vector, result, after=[] if same_memory(own, out) else [(out, own)])


def bind_barrier(a: Arguments) -> Binding:
    return Binding(Vector(), None)


# What each collective takes besides `x` and `algorithm`.
TAKES = {
    "all_reduce": ("op", "out"),
    "reduce_scatter": ("out", "op", "counts"),
    "all_gather": ("out", "counts"),
    "all_to_all": ("out", "send_counts", "recv_counts"),
    "broadcast": ("root",),
    "reduce": ("root", "op", "out"),
    "gather": ("root", "out", "counts"),
    "scatter": ("root", "out", "counts"),
    "barrier": (),
}

BINDERS = {
    "all_reduce": bind_all_reduce,
    "reduce_scatter": bind_reduce_scatter,
    "all_gather": bind_all_gather,
    "all_to_all": bind_all_to_all,
    "broadcast": bind_broadcast,
    "reduce": bind_reduce,
    "gather": bind_gather,
    "scatter": bind_scatter,
    "barrier": bind_barrier,
}
