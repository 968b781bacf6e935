"""What our collectives are compared with: the MPI library's own, and those of gloo and NCCL, through torch."""

import os
import socket
import sys
from argparse import Namespace
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

from mpi4py import MPI

from collectives import arrays
from collectives.arguments import REDUCTIONS
from collectives.arrays import HALVES
from collectives.baseline import MPI_OPS, mpi_view
from collectives.bench.device import homes, sharing
from collectives.bench.trial import Trial
from collectives.communicator import Communicator
from collectives.errors import InputError

PATIENCE = timedelta(seconds=60)


def peer_call(comm: Communicator, trial: Trial, name: str) -> Callable[[], Any]:
    """A peer's call on a trial's arrays.  Collective.

    Raises: InputError on every rank for what the peer does not do.
    """
    a = trial
    if name == "mpi":
        with comm.agreed("mpi"):
            return mpi_call(comm.mpi, a.collective, a.x, a.out, a.setting.op, a.root)
    with comm.agreed(name):
        call = torch_call(a.collective, a.x, a.out, a.setting.op, a.root)
        a.fill()
        try:
            call()  # which refuses dtypes that it can't move
        except (RuntimeError, TypeError) as error:
            raise ValueError(str(error).splitlines()[0]) from None
    return call


def mpi_call(mpi: MPI.Comm, collective: str, x: Any, out: Any, op: str = "sum", root: int = 0) -> Callable[[], Any]:
    """The MPI library's call, as directly as mpi4py can: in place where `x` and `out` are one array."""
    if collective == "barrier":
        return mpi.Barrier
    refuse_mpi(collective, x if out is None else out)
    in_place = x is out
    here, there = (None if array is None else mpi_view(arrays.flat(array)[1]) for array in (x, out))
    own = MPI.IN_PLACE if in_place or inside(x, out) else here
    is_root = mpi.rank == root
    match collective:
        case "all_reduce":
            return averaged(partial(mpi.Allreduce, own, there, MPI_OPS[op]), out, op, mpi.size)
        case "reduce":
            call = partial(mpi.Reduce, own if is_root else here, there if is_root else None, MPI_OPS[op], root)
            return averaged(call, out if is_root else None, op, mpi.size)
        case "reduce_scatter":
            if inside(out, x):
                raise ValueError("MPI's reduce_scatter in place leaves the result elsewhere")
            return averaged(partial(mpi.Reduce_scatter_block, here, there, MPI_OPS[op]), out, op, mpi.size)
        case "all_gather":
            return partial(mpi.Allgather, own, there)
        case "all_to_all":
            return partial(mpi.Alltoall, here, there)
        case "gather":
            return partial(mpi.Gather, here, there if is_root else None, root)
        case "scatter":
            return partial(mpi.Scatter, here if is_root else None, there, root)
    return partial(mpi.Bcast, here, root)


def refuse_mpi(collective: str, array: Any) -> None:
    device, view = arrays.flat(array)
    if not device.mpi_reads:
        raise ValueError(f"it needs an MPI that reads {device.name} memory")
    if collective in REDUCTIONS and view.dtype in HALVES:
        raise ValueError(f"MPI's own sums of {view.dtype} are wrong or absent")


def inside(part: Any, whole: Any) -> bool:
    """Whether an array lies in another, which is longer."""
    if part is None or whole is None or part.nbytes >= whole.nbytes:
        return False
    return 0 <= arrays.pointer(part) - arrays.pointer(whole) < whole.nbytes


def averaged(call: Callable[[], Any], out: Any, op: str, size: int) -> Callable[[], Any]:
    """A sum that is divided, for an average."""
    if op != "avg" or out is None:
        return call
    device, view = arrays.flat(out)

    def run() -> None:
        call()
        device.divide(view, size)

    return run


