"""Data parallelism: every rank has the whole model and a part of the batch; gradients are averaged."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from parallelism.data.averaging import Replicated
from parallelism.data.loop import LoopModule
from parallelism.pipeline.local_parameters import LocalParameters
from parallelism.zero.units import ShardGroups

if TYPE_CHECKING:
    from collectives import Communicator
    from parallelism.buffers.arena import Arena


class DataParallel(LoopModule):
    """A module whose gradients, after each backward pass, are the average over the ranks of `comm`.

    Parameters and gradients live in `arena`; rank 0's initial parameters and buffers are broadcast.  Gradients are
    reduced in buckets of about `bucket_mb` MiB, in the order they appear; `reduction` are further arguments of that.
    """

    def __init__(self, module: nn.Module, comm: Communicator, arena: Arena, bucket_mb: float = 4.0, **reduction: Any):
        own, ranks = LocalParameters(module, {}, comm), ShardGroups(comm, comm)
        super().__init__(module, Replicated(own, ranks, arena=arena, bucket_mb=bucket_mb, **reduction))
