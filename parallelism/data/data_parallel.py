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


class DataParallel(LoopModule):
    """A module whose gradients, after each backward pass, are the average over the ranks of `comm`.

    They begin as rank 0's, and lie in `replica.arena`, as their gradients do; `options` are those of a `Replica`.
    """

    def __init__(self, module: nn.Module, comm: Communicator, **options: Any):
        own, ranks = LocalParameters(module, {}, comm), ShardGroups(comm, comm)
        super().__init__(module, Replicated(own, ranks, **options))
