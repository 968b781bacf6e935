"""The working vector of a call that goes by messages, and the copies into and out of it."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from collectives.arguments import Arguments, Operands
from collectives.arrays import same_memory, sum_dtype
from collectives.executor import Vector


@dataclass
class Binding:
    """A working vector, the copies ahead of and after the rounds, and the result.

    `reduced` is the part of the vector that holds a reduction's result after the rounds.
    """

    vector: Vector
    result: Any
    before: list[tuple[Any, Any]] = field(default_factory=list)
    after: list[tuple[Any, Any]] = field(default_factory=list)
    reduced: Any = None


def copies(target: Any, source: Any) -> list[tuple[Any, Any]]:
    return [] if same_memory(target, source) else [(target, source)]


def is_wide(a: Arguments) -> bool:
    """Whether partial results have the dtype of the array, so that they may be kept in it."""
    return sum_dtype(a.flat.dtype, a.op) == a.flat.dtype


def partial_results(a: Arguments) -> Any:
    """Working memory as long as `x`."""
    return a.device.empty(len(a.flat), sum_dtype(a.flat.dtype, a.op))


def bind_all_reduce(a: Arguments, o: Operands) -> Binding:
    work = o.out if is_wide(a) else partial_results(a)
    return Binding(Vector((work, o.counts)), o.result, copies(work, o.given), copies(o.out, work), reduced=work)


def bind_reduce_scatter(a: Arguments, o: Operands) -> Binding:
    if same_memory(o.out, o.inputs[a.rank]) and len(o.out) and is_wide(a):
        return Binding(Vector((o.given, o.counts)), o.result, reduced=o.out)
    work = partial_results(a)
    vector = Vector((work, o.counts))
    own = vector.view(range(a.rank, a.rank + 1))
    return Binding(vector, o.result, [(work, o.given)], [(o.out, own)], reduced=own)


def bind_all_gather(a: Arguments, o: Operands) -> Binding:
    return Binding(Vector((o.out, o.counts)), o.result, copies(o.outputs[a.rank], o.given))


def bind_all_to_all(a: Arguments, o: Operands) -> Binding:
    return Binding(Vector((o.given, o.counts), (o.out, [len(view) for view in o.outputs])), o.result)


def bind_broadcast(a: Arguments, o: Operands) -> Binding:
    return Binding(Vector((o.given, o.counts)), o.result)


def bind_reduce(a: Arguments, o: Operands) -> Binding:
    if a.rank == a.root:
        return bind_all_reduce(a, o)
    work = partial_results(a)  # so that x stays as it is
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
