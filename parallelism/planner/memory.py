"""Memory model: a rank's peak memory during a step, in bytes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from operator import ge
from typing import NamedTuple

from parallelism.pipeline.balance import balance
from parallelism.pipeline.schedule import registry
from parallelism.planner import counts
from parallelism.planner.counts import param_counts
from parallelism.planner.flops import layer_flops
from parallelism.planner.layout import ParallelLayout, TrainingJob
from parallelism.planner.shape import ModelShape
from parallelism.step.actions import BACKWARD, FORWARD, WEIGHTS, Order

GROWTH = 1.25  # of the two row buffers of `parallelism.experts.exchange`


class Memory(NamedTuple):
    """Peak memory in bytes of the rank that needs most of its `limit`; `working` is transient, in a backward pass."""

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    working: float
    buffers: float
    limit: float = math.inf

    @property
    def parts(self) -> dict[str, float]:
        return dict(zip(self._fields[:-1], self[:-1], strict=True))

    @property
    def total(self) -> float:
        return sum(self[:-1])

    @property
    def fits(self) -> bool:
        return self.total <= self.limit

    def __str__(self) -> str:
        """Format the total and its parts, the largest first.

        >>> print(Memory(4e9, 4e9, 8e9, 0, 1e6, 0))
        16.0 GB (optimizer 8.0 GB, parameters 4.0 GB, gradients 4.0 GB, working 1.0 MB)
        """
        parts = sorted(self.parts.items(), key=lambda part: -part[1])
        return f"{in_bytes(self.total)} ({', '.join(f'{name} {in_bytes(part)}' for name, part in parts if part)})"


def in_unit(number: float, units: Mapping[str, float]) -> str:
    """Format a number in the first unit that it reaches, or the last.

    >>> in_unit(0.0015, {" s": 1.0, " ms": 1e-3})
    '1.5 ms'
    """
    unit, size = next((each for each in units.items() if number >= each[1]), list(units.items())[-1])
    return f"{number / size:.1f}{unit}"


def in_bytes(number: float) -> str:
    return in_unit(number, {" TB": 1e12, " GB": 1e9, " MB": 1e6, " kB": 1e3, " B": 1})


# For one rank, the moments of a schedule at which it may need most memory: in each, the number of micro-batches whose
# activations are alive in each of the rank's stages.
Alive = tuple[tuple[int, ...], ...]


class Stages(NamedTuple):
    """Stages of a pipeline: layers and blocks of each, those of each rank, and whether backward passes are split."""

    layers: list[range]  # 0 is the embedding, and the last one the head
    blocks: list[int]
    of_rank: tuple[tuple[int, ...], ...]
    splits: bool

    def of(self, rank: int) -> list[range]:
        return [self.layers[stage] for stage in self.of_rank[rank]]

    @property
    def num_blocks(self) -> list[int]:
        return [sum(self.blocks[stage] for stage in own) for own in self.of_rank]


def stages(job: TrainingJob, layout: ParallelLayout, speeds: tuple[float, ...] = ()) -> Stages:
    """Return the stages of a layout whose pp ranks have these speeds, by default equal ones."""
    return stages_of(job.model, layout.schedule, layout.pp, layout.virtual_stages, speeds, job.balance)


@lru_cache(maxsize=4096)
def stages_of(model: ModelShape, schedule: str, pp: int, each: int, speeds: tuple[float, ...], costs: str) -> Stages:
    instance = registry.make_schedule(schedule, pp, 1, each)
    splits = any(action.kind == WEIGHTS for order in instance.orders for action in order)
    of_stages = [speeds[instance.home[stage]] for stage in range(pp * each)] if speeds else None
    layers = assigned_layers(model, costs, pp * each, of_stages)
    blocks = [*map(param_counts(model).blocks, layers)]
    return Stages(layers, blocks, tuple(instance.stages(rank) for rank in range(pp)), splits)


def assigned_layers(model: ModelShape, costs: str, num_stages: int, speeds: Sequence[float] | None) -> list[range]:
    """Return the layers of each stage as `training.parallel.decoder.layers_of` has them, balanced by these costs."""
    if costs == "layers":
        return balance([1] * (model.n_layer + 2), num_stages, speeds)
    parts = balance(layer_flops(model), num_stages, speeds)
    return [range(part.start + bool(part.start), part.stop + 1) for part in parts]  # the first block's with embedding


def steady(pp: int, num_micro_batches: int) -> tuple[int, int]:
    """Return a number of micro-batches beyond which every p more add the same, and how many times p are added.

    >>> steady(pp=4, num_micro_batches=101)
    (13, 22)
    """
    rounds = max(0, num_micro_batches // pp - 3)
    return num_micro_batches - rounds * pp, rounds


@lru_cache(maxsize=1 << 16)
def alive(schedule: str, pp: int, num_micro_batches: int, virtual_stages: int) -> tuple[Alive, ...]:
    """Return the moments at which each rank may need most memory, extrapolated from few micro-batches."""
    few, rounds = steady(pp, num_micro_batches)
    before = most_alive(schedule, pp, few, virtual_stages)
    if not rounds:
        return before
    after = most_alive(schedule, pp, few + pp, virtual_stages)
    return tuple(
        tuple(tuple(a + rounds * (b - a) for a, b in zip(*two, strict=True)) for two in zip(*moments, strict=True))
        for moments in zip(before, after, strict=True)
    )


@lru_cache(maxsize=1 << 16)
def most_alive(schedule: str, pp: int, num_micro_batches: int, virtual_stages: int) -> tuple[Alive, ...]:
    return tuple(map(peaks, registry.make_schedule(schedule, pp, num_micro_batches, virtual_stages).orders))


def peaks(order: Order) -> Alive:
    """Return the moments of an order at which its rank may need most memory.

    A moment is omitted if another one has at least as many live activations in every stage.  Which of the rest needs
    most depends on how many bytes an activation of each stage takes.

    >>> from parallelism.step.actions import parse
    >>> peaks(tuple(map(parse, "0F0 2F0 2B0 0F1 0B0 0B1".split())))
    ((2, 0), (1, 1))
    """
    now = dict.fromkeys(sorted({action.stage for action in order}), 0)
    moments: set[tuple[int, ...]] = set()
    for action in order:
        now[action.stage] += action.kind == FORWARD
        moments.add(tuple(now.values()))
        now[action.stage] -= action.kind in (BACKWARD, WEIGHTS)
    maxima: list[tuple[int, ...]] = []
    for moment in sorted(moments, reverse=True):
        if not any(all(map(ge, other, moment)) for other in maxima):
            maxima.append(moment)
    return tuple(maxima)


def rank_params(job: TrainingJob, layout: ParallelLayout, speeds: tuple[float, ...] = ()) -> tuple[int, ...]:
    """Count the parameters of each pp rank."""
    cut, params = stages(job, layout, speeds), param_counts(job.model, layout.tp, layout.ep)
    return tuple(params.stages(*cut.of(rank)) for rank in range(layout.pp))


class RankElements(NamedTuple):
    """A rank's elements by pp and tp: parameters, the optimizer's, blocks' matrices', and its largest layer's.

    That is a block, with the embeddings, or the head.
    """

    params: int
    states: int
    matrices: int
    layer: int


class ModelShard(NamedTuple):
    """A rank's shard of the model by pp and tp: its elements, and bytes that depend on the micro-batch."""

    elements: RankElements
    activations: float
    working: float


