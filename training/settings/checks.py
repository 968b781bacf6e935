"""Checks of a run's settings, each of one thing, which raise ValueError with the value and the remedy."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace

from collectives.algorithms.groups import Topology
from collectives.job import environment, system
from collectives.schedule.moves import even_runs
from parallelism.data.units import groups_of
from parallelism.experts.expert_parallel import check_experts
from parallelism.mesh import MeshShape, axes_of, mesh_shape, replica_axes
from parallelism.numerics.precision import HALVES
from parallelism.pipeline.schedule import files, registry
from parallelism.pipeline.schedule.actions import Schedule
from parallelism.pipeline.schedule.search import limits_of
from parallelism.planner import ParallelLayout, TrainingJob
from parallelism.planner.memory import in_bytes, rank_params
from parallelism.planner.presets import describe, samples_of_depth, shape_of
from parallelism.planner.uses import LAYOUT_USES, Use
from parallelism.sequence.token_shards import check_between_layers, check_parts, shard_tokens
from parallelism.tensor.sharding_plan import check_tiles
from parallelism.tensor.tiles import is_power_of_two
from training.data.tokens import Tokens
from training.optim.learning_rate import STABLE
from training.settings.derived import zero_group
from training.settings.fields import AUTO, LEAVE_OUT, SEARCH, RunSettings

TRAINING = Use("eval_only", lambda eval_only: not eval_only, "set eval_only to false")
CHECKPOINTS = Use("checkpoint_dir", bool, "set checkpoint_dir")
USES = (
    *LAYOUT_USES,
    *((name, Use.of("optimizer", "adamw", "muon")) for name in ("beta1", "beta2", "eps")),
    ("momentum", Use.of("optimizer", "sgd", "muon")),
    ("muon_lr", Use.of("optimizer", "muon")),
    *((name, Use.of("lr_schedule", "cosine", "linear", STABLE)) for name in ("min_lr", "lr_decay_iters")),
    ("max_skips", Use.of("non_finite", "skip")),
    ("on_corruption", Use("check_interval", bool, "set check_interval")),
    ("max_alive", Use.of("schedule", SEARCH)),
    *((name, Use("reproducible", bool, "set reproducible")) for name in ("sequence_parts", "tiles", "balance_load")),
    *((name, CHECKPOINTS) for name in ("checkpoint_interval", "checkpoints_kept", "snapshot_interval")),
    ("snapshot_dir", Use("snapshot_interval", bool, "set snapshot_interval")),
    *(
        (name, TRAINING)
        for name in (
            "report",
            "prometheus",
            "tensorboard",
            "wandb",
            "profile",
            "hash_interval",
            "check_interval",
            "times_interval",
        )
    ),
    ("balance_load", TRAINING),
    ("rope_original_length", Use("rope_factor", lambda factor: factor > 1, "set rope_factor above 1")),
    ("val_fraction", Use("val_data", lambda paths: not paths, "omit val_data")),
)


def check_weights(settings: RunSettings) -> None:
    """Check that there are weights to evaluate or to resume from."""
    if settings.eval_only and not (settings.resume or settings.init_from):
        raise ValueError("eval_only evaluates existing weights: set resume or init_from")
    if settings.eval_only and settings.resume and settings.init_from and settings.lora_rank is None:
        raise ValueError(
            f"eval_only evaluates either resume={settings.resume} or init_from={settings.init_from}: omit one"
        )
    if settings.resume and not settings.checkpoint_dir and not (settings.eval_only and settings.resume != AUTO):
        raise ValueError(f"resume={settings.resume} continues with checkpoints of its own: set checkpoint_dir")


def check_corruption(settings: RunSettings) -> None:
    """Refuse to leave out ranks where the job ends with one."""
    survives = environment.survives_ranks() and settings.checkpoint_dir
    if settings.on_corruption == LEAVE_OUT and not survives:
        raise ValueError(
            "on_corruption=leave_out needs a job that continues without a rank, and its checkpoints: start it by "
            "mpirun --with-ft ulfm, and set checkpoint_dir"
        )


def check_rates(settings: RunSettings) -> None:
    """Refuse learning rates that do not rise to `lr`, or decay before they have."""
    decay, last, warmed = settings.lr_decay_iters, settings.max_iters, f"warmup_iters={settings.warmup_iters}"
    if settings.min_lr is not None and settings.min_lr > settings.lr:
        raise ValueError(f"min_lr={settings.min_lr} must be at most lr={settings.lr}, from which it falls")
    if settings.warmup_iters > last and settings.warmup_iters != RunSettings.warmup_iters:
        raise ValueError(
            f"{warmed} is longer than the run of max_iters={last} steps, which would never reach lr={settings.lr}: use "
            f"at most {last}"
        )
    if decay is None:
        return
    if settings.lr_schedule == STABLE and settings.warmup_iters + decay > last:
        raise ValueError(
            f"{warmed} and lr_decay_iters={decay} are more than max_iters={last} with lr_schedule=wsd: use fewer of one"
        )
    if settings.lr_schedule != STABLE and settings.warmup_iters >= decay:
        raise ValueError(f"{warmed} must be below lr_decay_iters={decay}, by which the learning rate has fallen")


def check_vocabulary(settings: RunSettings, tokens: Tokens) -> None:
    end, last = settings.document_end, tokens.vocab_size - 1
    if end is not None and tokens.conversations:
        raise ValueError(f"document_end={end}, but {tokens.name} has conversations, which are documents: omit it")
    if end is not None and end > last:
        raise ValueError(f"document_end={end} is not a token of {tokens.name}: use one from 0 to {last}")


def check_memory(settings: RunSettings, vocab_size: int, topology: Topology) -> None:
    """Check that a host can hold a whole model for each of its ranks, which they all start with."""
    (num_params,) = rank_params(TrainingJob(shape_of(settings, vocab_size), 1), ParallelLayout())
    ranks = max(map(len, topology.nodes))
    nbytes = num_params * 4 * ranks  # initialized in float32
    there = system.total_memory_bytes()
    if nbytes > there:
        raise ValueError(
            f"n_layer={settings.n_layer} and n_embd={settings.n_embd} make {num_params:,} parameters, "
            f"{in_bytes(nbytes)} for {ranks} ranks of a host that has {in_bytes(there)}: use a smaller model, or fewer "
            "ranks a host"
        )


def check_mixture(settings: RunSettings, num_ranks: int) -> None:
    """Check that ranks can divide the experts, and refuse per-sequence limits if ranks divide sequences."""
    outer = mesh_shape(num_ranks, **axes_of(replace(settings, ep=1)))
    check_experts(settings.num_experts, settings.ep, outer.lengths["dp"])
    if settings.sp > 1 and settings.num_experts and (settings.balance_loss or settings.expert_capacity is not None):
        raise ValueError(
            f"expert_capacity and balance_loss count the tokens of whole sequences, which sp={settings.sp} splits: use "
            "sp=1, or neither"
        )


def check_sequences(settings: RunSettings, shape: dict[str, int]) -> int:
    """Check that sp and tp ranks can divide sequences; return the number of sp ranks that exchange heads."""
    shards = shard_tokens(settings.block_size, shape["sp"], settings.sp_mode, settings.sp_order, settings.sp_heads)
    if settings.sequence_parallel:
        check_between_layers(settings.block_size, shape["sp"], shape["tp"])
    if settings.sequence_parts:
        check_parts(settings.sequence_parts, shards)
    elif settings.reproducible and shape["sp"] > 1:
        raise ValueError(
            f"reproducible with sp={shape['sp']} needs sequence_parts, the same on any number of ranks: use a multiple "
            f"of {shards.unit}, or sp=1"
        )
    return shards.parts


def check_reproducible(settings: RunSettings, lengths: Mapping[str, int]) -> None:
    """Refuse what makes bits depend on the layout."""
    if not settings.reproducible:
        return
    tp, tiles, parts, grad_dtype = lengths["tp"], settings.tiles, settings.sequence_parts, settings.grad_dtype
    refused = {
        f"ep={settings.ep} computes tokens of several ranks together": settings.ep > 1,
        "compile chooses kernels by shapes": settings.compile,
        f"grad_dtype={grad_dtype} rounds sums of ranks": grad_dtype in HALVES,
        f"num_experts={settings.num_experts} with tiles or sequence_parts adds up products of experts by rank": (
            (tiles or parts) and settings.num_experts
        ),
        f"model={settings.model} with sequence_parts={parts} computes with 1 + weight in norms": (
            parts and describe(settings, 1)["norm_offset"]
        ),
        f"tiles={tiles} with sequence_parts={parts} computes tiles of all of a rank's tokens": tiles and parts,
    }
    for what, is_set in refused.items():
        if is_set:
            raise ValueError(f"{what}, which reproducible rules out: omit one of the two")
    if tp > 1 and not tiles:
        raise ValueError(f"reproducible with tp={tp} needs a fixed number of tiles, also without tp: set tiles to 8")
    if tiles and not (is_power_of_two(tp) and is_power_of_two(tiles) and tiles % tp == 0):
        nearest = 2 ** max(1, math.ceil(math.log2(max(tp, tiles))))
        raise ValueError(f"tiles={tiles} and tp={tp} must be powers of two, of which tp divides tiles: use {nearest}")
    check_tiles("block_size", settings.block_size, {"tiles": tiles or 0})


def check_zero_group(settings: RunSettings, mesh: MeshShape, topology: Topology) -> None:
    """Check that the group size divides the ranks with the same part of the model."""
    for ranks in mesh.groups(*replica_axes(mesh.lengths)):
        nodes = Topology.from_ids([topology.node_of[rank] for rank in ranks]).nodes
        groups_of(zero_group(settings), len(ranks), nodes)


def num_micro_batches(settings: RunSettings, dp_size: int, num_samples: int) -> int:
    """Return a rank's number of micro-batches per step: as set, from the global batch, or by the model's depth.

    By depth, the global batch is the nearest one that the ranks divide, of at most `num_samples`.
    """
    together = dp_size * settings.micro_batch_size
    batch, number = settings.global_batch_size, settings.num_micro_batches
    if batch is None:
        if number is not None or settings.depth is None:
            return number or 1
        target = min(samples_of_depth(settings.depth, settings.block_size), num_samples)
        return max(1, min(round(target / together), num_samples // together))
    check_batch(settings, dp_size)
    if batch % together:
        nearest = max(1, round(batch / together)) * together
        raise ValueError(
            f"global_batch_size={batch} is not divisible by dp={dp_size} ranks in micro-batches of "
            f"{settings.micro_batch_size}: use a multiple of {together}, such as {nearest}, or another micro_batch_size"
        )
    return batch // together


def micro_batches_by_rank(settings: RunSettings, dp_size: int, num_samples: int) -> list[int]:
    """Return each dp rank's number of micro-batches per step: equal ones, unless exact sums allow others."""
    batch, size, number = settings.global_batch_size, settings.micro_batch_size, settings.num_micro_batches
    if not settings.reproducible or batch is None or number is not None or batch % (dp_size * size) == 0:
        return [num_micro_batches(settings, dp_size, num_samples)] * dp_size
    if batch % size or batch < dp_size * size:
        nearest = max(dp_size, round(batch / size)) * size
        raise ValueError(
            f"global_batch_size={batch} is not at least dp={dp_size} whole micro-batches of {size}: use {nearest}, or "
            "another micro_batch_size"
        )
    numbers = [len(run) for run in even_runs(batch // size, dp_size)]
    words = f"global_batch_size={batch} makes {numbers[0]} micro-batches of one rank, and {numbers[-1]} of another"
    if settings.zero_stage == 3:
        raise ValueError(f"{words}, but zero_stage=3 needs equally many: use at most 2")
    for number in {*numbers}:
        if max_stages(make_schedule(settings, number)) > 1:
            raise ValueError(f"{words}, but schedule={settings.schedule} has several stages a rank: use 1f1b")
    return numbers


def check_balance_load(settings: RunSettings, numbers: Sequence[int]) -> None:
    """Refuse to move micro-batches between the dp ranks, which have these numbers, where they cannot be moved."""
    if not settings.balance_load:
        return
    total, stage = sum(numbers), settings.zero_stage
    if len(numbers) == 1 or total == len(numbers):
        what = "with dp=1" if len(numbers) == 1 else f"with {total} micro-batches on dp={total} ranks"
        raise ValueError(f"balance_load has no effect {what}: omit it, or use more dp ranks or smaller micro-batches")
    if stage == 3:
        raise ValueError(
            "balance_load makes unequal numbers of micro-batches, but zero_stage=3 needs equally many: use at most 2"
        )
    if settings.device != "cpu":
        raise ValueError(f"balance_load measures speeds by the host's clock: omit it with device={settings.device}")
    if settings.schedule not in registry.names() or max_stages(make_schedule(settings, numbers[0])) > 1:
        raise ValueError(
            f"balance_load needs a schedule of one stage a rank, not schedule={settings.schedule}: use 1f1b"
        )


def max_stages(schedule: Schedule) -> int:
    """Return the largest number of stages on a rank."""
    return max(len(schedule.stages(rank)) for rank in range(schedule.num_ranks))


def check_batch(settings: RunSettings, dp_size: int) -> None:
    """Refuse a global batch other than that of the micro-batches."""
    batch, number = settings.global_batch_size, settings.num_micro_batches
    if batch is None or number is None:
        return
    samples = dp_size * settings.micro_batch_size * number
    if samples != batch:
        raise ValueError(
            f"global_batch_size={batch} differs from the {samples} samples of num_micro_batches={number} on "
            f"dp={dp_size} ranks: omit one of the two"
        )


def make_schedule(settings: RunSettings, num_micro_batches: int) -> Schedule:
    """Make the pipeline schedule; raise ValueError if ranks, micro-batches or layers are incompatible with it.

    If a schedule is to be searched, return a placeholder with as many stages.
    """
    name = settings.schedule
    if name == SEARCH:
        name = "1f1b" if settings.virtual_stages in (None, 1) else "interleaved"
        limits_of(settings.max_alive, settings.pp, num_micro_batches, settings.virtual_stages or 1)
    if name in registry.names():
        schedule = registry.make_schedule(name, settings.pp, num_micro_batches, settings.virtual_stages)
    elif os.path.exists(name):
        schedule = read_schedule(settings, num_micro_batches)
    else:
        raise ValueError(f"schedule={name!r} is neither a file nor one of {', '.join(registry.names())}, {SEARCH}")
    ends = 2 * (settings.balance == "layers")  # stages of the embedding and of the head
    if schedule.num_stages > settings.n_layer + ends:
        raise ValueError(
            f"pp={settings.pp} with schedule={settings.schedule} makes {schedule.num_stages} stages of n_layer="
            f"{settings.n_layer} blocks: use at most {settings.n_layer + ends} stages, or more blocks"
        )
    return schedule


def read_schedule(settings: RunSettings, num_micro_batches: int) -> Schedule:
    schedule = files.read(settings.schedule)
    shape = settings.pp, num_micro_batches
    if (schedule.num_ranks, schedule.num_micro_batches) != shape:
        raise ValueError(
            f"schedule={settings.schedule} is for pp={schedule.num_ranks} and num_micro_batches="
            f"{schedule.num_micro_batches}, not for {shape[0]} and {shape[1]}: use those, or another schedule"
        )
    return schedule
