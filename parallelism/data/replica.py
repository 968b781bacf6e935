"""Replicas: ranks that train the same part of a model, which they replicate, or shard by ZeRO."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

import collectives
from parallelism.buffers.arena import Arena, line_length, one_dtype
from parallelism.data.buckets import cut_buckets, num_bytes
from parallelism.data.units import FlatParam, ShardGroups, masters_of
from parallelism.numerics.master_weights import MasterWeights
from parallelism.step.events import Listener
from parallelism.step.local_parameters import LocalParameters
from parallelism.step.optimizer import Optimizer

MakeOptimizer = Callable[[list[nn.Parameter]], Optimizer]


class Replica(Listener):
    """A rank's parameters, which data-parallel ranks train together; there is a subclass for each `zero_stage`.

    A step averages the gradients over the ranks; `masters.take_gradients()` passes them to the master weights, which
    the optimizer updates; `update()` updates all parameters.  `make_optimizer` gets a list of the masters' pieces,
    parameters with as many dims as the originals, and must put them in groups, as a rank may own none.  Without it,
    `optimizer` has to be set later.

    Parameters are converted to `dtype` and gradients to `grad_dtype`, as by an arena; beside 16-bit parameters a rank
    keeps its pieces in float32, sharded like the optimizer states.  Gradients are reduced in buckets of about
    `bucket_mb` MiB; `reduction` holds further arguments of the collective.  Construction is collective.
    """

    zero_stage: int
    arrays: tuple[Tensor, Tensor]  # parameters and gradients that a rank holds between steps
    masters: MasterWeights
    optimizer: Optimizer

    def __init__(
        self,
        own: LocalParameters,
        ranks: ShardGroups,
        make_optimizer: MakeOptimizer | None = None,
        device: str = "cpu",
        bucket_mb: float = 4.0,
        dtype: torch.dtype | None = None,
        grad_dtype: torch.dtype | None = None,
        **reduction: Any,
    ):
        self.bucket_bytes = num_bytes(bucket_mb)
        self.own, self.ranks, self.params, self.device = own, ranks, own.params, device
        self.dtype = dtype or one_dtype(self.params.values())
        self.grad_dtype, self.reduction = grad_dtype or self.dtype, {"op": "avg", **reduction}
        self.gathering: list[collectives.Plan] = []  # plans that gather parameters after an update
        self.across: list[collectives.Plan] = []  # plans that reduce gradients over ranks with the same chunks
        move_buffers(own.model, device)
        for buffer in own.model.buffers():
            ranks.every.broadcast(buffer, root=0)
        self.build()
        if make_optimizer:
            self.optimizer = make_optimizer(list(self.masters.pieces.values()))

    def build(self) -> None:
        """Allocate this rank's parameters and gradients, and bind their collectives.  Collective."""
        raise NotImplementedError

    def groups(self, unit: FlatParam) -> ShardGroups:
        """Return the ranks over which a unit's gradients are averaged, the same for all its parameters."""
        return self.ranks.averaging(self.params[next(iter(unit.slices))])

    def cut(
        self, slices: dict[str, slice], key: Callable[[str], object] = lambda name: None, max_bytes: float = math.inf
    ) -> list[FlatParam]:
        """Cut neighbours with the same key into units of about `max_bytes`, from the last to the first.

        Those of a unit are all trained or all frozen, and averaged over the same ranks; if tied across ranks, alone.
        """
        across = self.own.tied.across

        def kind(name: str) -> tuple[object, ...]:
            param = self.params[name]
            return key(name), param.requires_grad, name if name in across else "", self.ranks.averaging(param)

        size, line = self.shard.size if self.shard else 1, line_length(self.dtype)
        buckets = cut_buckets(slices, kind, max_bytes / self.dtype.itemsize)
        return [FlatParam.of(inside, line, size) for inside in buckets]

    def shard_weights(self, arena: Arena, units: Sequence[FlatParam], gradients: Sequence[Tensor]) -> None:
        """Create this rank's master weights, and bind the gathering of an arena's parameters from their owners' chunks.

        `gradients` are those of the rank's chunks.  The arena's originals are dropped.  Collective.
        """
        rank, weights, own = self.ranks.shard.rank, arena.parameters, []
        for unit in units:
            chunk, counts = unit.chunks[rank], unit.counts
            plan = self.ranks.shard.plan("all_gather", weights[chunk], out=weights[unit.span], counts=counts)
            self.gathering.append(plan)
            own.append(weights[chunk])
        self.masters = masters_of(units, rank, self.params, own, gradients, arena.originals)
        arena.originals = {}

    @property
    def shard(self) -> collectives.Communicator | None:
        """Ranks over which the master weights are sharded."""
        return self.ranks.shard if self.zero_stage else None

    @property
    def sums_over_ranks(self) -> bool:
        """Whether gradients are summed over ranks at the end of a step, so that they are no longer this rank's own."""
        return self.ranks.every.size > 1 or self.ranks.undivided is not None or bool(self.own.tied.across)

    def step_done(self) -> None:
        with self.waiting():
            self.finish_reducing()
            run(self.across)
        if self.own.tied.plans:
            self.own.tied.sum_up()

    def finish_reducing(self) -> None:
        """Wait until all gradients are reduced, except for the reductions `across`."""
        raise NotImplementedError

    def zero_grad(self) -> None:
        """Clear the gradients in place."""
        raise NotImplementedError

    def update(self) -> None:
        """Run the optimizer on this rank's pieces, and gather the updated parameters.  Collective."""
        self.optimizer.step()
        self.gather()

    def gather(self) -> None:
        """Copy the pieces to the parameters, and gather these from their owners.  Collective."""
        self.masters.give_parameters()
        with self.waiting():
            run(self.gathering)

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Hold all parameters in the module in this context, for reading.  Collective."""
        yield


def run(plans: Sequence[collectives.Plan]) -> None:
    """Run all plans concurrently."""
    for plan in plans:
        plan.start()
    for plan in plans:
        plan.wait()


def move_buffers(model: nn.Module, device: str) -> None:
    """Move a model's buffers to a device, in place."""
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))
