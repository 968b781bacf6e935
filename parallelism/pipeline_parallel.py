"""A model over the pipeline axis of a mesh, and over its data-parallel axes beside it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from torch import nn

from parallelism.arena import Arena
from parallelism.partition import balance
from parallelism.pipeline import Pipeline
from parallelism.pipeline_schedule.actions import WEIGHTS
from parallelism.reduction import Reduction, TiedGradients, tied_names
from parallelism.stage import Batch, Layer, cut

if TYPE_CHECKING:
    from parallelism.mesh import Mesh
    from parallelism.pipeline_schedule.actions import Schedule


class PipelineParallel:
    """A model whose layers are shared by the ranks of `mesh.pp`, and whose gradients, after each step, are the average
    over those of dp and sp.

    Each rank gives the same model; what other ranks' stages have of it goes.  Stages are balanced by the layers' costs.
    What is left lies in `arena`.  `prepare` is called with the micro-batch before each forward pass.

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
    ):
        with mesh.comm.agreed("PipelineParallel"):
            parts = balance([layer.cost for layer in layers], schedule.num_stages)
        self.parts = {stage: parts[stage] for stage in schedule.stages(mesh.pp.rank)}
        self.has_loss = schedule.num_stages - 1 in self.parts
        tied = tied_names(model)
        order = schedule.orders[mesh.pp.rank]
        splits = any(action.kind == WEIGHTS for action in order)
        stages = cut(model, layers, self.parts, prepare, splits)
        self.arena = Arena(model, mesh.comm, device)
        modules = {stage: owned.layer.modules for stage, owned in stages.items()}
        self.reduction = Reduction(model, modules, order, self.arena, mesh.along("dp", "sp"))
        self.tied = TiedGradients(tied, model, self.arena, mesh.pp)
        self.pipeline = Pipeline(stages, schedule, mesh.pp, device, after=self.reduction.start)

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


def within(context: Callable[[], AbstractContextManager], layer: Layer) -> Layer:
    """The layer, computed in a context, such as autocast's."""

    def run(x, batch):
        with context():
            return layer.run(x, batch)

    return layer._replace(run=run)
