"""Horovod 0.28's interface for PyTorch: `import collectives.horovod.torch as hvd`."""
# ruff: noqa: F401  as these names are for programs

from __future__ import annotations

from typing import Any

import torch

from collectives.horovod.batch_norm import SyncBatchNorm
from collectives.horovod.compression import Compression
from collectives.horovod.functions import (
    Adasum,
    Average,
    Max,
    Min,
    Product,
    Sum,
    allgather,
    allgather_async,
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    alltoall,
    alltoall_async,
    barrier,
    broadcast,
    broadcast_,
    broadcast_async,
    broadcast_async_,
    grouped_allgather,
    grouped_allgather_async,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
    grouped_reducescatter,
    grouped_reducescatter_async,
    join,
    reducescatter,
    reducescatter_async,
)
from collectives.horovod.handles import poll, synchronize
from collectives.horovod.matching import HorovodInternalError
from collectives.horovod.objects import (
    allgather_object,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)
from collectives.horovod.optimizer import DistributedOptimizer
from collectives.horovod.process_sets import (
    ProcessSet,
    add_process_set,
    cross_rank,
    cross_size,
    global_process_set,
    init,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    rank,
    remove_process_set,
    shutdown,
    size,
)
from collectives.job.errors import InputError
from collectives.job.launch import start_mpi

TRACE = "use torch.profiler, or python -m collectives.bench --space-time"
MISSING = {
    "elastic": "write checkpoints, and start again from the last with as many ranks as there are",
    "start_timeline": TRACE,
    "stop_timeline": TRACE,
    "sparse_allreduce_async": "use allreduce_async on tensor.to_dense(), or allgather_async on indices and values",
}


class MissingError(InputError, AttributeError):
    """A feature of Horovod that is missing here."""


def __getattr__(name: str) -> Any:
    if name in MISSING:
        raise MissingError(f"hvd.{name} is not supported: {MISSING[name]}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def mpi_threads_supported() -> bool:
    """Return whether several threads may call MPI at the same time."""
    mpi = start_mpi()
    return mpi.Query_thread() == mpi.THREAD_MULTIPLE


def true() -> bool:
    return True


def false() -> bool:
    return False


def nccl_built() -> int:
    """Return the version of NCCL: 0, as it is not used."""
    return 0


mpi_built = mpi_enabled = true
gloo_built = gloo_enabled = ddl_built = ccl_built = rocm_built = false
cuda_built = torch.cuda.is_available
