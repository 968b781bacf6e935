"""Divide a model over all axes of a mesh, according to a run's settings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch

from models.decoder import Decoder
from parallelism.buffers.tensor_collectives import TensorCollectives
from parallelism.experts.exchange import ExpertExchange
from parallelism.mesh import Mesh
from parallelism.numerics.dropout import BatchPosition
from parallelism.numerics.precision import Precision
from parallelism.pipeline.balance import balance
from parallelism.pipeline.layer_times import agreed, measure, message_s, speeds, stage_costs
from parallelism.pipeline.pipeline_parallel import PipelineParallel
from parallelism.pipeline.schedule.actions import Schedule
from parallelism.pipeline.schedule.price import Costs, price
from parallelism.pipeline.schedule.search import search
from parallelism.pipeline.stage import Batch, Layer, within
from parallelism.sequence.sequence_parallel import SequenceParallel
from parallelism.tensor.sharding_plan import parallelize
from training.parallel.compiling import compile_model, compiles_whole
from training.parallel.decoder import fuse, layers_of, plan_of, recompute_model, whole_layer
from training.settings.derived import zero_group
from training.settings.fields import SEARCH, RunSettings

if TYPE_CHECKING:
    from collectives import Communicator


def divide(
    model: Decoder,
    config: RunSettings,
    mesh: Mesh,
    sequences: SequenceParallel,
    position: BatchPosition,
    ep: ExpertExchange | None,
    adapt: Callable[[Decoder], Any] | None = None,
) -> TensorCollectives:
    """Divide a model over tp, sp and ep, and `adapt` it; set up recomputation, and compilation or fused passes.

    Return its collectives over tp.
    """
    sp = sequences if mesh.sp.size > 1 or config.sequence_parts else None
    plan, tiles = plan_of(model.config), config.tiles or 0
    ranks = parallelize(model, plan, mesh.tp, sp, config.sequence_parallel, position, ep, tiles)
    if adapt:
        adapt(model)
    if config.compile:
        compile_model(model, config)
    else:
        fuse(model)
    if config.recompute != "none":
        recompute_model(model, config.recompute, position)
    return ranks


def staged(
    model: Decoder,
    config: RunSettings,
    mesh: Mesh,
    schedule: Schedule,
    precision: Precision,
    position: BatchPosition,
    make_batch: Callable[[], Batch],
) -> PipelineParallel:
    """Make a pipeline of a model that is divided over the other axes; `make_batch` returns a batch to measure with.

    Collective.
    """

    def computing(batch: Batch) -> AbstractContextManager:
        """Set the samples by which dropout masks are drawn; return the context for the dtype."""
        position.samples = batch.samples
        return precision.computing(config.device)

    parts = [whole_layer(model)] if compiles_whole(config) else layers_of(model, config.balance == "layers")
    layers, rank_speeds = [within(computing, layer) for layer in parts], None
    if mesh.pp.size > 1 and (config.balance == "measured" or config.schedule == SEARCH):
        model.to(config.device)  # before the arena, which moves only this rank's parameters
        layers, rank_speeds, schedule = measured(model, layers, config, mesh, schedule, make_batch())
    return PipelineParallel(
        model,
        layers,
        schedule,
        mesh,
        config.device,
        zero_group=zero_group(config),
        zero_stage=config.zero_stage,
        bucket_mb=config.bucket_mb,
        reproducible=config.reproducible,
        sequence_parts=config.sequence_parts,
        speeds=rank_speeds,
        **precision.arena_dtypes,
        wire_dtype=precision.wire_dtype,
    )


def measured(
    model: Decoder, layers: list[Layer], config: RunSettings, mesh: Mesh, schedule: Schedule, batch: Batch
) -> tuple[list[Layer], list[float], Schedule]:
    """Return the layers with their measured times as costs, the speeds of the ranks of `mesh.pp`, and the schedule.

    It is searched for these if requested.
    """
    own = measure(model, layers, batch, mesh.comm)
    rank_speeds = speeds(own.sum(), mesh)
    times = agreed(own, mesh.comm, counts=rank_speeds[mesh.pp.rank] == 1)
    layers = [layer._replace(cost=each.sum()) for layer, each in zip(layers, times, strict=True)]
    if mesh.comm.rank == 0 and min(rank_speeds) < 1:
        print(f"speeds of pp ranks: {', '.join(f'{speed:.2f}' for speed in rank_speeds)}", flush=True)
    if config.schedule == SEARCH:
        with torch.no_grad():
            sent = layers[0].run(None, batch)
        message = message_s(sent, mesh.pp)

        def costs_of(home: Sequence[int]) -> Costs:
            of_stages = [rank_speeds[rank] for rank in home]
            parts = balance([layer.cost for layer in layers], len(home), of_stages)
            return stage_costs(times, parts, message, of_stages)

        limit = config.max_alive or schedule.num_stages
        schedule = searched(schedule, costs_of, limit, mesh.comm)
    return layers, rank_speeds, schedule


def searched(schedule: Schedule, costs: Callable[[Sequence[int]], Costs], limit: int, comm: Communicator) -> Schedule:
    """Return the best schedule with the ranks, stages and micro-batches of another; rank 0 searches.  Collective."""
    best = None
    with comm.agreed("search"):
        if comm.rank == 0:
            print(f"searching a schedule of {schedule.num_stages} stages", flush=True)
            each = schedule.num_stages // schedule.num_ranks
            best = search(schedule.num_ranks, schedule.num_micro_batches, each, costs, limit)
            step_ms = price(best, costs(best.placement)).span_s * 1e3
            print(f"the passes of a step by schedule {best.name} take {step_ms:.0f} ms as predicted", flush=True)
    return comm.broadcast_object(best)
