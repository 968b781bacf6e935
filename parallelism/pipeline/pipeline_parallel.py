"""Pipeline parallelism over one axis of a mesh, also of one stage on one rank, with data parallelism over dp and sp."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from parallelism.buffers.gradients import remove_hooks
from parallelism.data.units import ShardGroups
from parallelism.mesh import Mesh, replica_axes
from parallelism.numerics.exact import ExactSums
from parallelism.pipeline.balance import balance
from parallelism.pipeline.driver import Pass, Pipeline
from parallelism.pipeline.schedule.actions import Schedule
from parallelism.pipeline.stage import Batch, Layer, cut
from parallelism.step.actions import BACKWARD, FORWARD, WEIGHTS, Action
from parallelism.step.events import StepTimes
from parallelism.step.local_parameters import LocalParameters, TiedGradients, tied_names
from parallelism.zero.sharded import REPLICAS


class PipelineParallel(Pipeline):
    """A pipeline of a model's layers, divided over `mesh.pp`; gradients are averaged over dp and sp after each step.

    All ranks pass the same model; layers of other ranks' stages are deleted.  Stages are balanced by the layers' costs,
    and by `speeds`, one for each rank of `mesh.pp`, where these differ.

    With a `zero_stage`, ZeRO shards over dp and sp, or over groups of these ranks; `replica`, a `Replica` with
    `options`, holds this rank's parameters and updates them.

    With `reproducible`, gradients are not averaged but summed, and have the same bits on any number of ranks of dp and
    pp, with any schedule and `zero_stage`: `exact` adds them as integers.  A step whose gradients outgrow these, as
    those of the first one do, is computed twice.  With `sequence_parts`, a multiple of the sp ranks, the same holds for
    sp: each sequence is computed in as many parts, whose gradients are added one by one.

    Raises: InputError for more stages than layers, and for speeds that are not one above 0 for each rank.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[Layer],
        schedule: Schedule,
        mesh: Mesh,
        device: str = "cpu",
        zero_group: str | int = "all",
        zero_stage: int = 0,
        reproducible: bool = False,
        sequence_parts: int | None = None,
        speeds: Sequence[float] | None = None,
        **options: Any,
    ):
        with mesh.comm.agreed("PipelineParallel"):
            if speeds is not None and len(speeds) != mesh.pp.size:
                raise ValueError(f"{len(speeds)} speeds for {mesh.pp.size} ranks of pp: pass one for each")
            of_stages = None if speeds is None else [speeds[rank] for rank in schedule.placement]
            parts = balance([layer.cost for layer in layers], schedule.num_stages, of_stages)
        self.model, self.parts = model, {stage: parts[stage] for stage in schedule.stages(mesh.pp.rank)}
        self.has_loss = schedule.num_stages - 1 in self.parts
        names, order = tied_names(model), schedule.orders[mesh.pp.rank]
        splits = any(action.kind == WEIGHTS for action in order)
        watched = [self._watched(*each) for each in enumerate(layers)]
        token_parts = sequence_parts and sequence_parts // mesh.sp.size
        stages = cut(model, watched, self.parts, splits=splits, on_ready=self.gradient_ready, token_parts=token_parts)
        numbers = mesh.dp.all_gather(np.array([schedule.num_micro_batches]))
        self.rehearse: Callable[[], None] | None = None  # called before the passes of a step, once the quanta are set
        first = int(numbers[: mesh.dp.rank].sum())
        own = LocalParameters(
            model,
            {number: layers[number].modules for part in self.parts.values() for number in part},
            mesh.comm,
            self.parts,
            order,
            TiedGradients(names, model, mesh.pp),
            is_cut=schedule.num_stages > 1,
            first_micro_batch=first,
            most_micro_batches=int(numbers.max()),
        )
        replicas, samples = mesh.along(*replica_axes(mesh.shape)), mesh.along("dp", "sp")
        self.exact: ExactSums | None = None
        if reproducible:
            addends = int(numbers.sum()) * (sequence_parts or 1) * max([1, *map(len, names)])
            trained = {name: own.params[name] for name in own.trained()}
            self.exact = ExactSums(trained, mesh, names, addends, device)
            options |= {"grad_dtype": torch.int64, "op": "sum"}
        ranks = ShardGroups.of(replicas, zero_group if zero_stage else "all", samples)
        self.replica = REPLICAS[zero_stage](own, ranks, device=device, **options)
        self.times = StepTimes()
        super().__init__(stages, schedule, mesh.pp, device, [self.times, self.replica], first)
        hook = self.gradient_accumulated if splits else self.gradient_ready
        for tensor in own.leaves:
            tensor.register_post_accumulate_grad_hook(hook)

    def _watched(self, number: int, layer: Layer) -> Layer:
        """Return a layer that emits events around its computation."""
        needed = partial(self.emit, "parameters_needed", number)

        def run(x: Tensor | None, batch: Batch) -> Tensor:
            needed()
            y = layer.run(x, batch)
            if y.requires_grad:
                y.register_hook(lambda gradient: needed())
            return y

        return layer._replace(run=run)

    def step(self, batches: Sequence[Batch], weights: Sequence[float] | Sequence[Tensor] | None = None) -> Tensor:
        if not self.exact:
            return super().step(batches, weights)
        loss = self._exact_step(batches, weights)
        if not self.exact.fits():
            self.zero_grad()
            loss = self._exact_step(batches, weights)
            self.exact.fits()
        return loss

    def _exact_step(self, batches: Sequence[Batch], weights: Sequence[float] | Sequence[Tensor] | None) -> Tensor:
        assert self.exact
        self.exact.begin()
        if self.rehearse:
            self.rehearse()
        return super().step(batches, weights)

    def replay(self, batch: Batch, weight: float | Tensor) -> None:
        """Compute the gradients of one micro-batch, but reduce them over no ranks, and clear them.  Collective.

        Those of a model whose gradients are added as integers are seen by who observes their roundings.
        """
        listeners, self.listeners = self.listeners, []
        Pass(self, one_micro_batch(self.schedule), [batch], [weight]).run()
        self.listeners = listeners
        self.zero_grad()

    def follow(self, schedule: Schedule, first_micro_batch: int, most: int) -> None:
        """Run later steps by a `schedule` of the same stages with another number of micro-batches.

        This rank's begin with `first_micro_batch` of the global batch, which has as many as before; the replica with
        most of them has `most`.
        """
        self.schedule, self.first_micro_batch = schedule, first_micro_batch
        self.replica.own.follow(schedule.orders[self.comm.rank], first_micro_batch, most)

    def zero_grad(self) -> None:
        """Clear the gradients in place."""
        self.replica.zero_grad()

    def remove_hooks(self) -> None:
        """Remove the gradient hooks, which would keep this model in memory."""
        for tensor in self.replica.own.leaves:
            remove_hooks(tensor)

    @property
    def groups(self) -> list[TiedGradients | ShardGroups]:
        """Objects with communicators to free."""
        return [self.replica.own.tied, self.replica.ranks]

    def free(self) -> None:
        """Free its communicators.  Collective."""
        for group in self.groups:
            group.free()


def one_micro_batch(schedule: Schedule) -> Schedule:
    """Return a schedule of one micro-batch through the same stages, forward and then backward."""
    ranks = [schedule.stages(rank) for rank in range(schedule.num_ranks)]
    orders = tuple(
        (*(Action(stage, FORWARD, 0) for stage in stages), *(Action(stage, BACKWARD, 0) for stage in stages[::-1]))
        for stages in ranks
    )
    return replace(schedule, orders=orders)
