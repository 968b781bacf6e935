"""A model over the pipeline axis of a mesh, and over its data-parallel axes beside it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from parallelism.buffers.arena import Arena
from parallelism.mesh import replica_axes
from parallelism.pipeline.balance import balance
from parallelism.pipeline.driver import Pipeline
from parallelism.pipeline.gradients import Parts, StageReducer, Tied, TiedGradients, runs, tied_names
from parallelism.pipeline.schedule.actions import WEIGHTS
from parallelism.pipeline.stage import Batch, Layer, cut
from parallelism.zero.pipeline import LocalParameters, ShardedLayerGradients, ShardedLayerParameters, ShardedLayers
from parallelism.zero.states import MakeOptimizer, OptimizerShard
from parallelism.zero.units import FlatParam, ShardGroups

if TYPE_CHECKING:
    from collectives import Communicator
    from parallelism.mesh import Mesh
    from parallelism.pipeline.schedule.actions import Schedule

SHARING = {2: ShardedLayerGradients, 3: ShardedLayerParameters}


class PipelineParallel:
    """A model whose layers are shared by the ranks of `mesh.pp`, and whose gradients, after each step, are the average
    over those of dp and sp.

    Each rank gives the same model; what other ranks' stages have of it goes.  Stages are balanced by the layers' costs.
    What is left lies in `arena`, of `dtype` and gradients of `grad_dtype`.  `prepare` is called with the micro-batch
    before each forward pass; `reduction` are further arguments of how gradients are reduced.

    With `make_optimizer`, the ranks of dp and sp, or groups of them, share what ZeRO does in `zero_stage`, as `zero`
    says: gradients are then those of `zero.masters`, and `zero.update()` updates the parameters.  In stages 2 and 3
    there is no `arena`.

    Raises: InputError for more stages than layers.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[Layer],
        schedule: Schedule,
        mesh: Mesh,
        device: str = "cpu",
        prepare: Callable[[Batch], None] = lambda batch: None,
        make_optimizer: MakeOptimizer | None = None,
        zero_group: str | int = "all",
        zero_stage: int = 1,
        dtype: torch.dtype | None = None,
        grad_dtype: torch.dtype | None = None,
        **reduction: Any,
    ):
        with mesh.comm.agreed("PipelineParallel"):
            parts = balance([layer.cost for layer in layers], schedule.num_stages)
        self.parts = {stage: parts[stage] for stage in schedule.stages(mesh.pp.rank)}
        self.model = model
        self.has_loss = schedule.num_stages - 1 in self.parts
        tied = tied_names(model)
        order = schedule.orders[mesh.pp.rank]
        splits = any(action.kind == WEIGHTS for action in order)
        dtypes: Any = {"dtype": dtype, "grad_dtype": grad_dtype}
        self.zero: OptimizerShard | ShardedLayers | None = None
        self.reduction: StageReducer | ShardedLayers  # what is done before and after each action
        in_stages = partial(cut, model, stages=self.parts, prepare=prepare, splits=splits)
        self.ranks = ranks = ShardGroups.of(mesh.along(*replica_axes(mesh.shape)), zero_group)
        if make_optimizer and zero_stage > 1:
            stages = in_stages([self._watched(*each) for each in enumerate(layers)], appeared=self._appeared)
            own = LocalParameters.of(model, layers, self.parts, tied, mesh.pp)
            self.reduction = self.zero = SHARING[zero_stage](own, ranks, make_optimizer, device, **dtypes, **reduction)
            self.tied = self.zero.tied
        else:
            stages = in_stages(layers)
            self.arena = Arena(model, mesh.comm, device, **dtypes)
            modules = {stage: owned.layer.modules for stage, owned in stages.items()}
            ends = partial(runs, model, modules, order, self.arena.slices)
            self.arena.broadcast(ranks.every)
            if make_optimizer:
                self._share_states(ends(alone=set(chain(*tied))), tied, ranks, mesh.pp, make_optimizer, **reduction)
            else:
                self._average(ends(), tied, ranks.every, mesh.pp, **reduction)
        self.pipeline = Pipeline(stages, schedule, mesh.pp, device, self.reduction.begin, self.reduction.end)

    def _average(self, parts: Parts, tied: Tied, comm: Communicator, pp: Communicator, **reduction: Any) -> None:
        """Every rank gets all gradients."""
        gradients, slices = self.arena.gradients, self.arena.slices
        units = [FlatParam.of(part, self.arena.line, 1) for _, part in parts]
        plans = [comm.plan("all_reduce", gradients[unit.place], **{"op": "avg", **reduction}) for unit in units]
        self.reduction = StageReducer([action for action, _ in parts], plans)
        self.tied = TiedGradients(tied, self.model, gradients, slices, pp)

    def _share_states(
        self, parts: Parts, tied: Tied, ranks: ShardGroups, pp: Communicator, make: MakeOptimizer, **reduction: Any
    ) -> None:
        """Every rank gets those of its chunks, which are the same on all `pp` ranks that have a tied parameter."""
        units = [FlatParam.of(part, self.arena.line, ranks.shard.size) for _, part in parts]
        chunks = {name: unit.chunks[ranks.shard.rank] for unit in units for name in unit.slices}
        self.tied = TiedGradients(tied, self.model, self.arena.gradients, chunks, pp)
        self.zero = OptimizerShard(self.model, self.arena, units, ranks, make, **reduction)
        self.reduction = StageReducer([action for action, _ in parts], self.zero.reducing, self.zero.across)

    def _watched(self, number: int, layer: Layer) -> Layer:
        """A layer whose gradients, and parameters, are shared."""

        def run(x, batch):
            assert isinstance(self.zero, ShardedLayers)
            return self.zero.layer(number, layer.run, x, batch)

        return layer._replace(run=run)

    def _appeared(self, weight: Tensor) -> None:
        assert isinstance(self.zero, ShardedLayers)
        self.zero.appeared(weight)

    @property
    def exposed_s(self) -> float:
        """The time that steps have waited for other ranks, in seconds, added up."""
        return self.reduction.exposed_s + self.pipeline.span_s - self.pipeline.busy_s

    def step(self, batches: Sequence[Batch], weights: Sequence[float] | Sequence[Tensor] | None = None) -> Tensor:
        """Forward and backward passes of a micro-batch each, as `Pipeline.step`; gradients are averaged after."""
        loss = self.pipeline.step(batches, weights)
        self.reduction.wait()
        self.tied.sum_up()
        return loss

    def zero_grad(self) -> None:
        """Clear the gradients, in place."""
        (self.zero if isinstance(self.zero, ShardedLayers) else self.arena).zero_grad()


def within(context: Callable[[], AbstractContextManager], layer: Layer) -> Layer:
    """The layer, computed in a context, such as autocast's."""

    def run(x, batch):
        with context():
            return layer.run(x, batch)

    return layer._replace(run=run)
