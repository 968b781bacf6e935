"""Peers to compare with: the MPI library's own collectives, and those of gloo and NCCL, through torch."""

import atexit
import os
import sys
from argparse import Namespace
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

from mpi4py import MPI

from collectives.arrays import views
from collectives.bench.trial import Trial
from collectives.communicator import Communicator
from collectives.job.errors import InputError
from collectives.runtime.arguments import Arguments
from collectives.runtime.native_mpi import check_native, native_call
from collectives.runtime.operands import operands_of
from collectives.schedule.spec import OPS, Chunks

TIMEOUT = timedelta(seconds=60)


def peer_call(comm: Communicator, trial: Trial, name: str) -> Callable[[], Any]:
    """Bind a peer's call to a trial's arrays.  Collective.

    Raises: InputError on every rank for calls that the peer does not support.
    """
    arguments = trial.collective, trial.x, trial.out, trial.workload.op, trial.root
    with comm.agreed(name):
        if name == "mpi":
            return mpi_call(comm.mpi, *arguments)
        call = torch_call(*arguments)
        trial.fill()
        try:
            call()  # fails for dtypes that it can't move
        except (RuntimeError, TypeError) as error:
            raise ValueError(str(error).splitlines()[0]) from None
    return call


def mpi_call(mpi: MPI.Comm, collective: str, x: Any, out: Any, op: str = "sum", root: int = 0) -> Callable[[], Any]:
    """Bind the MPI library's call, as directly as mpi4py can: in place where `x` and `out` are one array."""
    a = Arguments(collective, mpi.rank, mpi.size, x, None if x is out else out, op, root)
    check_native(a)
    if a.spec.reduces and op == "avg":
        raise ValueError("MPI has no op 'avg'")
    o = operands_of(a)
    if o.in_place and a.spec.reduces and a.spec.gets is Chunks.OWN:
        raise ValueError("MPI's reduce_scatter in place leaves the result elsewhere")
    return native_call(a, o, mpi)


def inside(part: Any, whole: Any) -> bool:
    """Return whether an array is a part of another, longer one."""
    if part is None or whole is None or part.nbytes >= whole.nbytes:
        return False
    return 0 <= views.pointer(part) - views.pointer(whole) < whole.nbytes


def torch_call(collective: str, x: Any, out: Any, op: str = "sum", root: int = 0) -> Callable[[], Any]:
    """Bind torch.distributed's call, by whichever backend was started: in place where `x` and `out` are one array."""
    from torch import distributed

    here: Any
    there: Any
    here, there = (None if array is None else views.to_torch(array) for array in (x, out))
    size, is_root = distributed.get_world_size(), distributed.get_rank() == root
    if not OPS[op].torch or (op == "avg" and distributed.get_backend() == "gloo"):
        raise ValueError(f"{distributed.get_backend()} has no op {op!r}")
    reduction = getattr(distributed.ReduceOp, OPS[op].torch)
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
    """Find torch's function, whose older name newer releases warn of."""
    from torch import distributed

    older = {"reduce_scatter": "reduce_scatter_tensor", "all_gather": "all_gather_into_tensor"}
    return getattr(distributed, f"{collective}_single", None) or getattr(distributed, older[collective])


def take_device(comm: Communicator, device: str) -> None:
    """Choose this rank's GPU: the ranks of a node take its GPUs in turn."""
    if device == "cuda":
        runtime = views.device(device).xp.cuda.runtime
        local = comm.topology.nodes[comm.topology.node_of[comm.rank]].index(comm.rank)
        runtime.setDevice(local % runtime.getDeviceCount())


def start(comm: Communicator, flags: Namespace) -> dict[str, str]:
    """Start the peers that are available, and say why others are not.  Collective."""
    missing = {}
    for name in [peer for peer in flags.peers if peer != "mpi"]:
        try:
            with comm.agreed(name):
                if (name == "gloo") != (flags.device == "cpu"):
                    raise ValueError(f"it is not for --device {flags.device}")
                from torch import cuda, distributed

                if not getattr(distributed, f"is_{name}_available")():
                    raise ValueError(f"this torch has no {name}")
                if name == "nccl":  # torch's barrier works there, too
                    cuda.set_device(views.device(flags.device).xp.cuda.runtime.getDevice())
            start_torch(comm.mpi, name, alone=len(comm.topology.nodes) == 1)
        except InputError as error:
            missing[name] = f"--peers {name}: left out: {error}"
    return missing


def start_torch(mpi: MPI.Comm, backend: str, alone: bool) -> None:
    """Start torch.distributed among the ranks, which are on one machine if `alone`.  Collective."""
    from torch import distributed

    from collectives.torch_backend import create_store

    if alone:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    end_job, store = sys.excepthook, create_store(mpi, TIMEOUT)
    distributed.init_process_group(backend, store=store, rank=mpi.rank, world_size=mpi.size, timeout=TIMEOUT)
    atexit.register(distributed.destroy_process_group)
    sys.excepthook = end_job  # torch's delays this one's output until after the end of the job