def torch_call(collective: str, x: Any, out: Any, op: str = "sum", root: int = 0) -> Callable[[], Any]:
    """torch.distributed's call, by whichever backend was started: in place where `x` and `out` are one array."""
    from torch import distributed

    here: Any
    there: Any
    here, there = (None if array is None else arrays.to_torch(array) for array in (x, out))
    size, is_root = distributed.get_world_size(), distributed.get_rank() == root
    reduction = getattr(distributed.ReduceOp, "PRODUCT" if op == "prod" else op.upper())
    if op == "avg" and distributed.get_backend() == "gloo":
        raise ValueError("gloo has no op 'avg'")
    match collective:
        case "all_reduce" if x is out:
            return partial(distributed.all_reduce, there, reduction)
        case "reduce_scatter" if not inside(out, x):
            return partial(renamed("reduce_scatter"), there, here, reduction)
        case "all_gather" if not inside(x, out):
            return partial(renamed("all_gather"), there, here)
        case "all_to_all":
            return partial(distributed.all_to_all_single, there, here)
        case "broadcast":
            return partial(distributed.broadcast, here, root)
        case "gather":
            return partial(distributed.gather, here, list(there.chunk(size)) if is_root else None, root)
        case "scatter":
            return partial(distributed.scatter, there, list(here.chunk(size)) if is_root else None, root)
        case "barrier":
            return distributed.barrier
    raise ValueError(f"torch.distributed has no such {collective}")


def renamed(collective: str) -> Callable[..., Any]:
    """Newer releases of torch warn of the name that older ones know."""
    from torch import distributed

    older = {"reduce_scatter": "reduce_scatter_tensor", "all_gather": "all_gather_into_tensor"}
    return getattr(distributed, f"{collective}_single", None) or getattr(distributed, older[collective])


def start(comm: Communicator, flags: Namespace) -> list[str]:
    """Start the peers that are there, and leave only those in the flags; says why others are not.  Collective."""
    missing, together = [], sharing(homes(comm, flags.device)) if "nccl" in flags.peers else ""
    for name in [peer for peer in flags.peers if peer != "mpi"]:
        try:
            with comm.agreed(name):
                refuse_absent(name, flags.device, together)
            start_torch(comm.mpi, name, alone=len(comm.topology.nodes) == 1)
        except InputError as error:
            flags.peers = [peer for peer in flags.peers if peer != name]
            missing.append(f"--peers {name}: left out: {error}")
    return missing


def refuse_absent(name: str, device: str, together: str) -> None:
    """`together` says which ranks have one GPU, on which NCCL refuses to work."""
    if (name == "gloo") != (device == "cpu"):
        raise ValueError(f"it is not for --device {device}")
    try:
        from torch import cuda, distributed
    except ImportError:
        raise ValueError("torch is not installed") from None
    there = distributed.is_gloo_available() if name == "gloo" else distributed.is_nccl_available()
    if not there:
        raise ValueError(f"this torch has no {name}")
    if name == "nccl" and together:
        raise ValueError(f"it needs a GPU for each rank, but {together}")
    if name == "nccl":
        cuda.set_device(arrays.device(device).xp.cuda.runtime.getDevice())  # where torch's barrier works, too


def start_torch(mpi: MPI.Comm, backend: str, alone: bool) -> None:
    """Start torch.distributed among the ranks, which are on one machine if `alone`."""
    from torch import distributed

    mine = "127.0.0.1" if alone else socket.gethostname()
    address = mpi.bcast(f"tcp://{mine}:{free_port()}" if mpi.rank == 0 else None)
    if alone:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    end_job = sys.excepthook
    distributed.init_process_group(backend, init_method=address, rank=mpi.rank, world_size=mpi.size, timeout=PATIENCE)
    sys.excepthook = end_job  # torch's holds back what this one prints, until after it has ended the job


def stop() -> None:
    """End torch.distributed, if it was started."""
    if "torch.distributed" in sys.modules:
        from torch import distributed

        if distributed.is_initialized():
            distributed.destroy_process_group()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]
