"""Averaging of gradients once a step, in buckets: data parallelism, and what ZeRO's stage 1 has in common with it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from parallelism.buffers.arena import Arena
from parallelism.data.buckets import Bucket, BucketQueue, cut_buckets, num_bytes
from parallelism.data.replica import MakeOptimizer, Replica
from parallelism.data.summation import TiedSums
from parallelism.numerics.master_weights import MasterWeights
from parallelism.zero.units import FlatParam, ShardGroups

if TYPE_CHECKING:
    from collectives import Plan
    from parallelism.pipeline.local_parameters import LocalParameters


class Averaging(Replica):
    """Replica whose gradients are added up in an arena, and reduced in each parameter's last backward pass of a step.

    Buckets are of about `bucket_mb` MiB.  Each is of parameters whose gradients are whole after the same action, and
    averaged over the same ranks.  They
    start in their order, each once all its gradients are whole; those under way move on each time one is ready.
    """

    every_micro_batch = False

    def __init__(
        self,
        own: LocalParameters,
        ranks: ShardGroups,
        device: str = "cpu",
        bucket_mb: float = 4.0,
        dtype: torch.dtype | None = None,
        grad_dtype: torch.dtype | None = None,
        arena: Arena | None = None,
    ):
        bucket_bytes = num_bytes(bucket_mb)
        super().__init__(own, ranks)
        self.arena = arena or Arena(own.model, own.comm, device, dtype=dtype, grad_dtype=grad_dtype)
        self.arena.broadcast(ranks.every)
        self.arrays = self.arena.parameters, self.arena.gradients
        self.units = self._units(bucket_bytes)
        uses = own.separate()
        self.sums = TiedSums({param: [*others] for param, others in uses.items()})
        self._passes: dict[Tensor, int] = {own.params[name]: own.num_passes(name) for name in own.trained()}
        for others in uses.values():
            self._passes |= others

    def _units(self, bucket_bytes: int) -> list[FlatParam]:
        """In the order in which their gradients are whole, and appear."""
        own, slices = self.own, self.arena.slices
        across = own.tied.across

        def key(name: str) -> tuple[object, ...]:
            return own.end(name), name if name in across else "", self.ranks.averaging(own.params[name])

        buckets = cut_buckets(self.arena, own.trained(slices), bucket_bytes, key)
        ordered = sorted((names for _, names in buckets), key=lambda names: own.end(names[0]))
        size = self.ranks.shard.size if self.zero_stage else 1
        return [FlatParam.of({name: slices[name] for name in names}, self.arena.line, size) for names in ordered]

    def reduce_by(self, plans: list[Plan]) -> None:
        """Reduce each unit by a plan."""
        self.buckets = [
            Bucket(plan, [self.params[name] for name in unit.slices])
            for plan, unit in zip(plans, self.units, strict=True)
        ]
        self._begin()

    def _begin(self) -> None:
        self._queue, self._left = BucketQueue(self.buckets), dict(self._passes)

    def gradient_ready(self, parameter: Tensor, micro_batch: int) -> None:
        self._queue.advance()
        self._left[parameter] -= 1
        owner = self.sums.owner(parameter)
        if not any(self._left[tensor] for tensor in (owner, *self.sums.uses.get(owner, ()))):  # type: ignore[call-overload]
            self.sums.complete(owner)
            self._queue.ready(owner)

    def finish_reducing(self) -> None:
        for param, uses in self.sums.uses.items():
            if any(self._left[tensor] for tensor in (param, *uses)):
                self.sums.complete(param)
        self._queue.flush()
        for bucket in self.buckets:
            bucket.wait()
        self._begin()

    def zero_grad(self) -> None:
        """Clear the gradients, in place: the arena has them."""
        self.arena.zero_grad()


class Replicated(Averaging):
    """Plain data parallelism: each rank has all parameters, gradients and the optimizer's states.

    `reduction` are further arguments of all-reduce.

    Source: Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", 2020 (buckets, order).
    """

    zero_stage = 0

    def __init__(
        self,
        own: LocalParameters,
        ranks: ShardGroups,
        make_optimizer: MakeOptimizer | None = None,
        device: str = "cpu",
        bucket_mb: float = 4.0,
        dtype: torch.dtype | None = None,
        grad_dtype: torch.dtype | None = None,
        arena: Arena | None = None,
        **reduction: Any,
    ):
        super().__init__(own, ranks, device, bucket_mb, dtype, grad_dtype, arena)
        gradients, asked = self.arena.gradients, {"op": "avg", **reduction}
        self.reduce_by(
            [self.groups(unit).every.plan("all_reduce", gradients[unit.place], **asked) for unit in self.units]
        )
        own.tied.bind(gradients, {name: self.arena.slices[name] for name in own.trained()})
        self.masters = MasterWeights.of(own.model, self.arena)
        self.optimize_by(make_optimizer)
