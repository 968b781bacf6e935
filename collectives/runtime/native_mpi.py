"""`algorithm="mpi"`: the MPI library's own collectives, as a baseline and for comparison.  Nothing else uses them."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from mpi4py import MPI

from collectives.arrays.views import HALVES, flat, pointer, same_memory
from collectives.runtime.arguments import REDUCTIONS, Arguments, Operands, even
from collectives.runtime.messages import Messages
from collectives.runtime.plan import Plan, Progress
from collectives.schedule.ops import OPS

MPI_OPS = {name: getattr(MPI, op.mpi) for name, op in OPS.items()}


class NativePlan(Plan):
    """A call of the MPI library behind a plan's interface; `start()` runs it to its end."""

    def __init__(self, a: Arguments, o: Operands, mpi: MPI.Comm, progress: Progress):
        super().__init__(f"{a.collective} mpi", o.result, progress, a.device, [])
        self.native_call = native_call(a, o, mpi)
        if a.op == "avg" and a.collective in REDUCTIONS and o.out is not None:
            self.divide = (o.out, a.size)

    def _run(self) -> Iterator[Messages]:
        self.device.begin()
        for target, source in self.before:
            self.device.copy(target, source)
        self.device.synchronize()
        with self._progress.inside_mpi(self):
            self.native_call()
        if self.divide:
            self.device.divide(*self.divide)
        for target, source in self.after:
            self.device.copy(target, source)
        self._last = self.device.record()
        yield Messages([])


def check_native(a: Arguments) -> None:
    """Refuse what the MPI library cannot do.

    Raises: ValueError with the remedy.
    """
    if not a.device.mpi_reads:
        raise ValueError(f"algorithm 'mpi' needs an MPI that reads {a.device.name} memory; use another algorithm")
    if a.collective in REDUCTIONS and a.flat.dtype in HALVES:
        raise ValueError(
            f"algorithm 'mpi' cannot reduce {a.flat.dtype}: MPI's own sums of it are wrong or absent; "
            "use another algorithm"
        )


def native_call(a: Arguments, o: Operands, mpi: MPI.Comm) -> Callable[[], None]:
    if a.collective == "barrier":
        return mpi.Barrier
    x, op = mpi_view(a.flat), MPI_OPS[a.op]
    out: Any = None if o.result is None else mpi_view(flat(o.result)[1])
    here = MPI.IN_PLACE if same_memory(x, out) else x
    counts: Sequence[int]
    match a.collective:
        case "all_reduce":
            return lambda: mpi.Allreduce(here, out, op)
        case "reduce_scatter":
            counts = a.counts or even(len(x), a.size)
            inside = pointer(x) <= pointer(out) < pointer(x) + max(x.nbytes, 1)  # where MPI may not write
            apart = a.device.empty(len(out), out.dtype) if inside else out

            def reduce_scatter() -> None:
                mpi.Reduce_scatter(x, apart, counts, op)
                if apart is not out:
                    a.device.copy(out, apart)

            return reduce_scatter
        case "all_gather":
            counts = a.counts or [len(x)] * a.size
            own = MPI.IN_PLACE if same_memory(x, chunk_of(out, counts, a.rank)) else x
            return lambda: mpi.Allgatherv(own, [out, counts])
        case "all_to_all":
            sends = a.send_counts or [len(x) // a.size] * a.size
            return lambda: mpi.Alltoallv([x, sends], [out, a.recv_counts or sends])
        case "gather":
            if a.rank != a.root:
                return lambda: mpi.Gatherv(x, None, a.root)
            counts = a.counts or [len(x)] * a.size
            own = MPI.IN_PLACE if same_memory(x, chunk_of(out, counts, a.rank)) else x
            return lambda: mpi.Gatherv(own, [out, counts], a.root)
        case "scatter":
            if a.rank != a.root:
                return lambda: mpi.Scatterv(None, out, a.root)
            counts = a.counts or even(len(x), a.size)
            into = MPI.IN_PLACE if same_memory(out, chunk_of(x, counts, a.rank)) else out
            return lambda: mpi.Scatterv([x, counts], into, a.root)
        case "broadcast":
            return lambda: mpi.Bcast(x, a.root)
        case _:
            return lambda: mpi.Reduce(here if a.rank == a.root else x, out if a.rank == a.root else None, op, a.root)


def chunk_of(x: Any, counts: Sequence[int], rank: int) -> Any:
    begin = sum(counts[:rank])
    return x[begin : begin + counts[rank]]


def mpi_view(x: Any) -> Any:
    """MPI has no 16-bit floats, and bools without an order: as integers they move, and compare, alike."""
    if x.dtype == np.dtype(bool):
        return x.view(np.uint8)
    return x.view(np.uint16) if x.dtype in HALVES else x
