"""`algorithm="mpi"`: the MPI library's own collectives, as a baseline and for comparison.  Nothing else uses them."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
from mpi4py import MPI

from collectives.arrays.addresses import pointer
from collectives.arrays.device import Device
from collectives.arrays.ops import HALVES
from collectives.arrays.views import flat
from collectives.runtime.backends.bound import Bound, PlansByAddress
from collectives.runtime.call.call import Call
from collectives.runtime.call.checks import MPI_OPS
from collectives.runtime.call.operands import lent, moved
from collectives.runtime.chooser import Choice
from collectives.runtime.comparator import Comparator
from collectives.runtime.context import Context
from collectives.runtime.plan import Plan, Step
from collectives.runtime.progress import Waitable
from collectives.schedule.spec import Chunks

SATURATED = frozenset(map(np.dtype, ("int8", "uint8", "int16", "uint16")))  # by Open MPI's vector instructions


class NativeStep(Step):
    """A call of the MPI library, which returns at its end."""

    def __init__(self, function: Callable[[], None]):
        self.function = function

    def run(self, device: Device) -> Iterator[Waitable]:
        device.synchronize()
        self.function()
        yield from ()

    def awaits(self) -> str:
        return "in the MPI library's own"


class NativeBackend:
    """Calls of the MPI library."""

    def __init__(self, context: Context, comparator: Comparator):
        self.context, self.comparator = context, comparator

    def plan(self, call: Call, choice: Choice | None) -> Plan:
        """Make a plan of a call of the MPI library; `start()` runs it to its end."""
        o, divides = call.operands, call.op == "avg" and call.spec.reduces
        return Plan(
            f"{call.collective} mpi",
            o.result,
            self.context.progress,
            call.device,
            [NativeStep(native_call(call, self.context.mpi))],
            divide=(o.out, call.size) if divides and o.out is not None else None,
            may_block=True,
        )

    def bind(self, call: Call, choice: Choice | None) -> Bound:
        here = lent(call)
        plans = PlansByAddress(self.context.progress, lambda addresses: self.plan(moved(here, addresses), choice))
        return Bound(call, "mpi", plans, self.comparator.before_runs_of(call.binding))


def check_native(call: Call) -> None:
    """Refuse calls that the MPI library does not support.

    Raises: ValueError with the remedy.
    """
    if not call.device.mpi_reads:
        raise ValueError(f"algorithm 'mpi' needs an MPI that reads {call.device.name} memory; use another algorithm")
    if call.spec.reduces and call.flat.dtype in HALVES:
        raise ValueError(
            f"algorithm 'mpi' cannot reduce {call.flat.dtype}: MPI's own sums of it are wrong or absent; "
            "use another algorithm"
        )
    if call.spec.reduces and call.op in ("sum", "avg") and call.flat.dtype in SATURATED:
        raise ValueError(
            f"algorithm 'mpi' cannot sum {call.flat.dtype}: Open MPI's sums of it saturate, and do not wrap; "
            "use another algorithm, or cast to int32"
        )
    for name, array in (("x", call.x), ("out", call.out)):
        if array is not None and not getattr(flat(array)[1].flags, "aligned", True):
            raise ValueError(f"algorithm 'mpi' needs aligned arrays: pass {name}.copy(), or use another algorithm")


def native_call(call: Call, mpi: MPI.Comm) -> Callable[[], None]:
    """Bind MPI's function to the arrays of a call, as directly as mpi4py can."""
    o = call.operands
    spec, extra = (
        call.spec,
        ([MPI_OPS[call.kernel_op]] if call.spec.reduces else []) + ([call.root] if call.spec.rooted else []),
    )
    if call.flat is None:
        return partial(getattr(mpi, spec.mpi))
    x, out = (None if view is None else mpi_view(view) for view in (o.source, o.out))
    if spec.gets is Chunks.ALL_BUT_ON_FIRST and out is None:  # MPI wants an array there, too
        out = mpi_view(call.device.empty(len(call.flat), call.flat.dtype))
    if "out" not in spec.takes:
        return partial(getattr(mpi, spec.mpi), x, *extra)
    equal, _, uneven = spec.mpi.partition(" ")
    is_even = call.send_counts is None if spec.exchanges else len(set(o.counts)) == 1
    function = getattr(mpi, equal if is_even or not uneven else uneven)
    if spec.reduces and spec.gets is Chunks.OWN:
        return reduce_scatter(function, call, x, out, [*([] if is_even else [o.counts]), *extra])
    send, recv = x, out
    if not is_even and uneven:
        send, recv = with_counts(send, spec.gives, o.counts), with_counts(recv, spec.gets, call.recv_counts or o.counts)
    if o.in_place and spec.gets is Chunks.OWN:
        recv = MPI.IN_PLACE
    elif o.in_place:
        send = MPI.IN_PLACE
    return partial(function, send, recv, *extra)


def with_counts(array: Any, chunks: Chunks, counts: Sequence[int]) -> Any:
    return array if array is None or chunks is Chunks.OWN else [array, counts]


def reduce_scatter(function: Callable[..., None], call: Call, x: Any, out: Any, extra: list[Any]) -> Callable[[], None]:
    """Bind a reduce-scatter, whose in-place form differs in MPI: the result goes to other memory first."""
    is_inside = pointer(x) <= pointer(out) < pointer(x) + max(x.nbytes, 1)
    apart = call.device.empty(len(out), out.dtype) if is_inside else out

    def run() -> None:
        function(x, apart, *extra)
        call.device.copy(out, apart)

    return run if is_inside else partial(function, x, out, *extra)


def mpi_view(x: Any) -> Any:
    """View 16-bit floats, which MPI lacks, and bools, which it does not order, as integers of the same size."""
    if x.dtype == np.dtype(bool):
        return x.view(np.uint8)
    return x.view(np.uint16) if x.dtype in HALVES else x
