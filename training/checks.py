"""Check that a run's settings are compatible with each other, with the data, and with the ranks."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import NamedTuple

from collectives.algorithms.groups import Topology
from collectives.job import system
from collectives.schedule.draw import refuse, refuse_picture
from models.data import Tokens, TokenWindows, split
from models.hf import initialize
from models.model import Model
from models.token_files import TokenSequence
from parallelism.data.sampler import DistributedSampler
from parallelism.data.units import groups_of
from parallelism.experts.expert_parallel import check_experts
from parallelism.mesh import MeshShape, axes_of, mesh_shape, replica_axes
from parallelism.numerics.precision import Precision
from parallelism.pipeline.schedule import files, registry
from parallelism.pipeline.schedule.actions import Schedule
from parallelism.pipeline.schedule.search import limits_of
from parallelism.planner import ParallelLayout, TrainingJob
from parallelism.planner.memory import in_bytes, rank_params
from parallelism.planner.presets import samples_of_depth, shape_of
from parallelism.sequence.token_shards import check_between_layers, shard_tokens
from parallelism.tensor.sharding_plan import strategies
from training.compiling import check_compiler
from training.config import AUTO, SEARCH, Config, make_model, picture_of, tokens_of, zero_group
from training.family import plan_of
from training.logs import check_logs
from training.optimizing import check_optimizer


class Inputs(NamedTuple):
    """Inputs of a run, the same on every rank."""

    tokens: Tokens
    windows: TokenWindows  # to train on
    val_ids: TokenSequence
    num_micro_batches: int  # per rank
    batch_size: int  # over all ranks
    schedule: Schedule
    precision: Precision
    gpt: Model  # before it is divided


def check(config: Config, topology: Topology, rank: int = 0) -> Inputs:
    """Check the settings and build the inputs of a run on the ranks of `topology`, without communication or output.

    Rank 0 also checks that the run's trace can be written.

    Raises: ValueError for incompatible settings.
    """
    check_logs(config, rank)
    check_saving(config)
    check_optimizer(config)
    check_skips(config)
    check_trace(config, rank)
    precision = Precision(config.dtype, config.master_weights, config.grad_dtype)
    check_mixture(config, len(topology.node_of))
    mesh = mesh_shape(len(topology.node_of), **axes_of(config))
    shape = mesh.lengths
    head_ranks = check_sequences(config, shape)
    check_zero_group(config, mesh, topology)
    tokens = tokens_of(config)
    check_vocabulary(config, tokens)
    check_memory(config, tokens.vocab_size, topology)
    train_ids, val_ids = split(tokens, config.val_fraction, config.block_size)
    windows = TokenWindows(train_ids, config.block_size, config.seed)
    number = num_micro_batches(config, shape["dp"], len(windows))
    batch_size = shape["dp"] * config.micro_batch_size * number
    DistributedSampler(len(windows), batch_size, rank=0, size=shape["dp"])  # raises for an epoch without steps
    schedule = make_schedule(config, number)
    gpt = make_model(config, tokens.vocab_size)
    if config.init_from:
        initialize(gpt, config.init_from)
    strategies(gpt, plan_of(gpt.config), {**shape, "heads": head_ranks})  # raises for modules that cannot be divided
    check_compiler(config)  # last, as its import takes long
    return Inputs(tokens, windows, val_ids, number, batch_size, schedule, precision, gpt)


def check_vocabulary(config: Config, tokens: Tokens) -> None:
    end, last = config.document_end, tokens.vocab_size - 1
    if end is not None and end > last:
        raise ValueError(f"document_end={end} is not a token of {tokens.name}: use one from 0 to {last}")


def check_memory(config: Config, vocab_size: int, topology: Topology) -> None:
    """Check that a host can hold a whole model for each of its ranks, which they all start with."""
    (num_params,) = rank_params(TrainingJob(shape_of(config, vocab_size), 1), ParallelLayout())
    ranks = max(map(len, topology.nodes))
    nbytes = num_params * 4 * ranks  # initialized in float32
    there = system.total_memory_bytes()
    if nbytes > there:
        raise ValueError(
            f"n_layer={config.n_layer} and n_embd={config.n_embd} make {num_params:,} parameters, {in_bytes(nbytes)} "
            f"for {ranks} ranks of a host that has {in_bytes(there)}: use a smaller model, or fewer ranks a host"
        )


def check_mixture(config: Config, num_ranks: int) -> None:
    """Check that ranks can divide the experts, and refuse per-sequence limits if ranks divide sequences."""
    outer = mesh_shape(num_ranks, **axes_of(replace(config, ep=1)))
    check_experts(config.num_experts, config.ep, outer.lengths["dp"])
    if config.sp > 1 and config.num_experts and (config.balance_loss or config.expert_capacity is not None):
        raise ValueError(
            f"expert_capacity and balance_loss count the tokens of whole sequences, which sp={config.sp} splits: use "
            "sp=1, or neither"
        )


def check_saving(config: Config) -> None:
    if config.eval_only and not (config.resume or config.init_from):
        raise ValueError("eval_only evaluates existing weights: set resume or init_from")
    if config.eval_only and config.resume and config.init_from:
        raise ValueError(f"eval_only evaluates either resume={config.resume} or init_from={config.init_from}: omit one")
    if config.checkpoint_dir or (config.eval_only and config.resume != AUTO):
        return
    if config.resume or config.checkpoint_interval:
        raise ValueError("resume and checkpoint_interval need checkpoints: set checkpoint_dir")


def check_skips(config: Config) -> None:
    if config.non_finite != "skip" and config.max_skips != Config.max_skips:
        applies = f"applies to non_finite=skip, not to {config.non_finite}"
        raise ValueError(f"max_skips={config.max_skips} {applies}: omit it, or set non_finite")


def check_trace(config: Config, rank: int) -> None:
    if config.trace and config.pp == 1:
        raise ValueError(f"trace={config.trace} traces a pipeline: use pp of 2 or more, or omit it")
    if config.trace and rank == 0:
        refuse(config.trace, "trace=")
        refuse_picture(picture_of(config.trace), "trace: its picture ")


def check_sequences(config: Config, shape: dict[str, int]) -> int:
    """Check that sp and tp ranks can divide sequences; return the number of sp ranks that exchange heads."""
    shards = shard_tokens(config.block_size, shape["sp"], config.sp_mode, config.sp_order, config.sp_heads)
    if config.sequence_parallel:
        check_between_layers(config.block_size, shape["sp"], shape["tp"])
    return shards.parts


def check_zero_group(config: Config, mesh: MeshShape, topology: Topology) -> None:
    """Check that the group size divides the ranks with the same part of the model."""
    for ranks in mesh.groups(*replica_axes(mesh.lengths)):
        nodes = Topology.from_ids([topology.node_of[rank] for rank in ranks]).nodes
        groups_of(zero_group(config), len(ranks), nodes)


def num_micro_batches(config: Config, dp_size: int, num_samples: int) -> int:
    """Return a rank's number of micro-batches per step: as set, from the global batch, or by the model's depth.

    By depth, the global batch is the nearest one that the ranks divide, of at most `num_samples`.
    """
    together = dp_size * config.micro_batch_size
    if config.global_batch_size is None:
        if config.num_micro_batches is not None or config.depth is None:
            return config.num_micro_batches or 1
        target = min(samples_of_depth(config.depth, config.block_size), num_samples)
        return max(1, min(round(target / together), num_samples // together))
    check_batch(config, dp_size)
    if config.global_batch_size < 1 or config.global_batch_size % together:
        nearest = max(1, round(config.global_batch_size / together)) * together
        raise ValueError(
            f"global_batch_size={config.global_batch_size} is not divisible by dp={dp_size} ranks in micro-batches of "
            f"{config.micro_batch_size}: use a multiple of {together}, such as {nearest}, or another micro_batch_size"
        )
    return config.global_batch_size // together


def check_batch(config: Config, dp_size: int) -> None:
    """Refuse a global batch other than that of the micro-batches, of which there are 1 by default."""
    batch, number = config.global_batch_size, config.num_micro_batches
    if batch is None or number in (None, 1):
        return
    samples = dp_size * config.micro_batch_size * number
    if samples != batch:
        raise ValueError(
            f"global_batch_size={batch} differs from the {samples} samples of num_micro_batches={number} on "
            f"dp={dp_size} ranks: omit one of the two"
        )


def make_schedule(config: Config, num_micro_batches: int) -> Schedule:
    """Make the pipeline schedule; raise ValueError if ranks, micro-batches or layers are incompatible with it.

    If a schedule is to be searched, return a placeholder with as many stages.
    """
    name = config.schedule
    if config.max_alive is not None and name != SEARCH:
        raise ValueError(f"max_alive={config.max_alive} limits a searched schedule, not {name}: use schedule={SEARCH}")
    if name == SEARCH:
        name = "1f1b" if config.virtual_stages in (None, 1) else "interleaved"
        limits_of(config.max_alive, config.pp, num_micro_batches, config.virtual_stages or 1)
    if name in registry.names():
        schedule = registry.make_schedule(name, config.pp, num_micro_batches, config.virtual_stages)
    elif os.path.exists(name):
        schedule = read_schedule(config, num_micro_batches)
    else:
        raise ValueError(f"schedule={name!r} is neither a file nor one of {', '.join(registry.names())}, {SEARCH}")
    if schedule.num_stages > config.n_layer:
        raise ValueError(
            f"pp={config.pp} with schedule={config.schedule} makes {schedule.num_stages} stages of n_layer="
            f"{config.n_layer} blocks: use at most {config.n_layer} stages, or more blocks"
        )
    return schedule


def read_schedule(config: Config, num_micro_batches: int) -> Schedule:
    schedule = files.read(config.schedule)
    shape = config.pp, num_micro_batches
    if (schedule.num_ranks, schedule.num_micro_batches) != shape:
        raise ValueError(
            f"schedule={config.schedule} is for pp={schedule.num_ranks} and num_micro_batches="
            f"{schedule.num_micro_batches}, not for {shape[0]} and {shape[1]}: use those, or another schedule"
        )
    return schedule