def model_shards(job: TrainingJob, layout: ParallelLayout, speeds: tuple[float, ...] = ()) -> list[ModelShard]:
    """Return the model's shard of each pp rank."""
    block = counts.block_saved(job, layout).nbytes(job.precision)
    head = counts.head_saved(job, layout).nbytes(job.precision)
    in_block, in_head = working(job, layout)
    plain = shape_alone(layout)
    return [
        ModelShard(
            elements,
            max(blocks * block + heads * head for blocks, heads in alive),
            max(in_block, in_head) if has_head else in_block,
        )
        for elements, alive, has_head in zip(
            rank_elements(job, plain, speeds),
            alive_blocks(job, plain._replace(num_micro_batches=layout.num_micro_batches), speeds),
            (layout.num_stages - 1 in own for own in stages(job, layout, speeds).of_rank),
            strict=True,
        )
    ]


def shape_alone(layout: ParallelLayout) -> ParallelLayout:
    """Return the parts of a layout that divide the model; layouts that have them in common have equal elements."""
    pp, tp, ep, schedule = layout.pp, layout.tp, layout.ep, layout.schedule
    return ParallelLayout(pp=pp, tp=tp, ep=ep, schedule=schedule, virtual_stages=layout.virtual_stages)


@lru_cache(maxsize=1 << 14)
def rank_elements(job: TrainingJob, layout: ParallelLayout, speeds: tuple[float, ...]) -> list[RankElements]:
    """Count the elements of each pp rank."""
    cut, params = stages(job, layout, speeds), param_counts(job.model, layout.tp, layout.ep)
    elements = []
    for rank, (count, blocks) in enumerate(zip(rank_params(job, layout, speeds), cut.num_blocks, strict=True)):
        matrices = blocks * params.matrices
        states = counts.state_elements(job.optimizer, count, matrices)
        elements.append(RankElements(count, states, matrices, max(map(params.layer, cut.of(rank)))))
    return elements


@lru_cache(maxsize=1 << 16)
def alive_blocks(job: TrainingJob, layout: ParallelLayout, speeds: tuple[float, ...]) -> list[set[tuple[int, int]]]:
    """Count the micro-batches' blocks and heads that are alive in each pp rank at the moments of `alive`."""
    cut = stages(job, layout, speeds)
    moments = alive(layout.schedule, layout.pp, layout.num_micro_batches, layout.virtual_stages)
    last = layout.num_stages - 1
    return [
        {
            (
                sum(n * cut.blocks[stage] for n, stage in zip(moment, own, strict=True)),
                sum(n for n, stage in zip(moment, own, strict=True) if stage == last),
            )
            for moment in of_rank
        }
        for own, of_rank in zip(cut.of_rank, moments, strict=True)
    ]


