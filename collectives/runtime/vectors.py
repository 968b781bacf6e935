"""The working vector of a call that goes by messages, and the copies into and out of it."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from collectives.arrays.views import same_memory, sum_dtype
from collectives.runtime.arguments import Arguments, Operands
from collectives.runtime.messages import Vector


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


class Room(NamedTuple):
    """Where a schedule may work: whether in the caller's arrays, which is the same on all ranks; and in new ones.

    Where `together`, all ranks allocate new ones, or none.
    """

    callers: bool
    empty: Callable[[int, Any], Any]
    together: bool


def copies(target: Any, source: Any) -> list[tuple[Any, Any]]:
    return [] if same_memory(target, source) else [(target, source)]


def is_wide(a: Arguments) -> bool:
    """Whether partial results have the dtype of the array, so that they may be kept in it."""
    return sum_dtype(a.flat.dtype, a.op) == a.flat.dtype


def partial_results(a: Arguments, room: Room) -> Any:
    """Working memory as long as `x`."""
    return room.empty(len(a.flat), sum_dtype(a.flat.dtype, a.op))


def bind_all_reduce(a: Arguments, o: Operands, room: Room) -> Binding:
    work = o.out if room.callers and is_wide(a) else partial_results(a, room)
    return Binding(Vector((work, o.counts)), o.result, copies(work, o.given), copies(o.out, work), reduced=work)


def bind_reduce_scatter(a: Arguments, o: Operands, room: Room) -> Binding:
    in_place = same_memory(o.out, o.inputs[a.rank]) and len(o.out)  # perhaps on some ranks only
    if room.callers and not room.together and in_place and is_wide(a):
        return Binding(Vector((o.given, o.counts)), o.result, reduced=o.out)
    work = partial_results(a, room)
    vector = Vector((work, o.counts))
    own = vector.view(range(a.rank, a.rank + 1))
    return Binding(vector, o.result, [(work, o.given)], [(o.out, own)], reduced=own)


def bind_all_gather(a: Arguments, o: Operands, room: Room) -> Binding:
    work = o.out if room.callers else room.empty(len(o.out), o.out.dtype)
    vector = Vector((work, o.counts))
    own = vector.view(range(a.rank, a.rank + 1))
    return Binding(vector, o.result, copies(own, o.given), copies(o.out, work))


def bind_all_to_all(a: Arguments, o: Operands, room: Room) -> Binding:
    work = o.given if room.callers else room.empty(len(o.given), o.given.dtype)
    vector = Vector((work, o.counts), (o.out, [len(view) for view in o.outputs]))
    return Binding(vector, o.result, copies(work, o.given))


def bind_broadcast(a: Arguments, o: Operands, room: Room) -> Binding:
    work = o.given if room.callers else room.empty(len(o.given), o.given.dtype)
    binding = Binding(Vector((work, o.counts)), o.result)
    if a.rank == a.root:
        binding.before = copies(work, o.given)
    else:
        binding.after = copies(o.given, work)
    return binding


def bind_reduce(a: Arguments, o: Operands, room: Room) -> Binding:
    if a.rank == a.root:
        return bind_all_reduce(a, o, room)
    work = partial_results(a, room)  # so that x stays as it is
    return Binding(Vector((work, o.counts)), o.result, [(work, o.given)])


def bind_gather(a: Arguments, o: Operands, room: Room) -> Binding:
    if a.rank == a.root:
        return bind_all_gather(a, o, room)
    vector = Vector((a.device.empty(sum(o.counts), o.given.dtype), o.counts))  # for what this rank passes on
    return Binding(vector, None, [(vector.view(range(a.rank, a.rank + 1)), o.given)])


def bind_scatter(a: Arguments, o: Operands, room: Room) -> Binding:
    work = o.given if a.rank == a.root else a.device.empty(sum(o.counts), o.out.dtype)
    vector = Vector((work, o.counts))
    return Binding(vector, o.result, after=copies(o.out, vector.view(range(a.rank, a.rank + 1))))


def bind_barrier(a: Arguments, o: Operands, room: Room) -> Binding:
    return Binding(Vector(), None)


BINDERS: dict[str, Callable[[Arguments, Operands, Room], Binding]] = {
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
