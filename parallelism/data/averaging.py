"""Average gradients once per step, in buckets: the common part of data parallelism and of ZeRO stage 1."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from torch import Tensor

import collectives
from parallelism.buffers.arena import Arena
from parallelism.buffers.gradients import TiedSums, rounding_of
from parallelism.data.buckets import Bucket, BucketQueue
from parallelism.data.replica import Replica
from parallelism.data.units import FlatParam
from parallelism.numerics.master_weights import MasterWeights
from parallelism.step.actions import FORWARD, Action


class Averaging(Replica):
    """Replica that accumulates gradients in an arena, and reduces each in its last backward pass of a step.

    The parameters of a bucket have gradients that the same action completes, averaged over the same ranks.  Buckets
    start in their order, each once all its gradients are complete; each ready gradient progresses those started.
    `observe`, if set, gets each parameter whose gradients are complete, before these are reduced.
    """

    observe: Callable[[Tensor], None] | None = None

    def build(self) -> None:
        own = self.own
        self.arena = Arena(own.model, own.comm, self.device, dtype=self.dtype, grad_dtype=self.grad_dtype)
        self.arena.broadcast(self.ranks.every)
        self.arrays = self.arena.parameters, self.arena.gradients
        rank = self.shard.rank if self.shard else 0
        slices = {name: self.arena.slices[name] for name in own.trained()}
        units = self.cut(slices, own.end, self.bucket_bytes)
        self.units = sorted(units, key=lambda unit: own.end(next(iter(unit.slices))))  # as gradients become complete
        uses = own.separate()
        self.sums = TiedSums(uses)
        self._passes: dict[Tensor, int] = {own.params[name]: own.num_passes(name) for name in own.trained()}
        for param, others in uses.items():
            self._passes[param] += sum(others.values())
        self.buckets = [
            Bucket([self.params[name] for name in unit.slices], *self.plans(unit, unit.chunks[rank]))
            for unit in self.units
        ]
        reduced = {name: unit.chunks[rank] for unit in self.units for name in unit.slices}
        own.tied.bind(self.arena.gradients, reduced)
        self._begin()

    def plans(self, unit: FlatParam, chunk: slice) -> tuple[collectives.Plan, collectives.Plan | None]:
        """Bind the reduction of a unit's gradients, and that of this rank's chunk across its replicas, if any."""
        raise NotImplementedError

    def _begin(self) -> None:
        self._queue, self._num_passed = BucketQueue(self.buckets), Counter[Tensor]()

    def _is_complete(self, param: Tensor) -> bool:
        return self._num_passed[param] == self._passes[param] * self.own.num_micro_batches

    def before(self, action: Action, following: Action | None) -> None:
        if action.kind != FORWARD:
            self.arena.check_gradients()

    def gradient_ready(self, parameter: Tensor, micro_batch: int) -> None:
        self._queue.advance()
        owner = self.sums.owner(parameter)
        self._num_passed[owner] += 1
        if self._is_complete(owner):
            self.sums.complete(owner)
            if self.observe:
                self.observe(owner)
            self._queue.ready(owner)

    def finish_reducing(self) -> None:
        for param in self.sums.uses:
            if not self._is_complete(param):
                self.sums.complete(param)
        self._queue.flush()
        self._queue.wait()
        self._begin()

    def zero_grad(self) -> None:
        if roundings := [*filter(None, map(rounding_of, self._passes))]:
            for rounding in roundings:
                rounding.is_clear = True
        else:
            self.arena.zero_grad()


class Replicated(Averaging):
    """Plain data parallelism: parameters, gradients and optimizer states are replicated on every rank.

    Source: Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", 2020 (buckets, order).
    """

    zero_stage = 0

    def build(self) -> None:
        super().build()
        self.masters = MasterWeights.of(self.own.model, self.arena)

    def plans(self, unit: FlatParam, chunk: slice) -> tuple[collectives.Plan, None]:
        return self.groups(unit).every.plan("all_reduce", self.arena.gradients[chunk], **self.reduction), None
