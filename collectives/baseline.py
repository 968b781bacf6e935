"""`algorithm="mpi"`: the MPI library's own collectives, as a baseline and for comparison.  Nothing else uses them."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from mpi4py import MPI

from collectives.arrays import BFLOAT16, flat, pointer, same_memory
from collectives.bind import REDUCTIONS, Arguments, Binding, even
from collectives.executor import Requests
from collectives.plan import Plan, Progress

HALVES = {np.dtype("float16"), BFLOAT16}
MPI_OPS = {"sum": MPI.SUM, "prod": MPI.PROD, "min": MPI.MIN, "max": MPI.MAX, "avg": MPI.SUM}


class NativePlan(Plan):
    """A call of the MPI library behind a plan's interface; `start()` runs it to its end."""

    def __init__(self, a: Arguments, binding: Binding, mpi: MPI.Comm, progress: Progress):
        super().__init__(f"{a.collective} mpi", binding.result, progress, a.device, [])
        self.call = native_call(a, binding, mpi)
        if binding.divide is not None and a.op == "avg":
            self.divide = (binding.divide, a.size)

    def _run(self) -> Iterator[Requests]:
        self.device.begin()
        self.device.synchronize()
        self.call()
        if self.divide:
            self.device.divide(*self.divide)
        self.device.end()
        yield ()


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


def native_call(a: Arguments, binding: Binding, mpi: MPI.Comm) -> Callable[[], None]:
    if a.collective == "barrier":
        return mpi.Barrier
    x, out, op = mpi_view(a.flat), mpi_view(flat(binding.result)[1]), MPI_OPS[a.op]
    here = MPI.IN_PLACE if same_memory(x, out) else x
    begin = sum(a.counts[: a.rank]) if a.counts else a.rank * len(x)
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
            own = MPI.IN_PLACE if same_memory(x, out[begin : begin + len(x)]) else x
            return lambda: mpi.Allgatherv(own, [out, a.counts or [len(x)] * a.size])
        case "all_to_all":
            sends = a.send_counts or [len(x) // a.size] * a.size
            return lambda: mpi.Alltoallv([x, sends], [out, a.recv_counts or sends])
        case "broadcast":
            return lambda: mpi.Bcast(x, a.root)
        case _:
            return lambda: mpi.Reduce(here if a.rank == a.root else x, out if a.rank == a.root else None, op, a.root)


def mpi_view(x: Any) -> Any:
    """MPI has no 16-bit floats, and bools without an order: as integers they move, and compare, alike."""
    if x.dtype == np.dtype(bool):
        return x.view(np.uint8)
    return x.view(np.uint16) if x.dtype in HALVES else x
