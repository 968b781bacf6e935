"""`algorithm="mpi"`: the MPI library's own collectives, as a baseline and for comparison.  Nothing else uses them."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from mpi4py import MPI

from collectives.arrays.addresses import pointer
from collectives.arrays.device import Device
from collectives.arrays.ops import HALVES, Op
from collectives.arrays.views import flat
from collectives.runtime.call.arguments import Arguments
from collectives.runtime.call.operands import Operands
from collectives.runtime.plan import Plan, Step
from collectives.runtime.progress import Progress, Waitable
from collectives.schedule.spec import OPS, Chunks

SATURATED = frozenset(map(np.dtype, ("int8", "uint8", "int16", "uint16")))  # by Open MPI's vector instructions
MPI_OPS = {name: getattr(MPI, op.mpi) for name, op in OPS.items()}


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


class NativeCall(Step):
    """A call of the MPI library, which returns at its end."""

    def __init__(self, function: Callable[[], None]):
        self.function = function

    def run(self, device: Device) -> Iterator[Waitable]:
        device.synchronize()
        self.function()
        yield from ()

    def awaits(self) -> str:
        return "in the MPI library's own"


def native_plan(a: Arguments, o: Operands, mpi: MPI.Comm, progress: Progress) -> Plan:
    """Make a plan of a call of the MPI library; `start()` runs it to its end."""
    plan = Plan(f"{a.collective} mpi", o.result, progress, a.device, [NativeCall(native_call(a, o, mpi))])
    plan.may_block = True
    if a.op == "avg" and a.spec.reduces and o.out is not None:
        plan.divide = o.out, a.size
    return plan


def check_native(a: Arguments) -> None:
    """Refuse calls that the MPI library does not support.

    Raises: ValueError with the remedy.
    """
    if not a.device.mpi_reads:
        raise ValueError(f"algorithm 'mpi' needs an MPI that reads {a.device.name} memory; use another algorithm")
    if a.spec.reduces and a.flat.dtype in HALVES:
        raise ValueError(
            f"algorithm 'mpi' cannot reduce {a.flat.dtype}: MPI's own sums of it are wrong or absent; "
            "use another algorithm"
        )
    if a.spec.reduces and a.op in ("sum", "avg") and a.flat.dtype in SATURATED:
        raise ValueError(
            f"algorithm 'mpi' cannot sum {a.flat.dtype}: Open MPI's sums of it saturate, and do not wrap; "
            "use another algorithm, or cast to int32"
        )
    for name, array in (("x", a.x), ("out", a.out)):
        if array is not None and not getattr(flat(array)[1].flags, "aligned", True):
            raise ValueError(f"algorithm 'mpi' needs aligned arrays: pass {name}.copy(), or use another algorithm")


def native_call(a: Arguments, o: Operands, mpi: MPI.Comm) -> Callable[[], None]:
    """Bind MPI's function to the arrays of a call, as directly as mpi4py can."""
    spec, extra = a.spec, ([MPI_OPS[a.kernel_op]] if a.spec.reduces else []) + ([a.root] if a.spec.rooted else [])
    if a.flat is None:
        return partial(getattr(mpi, spec.mpi))
    x, out = (None if view is None else mpi_view(view) for view in (o.source, o.out))
    if spec.gets is Chunks.ALL_BUT_ON_FIRST and out is None:  # MPI wants an array there, too
        out = mpi_view(a.device.empty(len(a.flat), a.flat.dtype))
    if "out" not in spec.takes:
        return partial(getattr(mpi, spec.mpi), x, *extra)
    equal, _, uneven = spec.mpi.partition(" ")
    is_even = a.send_counts is None if spec.exchanges else len(set(o.counts)) == 1
    function = getattr(mpi, equal if is_even or not uneven else uneven)
    if spec.reduces and spec.gets is Chunks.OWN:
        return reduce_scatter(function, a, x, out, [*([] if is_even else [o.counts]), *extra])
    send, recv = x, out
    if not is_even and uneven:
        send, recv = with_counts(send, spec.gives, o.counts), with_counts(recv, spec.gets, a.recv_counts or o.counts)
    if o.in_place and spec.gets is Chunks.OWN:
        recv = MPI.IN_PLACE
    elif o.in_place:
        send = MPI.IN_PLACE
    return partial(function, send, recv, *extra)


def with_counts(array: Any, chunks: Chunks, counts: Sequence[int]) -> Any:
    return array if array is None or chunks is Chunks.OWN else [array, counts]


def reduce_scatter(
    function: Callable[..., None], a: Arguments, x: Any, out: Any, extra: list[Any]
) -> Callable[[], None]:
    """Bind a reduce-scatter, whose in-place form differs in MPI: the result goes to other memory first."""
    is_inside = pointer(x) <= pointer(out) < pointer(x) + max(x.nbytes, 1)
    apart = a.device.empty(len(out), out.dtype) if is_inside else out

    def run() -> None:
        function(x, apart, *extra)
        a.device.copy(out, apart)

    return run if is_inside else partial(function, x, out, *extra)


def mpi_view(x: Any) -> Any:
    """View 16-bit floats, which MPI lacks, and bools, which it does not order, as integers of the same size."""
    if x.dtype == np.dtype(bool):
        return x.view(np.uint8)
    return x.view(np.uint16) if x.dtype in HALVES else x
