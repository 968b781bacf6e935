"""A model over the pipeline axis of a mesh, and over its data-parallel axes beside it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

from torch import nn

from parallelism.arena import Arena
from parallelism.partition import balance
from parallelism.pipeline import Pipeline
from parallelism.pipeline_schedule.actions import WEIGHTS
from parallelism.reduction import Parts, Reduction, Tied, TiedGradients, runs, tied_names
from parallelism.stage import Batch, Layer, cut
from parallelism.zero import MakeOptimizer, StateSharing
from parallelism.zero_units import Ranks, Unit

if TYPE_CHECKING:
    from collectives import Communicator
    from parallelism.mesh import Mesh
    from parallelism.pipeline_schedule.actions import Schedule


class PipelineParallel:
    """A model whose layers are shared by the ranks of `mesh.pp`, and whose gradients, after each step, are the average
    over those of dp and sp.

    Each rank gives the same model; what other ranks' stages have of it goes.  Stages are balanced by the layers' costs.
    What is left lies in `arena`, which `make_arena` makes of it.  `prepare` is called with the micro-batch before each
    forward pass; `reduction` are further arguments of how gradients are reduced.

    With `make_optimizer`, the ranks of dp and sp, or groups of them, share the optimizer's states, as `zero` says:
    gradients are then those of `zero.masters`, and `zero.update()` updates the parameters.

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
        make_arena: Callable[[nn.Module, Communicator, str], Arena] = Arena,
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
        stages = cut(model, layers, self.parts, prepare, splits)
        self.arena = make_arena(model, mesh.comm, device)
        modules = {stage: owned.layer.modules for stage, owned in stages.items()}
        ends = partial(runs, model, modules, order, self.arena.slices)
        ranks = Ranks.of(mesh.along("dp", "sp"), zero_group)
        self.arena.broadcast(ranks.every)
        self.zero: StateSharing | None = None
        if make_optimizer:
            self._share_states(ends(alone=set(chain(*tied))), tied, ranks, mesh.pp, make_optimizer, **reduction)
        else:
            self._average(ends(), tied, ranks.every, mesh.pp, **reduction)
        self.pipeline = Pipeline(stages, schedule, mesh.pp, device, after=self.reduction.start)

    def _average(self, parts: Parts, tied: Tied, comm: Communicator, pp: Communicator, **reduction: Any) -> None:
        """Every rank gets all gradients."""
        gradients, slices = self.arena.gradients, self.arena.slices
        units = [Unit.of(part, self.arena.line, 1) for _, part in parts]
        plans = [comm.plan("all_reduce", gradients[unit.place], **{"op": "avg", **reduction}) for unit in units]
        self.reduction = Reduction([action for action, _ in parts], plans)
        self.tied = TiedGradients(tied, self.model, gradients, slices, pp)

    def _share_states(
        self, parts: Parts, tied: Tied, ranks: Ranks, pp: Communicator, make: MakeOptimizer, **reduction: Any
    ) -> None:
        """Every rank gets those of its chunks, which are the same on all `pp` ranks that have a tied parameter."""
        units = [Unit.of(part, self.arena.line, ranks.shard.size) for _, part in parts]
        chunks = {name: unit.chunks[ranks.shard.rank] for unit in units for name in unit.slices}
        self.tied = TiedGradients(tied, self.model, self.arena.gradients, chunks, pp)  # marks what is a copy
        self.zero = StateSharing(self.model, self.arena, units, ranks, make, **reduction)
        self.reduction = Reduction([action for action, _ in parts], self.zero.reducing, self.zero.across)

    @property
    def exposed_s(self) -> float:
        """The time that steps have waited for other ranks, in seconds, added up."""
        return self.reduction.exposed_s + self.pipeline.span_s - self.pipeline.busy_s

    def step(self, batches: Sequence[Batch], weights: Sequence[float] | None = None) -> float:
        """Forward and backward passes of a micro-batch each, as `Pipeline.step`; gradients are averaged after."""
        loss = self.pipeline.step(batches, weights)
        self.reduction.wait()
        self.tied.sum_up()
        return loss

    def zero_grad(self) -> None:
        """Clear the gradients, in place."""
        self.arena.zero_grad()


def within(context: Callable[[], AbstractContextManager], layer: Layer) -> Layer:
    """The layer, computed in a context, such as autocast's."""

    def run(x, batch):
        with context():
            return layer.run(x, batch)

    return layer._replace(run=run)