def largest(shards: Sequence[ModelShard]) -> list[ModelShard]:
    """Leave out the shards of ranks beside which others have the same elements, and more activations."""
    most: dict[tuple[RankElements, float], ModelShard] = {}
    for shard in shards:
        key = shard.elements, shard.working
        if key not in most or shard.activations > most[key].activations:
            most[key] = shard
    return [*most.values()]


def working(job: TrainingJob, layout: ParallelLayout) -> tuple[float, float]:
    """Return the bytes of transient gradients: in a block around GELU or the gate; of logits and log-probabilities.

    Gradients of experts' weights exist twice, one by one and together, for one of the two layers at a time.  A block
    that is recomputed also has all of its activations.
    """
    precision, model = job.precision, job.model
    elements = (3 if model.is_gated else 2) * model.hidden_width * counts.fullest_rows(model, layout.ep)
    around = elements * counts.tokens(job, layout) / layout.tp * precision.activation
    if model.num_experts:
        around += param_counts(model, layout.tp, layout.ep).experts * precision.gradient
    if layout.recompute != "none":
        around += counts.block_saved(job, layout._replace(recompute="none")).nbytes(precision)
    return around, 2 * 4 * counts.logits(job, layout) * (not job.kernels.fused_loss)


def buffers(job: TrainingJob, layout: ParallelLayout, params: int, crosses: bool = False) -> float:
    """Return the bytes of communication buffers: activations, and without a pipeline the next block and buckets.

    If the sum of gradients `crosses` hosts, each replica adds up one part of every bucket.  The part of another one
    waits in memory whose size is rounded up to a power of two, at most twice the part.
    """
    precision, counted = job.precision, param_counts(job.model, layout.tp, layout.ep)
    activations = counts.tokens(job, layout) * job.model.n_embd * precision.activation
    total = 2.0 * GROWTH * counts.fullest_rows(job.model, layout.ep) * activations if layout.ep > 1 else 0.0
    total += 2.0 * params * precision.gradient / (layout.dp * layout.sp // layout.ep) * crosses
    total += 2.0 * activations * (layout.tp > 1)
    total += 2.0 * activations / counts.between_tp(layout) * (layout.pp > 1)
    if layout.pp > 1:
        return total
    if layout.zero_stage == 2:
        mlp = job.model.n_embd * counts.mlp_inputs(job.model) // layout.tp
        largest = max(counted.vocabulary, mlp)
        bucket = max(job.bucket_mb * 2**20, largest * precision.gradient)
        total += min(2 * bucket, params * precision.gradient)
    if layout.zero_stage == 3:
        total += counted.block * (2 * precision.parameter + precision.gradient)
        total += params % counted.block * precision.parameter  # parameters outside of blocks stay gathered
    return total


def memory(
    job: TrainingJob,
    layout: ParallelLayout,
    shards: list[ModelShard],
    owners: int,
    limits: Sequence[float] = (),
    crosses: bool = False,
) -> Memory:
    """Return the memory of the rank that needs most of its pp rank's `limits`.

    ZeRO shards over `owners` ranks; `crosses` says whether the replicas are on several hosts.

    In a pipeline, ZeRO's working bytes per element of the largest layer, `in_layer`, hold the gradients of one layer,
    those of two that are being reduced, and with stage 3 two layers' parameters.
    """
    stage, precision, number = layout.zero_stage, job.precision, owners if layout.zero_stage >= 1 else 1
    parameter = precision.parameter / (owners if stage >= 3 else 1)
    gradient = precision.gradient / (owners if stage >= 2 else 1)
    in_layer = 3.0 * precision.gradient + 2 * precision.parameter * (stage == 3)
    in_layer *= layout.pp > 1 and stage >= 2

    def optimizer(own: RankElements) -> float:
        return (own.params * precision.master + own.states * precision.state) / number

    def rank_bytes(shard: ModelShard) -> float:
        own = shard.elements
        states = own.params * (parameter + gradient) + optimizer(own)
        return states + own.layer * in_layer + shard.activations + shard.working

    limits = limits or [math.inf] * len(shards)
    of_limits = [
        rank_bytes(shard) / (limit if limit < math.inf else 1) for shard, limit in zip(shards, limits, strict=True)
    ]
    fullest = of_limits.index(max(of_limits))
    most, own = shards[fullest], shards[fullest].elements
    return Memory(
        own.params * parameter,
        own.params * gradient,
        optimizer(own),
        most.activations,
        most.working,
        buffers(job, layout, own.params, crosses)
        + own.layer * in_layer
        + matrix_buffers(job, layout, own.matrices, number),
        limits[fullest],
    )


def matrix_buffers(job: TrainingJob, layout: ParallelLayout, matrices: int, owners: int) -> float:
    """Return the bytes of Muon's exchange: each matrix is sent to an owner once, and back to every copy."""
    replicas = layout.dp * layout.sp // layout.ep
    if job.optimizer != "muon" or replicas * layout.tp == 1:
        return 0.0
    return 2 * (1 / replicas + 1 / owners) * matrices * job.precision.state
