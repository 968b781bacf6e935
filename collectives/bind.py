"""The working vector of a call that goes by messages, and the copies into and out of it."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from collectives.arguments import Arguments, Operands
from collectives.arrays import same_memory
from collectives.executor import Vector


@dataclass
class Binding:
    """A working vector, the copies ahead of and after the rounds, what to divide in the end, and the result."""

    vector: Vector
    result: Any
    before: list[tuple[Any, Any]] = field(default_factory=list)
    after: list[tuple[Any, Any]] = field(default_factory=list)
    divide: Any = None


def copies(target: Any, source: Any) -> list[tuple[Any, Any]]:
    return [] if same_memory(target, source) else [(target, source)]


def bind_all_reduce(a: Arguments, o: Operands) -> Binding:
    return Binding(Vector((o.out, o.counts)), o.result, copies(o.out, o.given), divide=o.out)


def bind_reduce_scatter(a: Arguments, o: Operands) -> Binding:
    if same_memory(o.out, o.inputs[a.rank]) and len(o.out):
        return Binding(Vector((o.given, o.counts)), o.result, divide=o.out)
    work = a.device.empty(len(o.given), o.given.dtype)
    vector = Vector((work, o.counts))
    return Binding(vector, o.result, [(work, o.given)], [(o.out, vector.view(range(a.rank, a.rank + 1)))], divide=o.out)


def bind_all_gather(a: Arguments, o: Operands) -> Binding:
    return Binding(Vector((o.out, o.counts)), o.result, copies(o.outputs[a.rank], o.given))


def bind_all_to_all(a: Arguments, o: Operands) -> Binding:
    return Binding(Vector((o.given, o.counts), (o.out, [len(view) for view in o.outputs])), o.result)


def bind_broadcast(a: Arguments, o: Operands) -> Binding:
    return Binding(Vector((o.given, o.counts)), o.result)


def bind_reduce(a: Arguments, o: Operands) -> Binding:
    if a.rank == a.root:
        return bind_all_reduce(a, o)
    work = a.device.empty(len(o.given), o.given.dtype)  # partial sums, so that x stays as it is
    return Binding(Vector((work, o.counts)), o.result, [(work, o.given)])


def bind_gather(a: Arguments, o: Operands) -> Binding:
    if a.rank == a.root:
        return bind_all_gather(a, o)
    vector = Vector((a.device.empty(sum(o.counts), o.given.dtype), o.counts))  # for what this rank passes on
    return Binding(vector, None, [(vector.view(range(a.rank, a.rank + 1)), o.given)])


def bind_scatter(a: Arguments, o: Operands) -> Binding:
    work = o.given if a.rank == a.root else a.device.empty(sum(o.counts), o.out.dtype)
    vector = Vector((work, o.counts))
    return Binding(vector, o.result, after=copies(o.out, vector.view(range(a.rank, a.rank + 1))))


def bind_barrier(a: Arguments, o: Operands) -> Binding:
    return Binding(Vector(), None)


BINDERS: dict[str, Callable[[Arguments, Operands], Binding]] = {
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
