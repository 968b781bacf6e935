"""Horovod 0.28's interface for PyTorch: `import collectives.horovod.torch as hvd`."""
# ruff: noqa: F401, I001  as these names are for programs, and grouped by kind

from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from collectives.horovod.functions import (
    Average, Compression, Max, Min, Product, Sum,
    allgather, allgather_async, allgather_object, grouped_allgather, grouped_allgather_async,
    allreduce, allreduce_, allreduce_async, allreduce_async_,
    grouped_allreduce, grouped_allreduce_, grouped_allreduce_async, grouped_allreduce_async_,
    alltoall, alltoall_async, barrier, join, poll, synchronize,
    broadcast, broadcast_, broadcast_async, broadcast_async_,
    broadcast_object, broadcast_parameters,
    grouped_reducescatter, grouped_reducescatter_async, reducescatter, reducescatter_async,
)  # fmt: skip
from collectives.horovod.matching import HorovodInternalError
from collectives.horovod.optimizer import DistributedOptimizer, broadcast_optimizer_state
from collectives.horovod.process_sets import (
    ProcessSet, add_process_set, global_process_set, init, is_initialized, remove_process_set, shutdown,
    cross_rank, cross_size, is_homogeneous, local_rank, local_size, rank, size,
)  # fmt: skip
from collectives.job.errors import InputError
from collectives.job.launch import start_mpi


class SyncBatchNorm(_BatchNorm):
    """Normalize `(batch, channels, ...)` by the mean and variance of all ranks' batches, whose sizes may differ.

    On one rank, and in evaluation by running statistics, it is `torch.nn.BatchNorm`.  Otherwise all ranks call the
    layer, forwards and backwards.  Ranks' batches may be empty; where all are, running statistics stay.

    Raises: ValueError on every rank where all of them have but one value a channel to train on.

    Cost: two all-reduces of `channels` numbers forwards, two backwards: deviations are taken from the mean of all
    ranks, because a variance from sums of squares loses precision where the mean is large.
    Source: Ioffe and Szegedy, "Batch Normalization", 2015, section 3, over a batch that the ranks hold together.
    """

    def _check_input_dim(self, input: Tensor) -> None:  # noqa: A002  torch's name
        if input.dim() < 2:
            raise ValueError(f"SyncBatchNorm of a tensor of {input.dim()} dims: pass (batch, channels, ...)")

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  torch's name
        self._check_input_dim(input)
        if size() == 1 or not (self.training or self.running_mean is None):
            return super().forward(input)
        batch_and_space = [0, *range(2, input.dim())]
        shape = [1, -1, *[1] * (input.dim() - 2)]
        x = input if input.dtype == torch.float64 else input.float()
        local = x.new_full((1,), x.numel() / x.shape[1])
        sums = allreduce(torch.cat([x.sum(batch_and_space), local]), op=Sum)
        count = sums[-1].detach()
        if count == 1 and self.training:
            raise ValueError("SyncBatchNorm of one value a channel on all ranks: train on more than one, or use eval()")
        mean = sums[:-1] / count
        deviations = x - mean.view(shape)
        variance = allreduce((deviations * deviations).sum(batch_and_space), op=Sum) / count
        if self.training and self.running_mean is not None:
            assert self.running_var is not None
            assert self.num_batches_tracked is not None
            self.num_batches_tracked.add_(1)
            if count:
                # Move the running statistics towards the batch's, or average them all where `momentum` is None.
                weight = self.momentum if self.momentum is not None else 1 / float(self.num_batches_tracked)
                unbiased = variance.detach() * (count / (count - 1))
                self.running_mean.lerp_(mean.detach().to(self.running_mean.dtype), weight)
                self.running_var.lerp_(unbiased.to(self.running_var.dtype), weight)
        normalized = deviations * torch.rsqrt(variance + self.eps).view(shape)
        if self.affine:
            normalized = normalized * self.weight.view(shape) + self.bias.view(shape)
        return normalized.to(input.dtype)


TRACE = "use torch.profiler, or python -m collectives.bench --space-time"
MISSING = {
    "Adasum": "use hvd.Average, with a learning rate for the batch of all ranks",
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


mpi_built = mpi_enabled = true
gloo_built = gloo_enabled = nccl_built = ddl_built = ccl_built = rocm_built = false
cuda_built = torch.cuda.is_available
