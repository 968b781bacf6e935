"""The planner's command line: the model, the batch and the layout as train.py's flags, and the machine."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from importlib import import_module
from typing import Any, NamedTuple, get_type_hints

from collectives.job.settings import Parser, Range, check
from collectives.schedule.cost import Network, Nodes
from collectives.schedule.fabrics import (
    FABRICS,
    RANKS,
    add_network_flags,
    in_nodes,
    measured_topology,
    refuse_too_many,
    with_flags,
)
from models import presets, ranges
from models.flags import add_flag, config_file, config_help, from_toml
from parallelism.numerics.precision import DTYPES, Precision
from parallelism.pipeline.schedule import registry
from parallelism.planner.counts import STATES
from parallelism.planner.layout import RECOMPUTE, ZERO_GROUPS, ParallelLayout, TrainingJob
from parallelism.planner.machine import DEVICES, SPARE, Machine
from parallelism.planner.memory import in_bytes
from parallelism.planner.report import as_flag
from parallelism.sequence.token_shards import MODES, ORDERS

EFFICIENCY, LEAST_PASS_US = 0.5, 50.0  # nowhere stated: what is usual
EFFICIENCIES, SPARES = Range(0, 1, open="above"), Range(0, 1, open="below")
MICROSECONDS, GIGABYTES = Range(0, 10**9, unit="us"), Range(0, 10**6, open="above", unit="GB")


def flag(default: Any, text: str, **more: Any) -> Any:
    return field(default=default, metadata={"help": text, **more})


@dataclass
class Settings:
    """Those of train.py that have a part in a step's memory or time, with its defaults.

    Raises: ValueError for values that no model or layout can have.
    """

    vocab_size: int = flag(None, "tokens that there are: model's; of text, bytes, 256", range=ranges.VOCABULARY)
    model: str = flag(presets.DEFAULT, "shape by name, which the flags below override", choices=[*presets.PRESETS])
    depth: int | None = flag(None, "blocks, from which the rest follows, before model", range=ranges.LAYERS)
    n_layer: int = flag(None, "blocks: model's", range=ranges.LAYERS)
    n_head: int = flag(None, "attention heads: model's", range=ranges.HEADS)
    n_kv_head: int | None = flag(None, "heads of keys and values: model's, or n_head", range=ranges.HEADS)
    n_embd: int = flag(None, "width: model's", range=ranges.WIDTH)
    n_hidden: int | None = flag(None, "width within a llama's MLP: model's", range=ranges.WIDTH)
    tied: bool | None = flag(None, "a llama's head is its embedding: model's")
    block_size: int = flag(None, "tokens a sample: model's", range=ranges.LENGTH)
    num_experts: int = flag(0, "experts of a mixture in place of each MLP; 0: none", range=ranges.EXPERTS)
    experts_per_token: int = flag(2, "experts that each token goes to", range=ranges.EXPERTS_PER_TOKEN)
    expert_capacity: float | None = flag(None, "limit of an expert's tokens, times the mean", range=ranges.CAPACITY)
    balance_loss: float = flag(0.0, "weight of a loss of uneven choices", range=ranges.LOSS_WEIGHT)
    dropout: float = flag(0.0, "dropout probability", range=ranges.DROPOUT)
    bias: bool | None = flag(None, "biases in linear layers and norms of a GPT-2: model's")
    optimizer: str = flag("adamw", "whose states are kept", choices=[*STATES])
    dtype: str = flag("float32", "what is computed in", choices=DTYPES)
    master_weights: bool = flag(False, "16-bit parameters, and float32 ones for the optimizer")
    grad_dtype: str | None = flag(None, "of gradients, beside master weights: float32", choices=DTYPES)
    global_batch_size: int | None = flag(
        None, "samples a step: as of dp alone, micro_batch_size x num_micro_batches", range=ranges.SAMPLES
    )
    micro_batch_size: int = flag(
        8, "samples a rank computes at once; on the command line, of all layouts", range=ranges.SAMPLES
    )
    num_micro_batches: int = flag(1, "micro-batches a rank computes, were there dp alone", range=ranges.MICRO_BATCHES)
    dp: int | None = flag(None, "this many ranks in data parallel: any", range=ranges.RANKS)
    pp: int | None = flag(None, "in pipeline parallel: any", range=ranges.RANKS)
    sp: int | None = flag(None, "in sequence parallel: any", range=ranges.RANKS)
    tp: int | None = flag(None, "in tensor parallel: any", range=ranges.RANKS)
    ep: int | None = flag(None, "in expert parallel, out of dp: any", range=ranges.RANKS)
    sequence_parallel: bool | None = flag(None, "between split layers, parts of the sequence: with or without")
    schedule: str | None = flag(None, "of pipelines: any that is no worse than others", choices=registry.names())
    virtual_stages: int | None = flag(None, "stages on each pp rank: any", range=ranges.STAGES)
    zero_stage: int | None = flag(None, "any", choices=range(4))
    zero_group: str | None = flag(None, "ranks over which ZeRO shards: either", choices=ZERO_GROUPS)
    recompute: str | None = flag(None, "activations: any", choices=RECOMPUTE)
    sp_mode: str = flag("ring", "how sp ranks meet in attention", choices=MODES)
    sp_order: str = flag("zigzag", "which tokens go to which sp rank", choices=ORDERS)
    sp_heads: int | None = flag(None, "ranks of a group in hybrid mode, which exchange heads: 2", range=ranges.RANKS)
    bucket_mb: float = flag(4.0, "MiB of gradients that are reduced together", range=ranges.MEBIBYTES)

    def __post_init__(self):
        presets.fill(self)
        if self.vocab_size is None:
            self.vocab_size = presets.PRESETS[self.model].vocab_size
        check(self)
        presets.refuse_other_family(self)
        Precision(self.dtype, self.master_weights, self.grad_dtype)  # refuses what doesn't go together


class PlanRequest(NamedTuple):
    """What flags ask for, and in words."""

    job: TrainingJob
    machine: Machine
    fixed: dict[str, Any]
    number: int
    words: list[str]
    command: str  # of train.py on as many ranks, less the layout
    written: list[str]  # settings that its file has


def asked(arguments: Sequence[str] | None, description: str | None) -> PlanRequest:
    """Parse the request; raise ValueError for inconsistent flags, with the remedy."""
    flags = parser(description).parse_args(arguments)
    settings, fixed, given, written = settings_of(flags)
    nodes, network, links = place(flags)
    job = job_of(settings, sum(map(len, nodes)))
    machine, ranks = machine_of(flags, job, nodes, network)
    words = [f"{len(nodes)} x {len(nodes[0])} ranks: {links}", ranks]
    if others := [name for name in written if not hasattr(settings, name)]:
        words.append(f"{flags.config}: {', '.join(others)} have no part in this")
    own = {"config": flags.config} if flags.config else {}
    own |= {name: value for name, value in given.items() if name not in (*ParallelLayout._fields, "vocab_size")}
    train = ["mpirun", "-n", str(machine.world_size), "python -m training", *(as_flag(*each) for each in own.items())]
    return PlanRequest(job, machine, fixed, flags.number, words, " ".join(train), written)


def settings_of(flags: argparse.Namespace) -> tuple[Settings, dict[str, Any], dict[str, Any], list[str]]:
    """Return the merged settings, those fixed for layouts, those of the flags, and the names in the file.

    A micro_batch_size in the file, which train.py needs, makes the samples of a step; layouts may have another.
    """
    hints = get_type_hints(Settings)
    given = {name: getattr(flags, name) for name in hints if hasattr(flags, name)}
    written = from_toml(flags.config, Settings, strict=False) if flags.config else {}
    known = {name: value for name, value in written.items() if name in hints}
    settings = Settings(**{**known, **given})
    asked_for = {*known, *given} - {"num_micro_batches"} - ({"micro_batch_size"} - {*given})
    fixed = {name: getattr(settings, name) for name in ParallelLayout._fields if name in asked_for}
    return settings, fixed, given, list(written)


def parser(description: str | None) -> argparse.ArgumentParser:
    made = Parser("python -m parallelism.planner", description, allow_abbrev=False)
    made.add_argument("--config", type=config_file, help=f"{config_help()}; flags come before it")
    add = made.add_argument
    add("--number", type=Range(1, 1000).whole, default=5, help="of meshes that are shown, the best ones (5)")
    fabrics = "; ".join(f"{name}: {fabric.words}" for name, fabric in FABRICS.items())
    add("--hosts", type=RANKS.whole, help="nodes: 1, or as many as have been measured")
    add("--gpus", type=RANKS.whole, help="ranks of each: as many as the fabric's nodes have")
    add("--fabric", default="ndr", choices=[*FABRICS, "measured"], help=f"links; measured: kept; {fabrics} (ndr)")
    add("--tflops", type=ranges.TFLOPS.number, help="peak of a rank in matrix products: of the fabric's devices")
    add(
        "--efficiency",
        type=EFFICIENCIES.number,
        default=EFFICIENCY,
        help=f"the part of the peak that is had ({EFFICIENCY})",
    )
    add("--least_pass", type=MICROSECONDS.number, metavar="US", help=f"of a block, however small ({LEAST_PASS_US:g})")
    add("--memory", type=GIGABYTES.number, metavar="GB", help="of a rank: of the fabric's devices")
    add("--spare", type=SPARES.number, default=SPARE, help=f"the part of memory for what is not counted ({SPARE})")
    add("--measure", action="store_true", help="this machine's speed in matrix products, and its free memory")
    add_network_flags(made)
    hints = get_type_hints(Settings)
    for each in fields(Settings):
        add_flag(made, each, hints[each.name])
    return made


def job_of(settings: Settings, world_size: int) -> TrainingJob:
    """Return the training job; the samples of a step default to those of data parallelism alone."""
    alone = world_size * settings.micro_batch_size * settings.num_micro_batches
    model = presets.shape_of(settings, settings.vocab_size)
    rest = {name: getattr(settings, name) for name in TrainingJob._fields if name not in ("model", "global_batch_size")}
    return TrainingJob(model, settings.global_batch_size or alone, **rest)


def place(flags: argparse.Namespace) -> tuple[Nodes, Network, str]:
    """Return the ranks of each node, the speeds of links, and their origin."""
    if flags.fabric == "measured":
        nodes, network, words = measured_topology(None)
        hosts, gpus = flags.hosts or len(nodes), flags.gpus or max(map(len, nodes))
    else:
        fabric = FABRICS[flags.fabric]
        network, words = fabric.network, fabric.words
        hosts, gpus = flags.hosts or 1, flags.gpus or fabric.ranks_per_node
    refuse_too_many(hosts * gpus, f"--hosts {hosts} x --gpus {gpus}")
    return in_nodes(hosts * gpus, gpus), with_flags(network, flags), words


def machine_of(flags: argparse.Namespace, job: TrainingJob, nodes: Nodes, network: Network) -> tuple[Machine, str]:
    """Return the machine, with ranks from flags, measurement or the fabric's devices in this order, and its origin."""
    peak, memory, least_s, efficiency = None, None, LEAST_PASS_US * 1e-6, flags.efficiency
    if device := DEVICES.get(flags.fabric):
        peak, memory = device.peak_flops_per_s[job.dtype], device.memory_bytes
    if flags.measure:
        ranks = import_module("parallelism.planner.ranks")  # takes torch, as nothing else here does
        peak, efficiency, least_s = ranks.flops_per_s(job), 1.0, ranks.least_pass_s(job)
        memory = ranks.memory_bytes(ranks=len(nodes[0]))
    if flags.tflops is not None:
        peak, efficiency = flags.tflops * 1e12, flags.efficiency
    memory = memory if flags.memory is None else flags.memory * 1e9
    least_s = least_s if flags.least_pass is None else flags.least_pass * 1e-6
    if peak is None or memory is None:
        raise ValueError(f"--fabric {flags.fabric} has no device: pass --tflops and --memory, or --measure")
    rate, held = peak * efficiency, memory * (1 - flags.spare)
    words = (
        f"a rank: {rate / 1e12:.4g} TFLOP/s, {efficiency:g} of {peak / 1e12:.4g}; "
        f"{in_bytes(held)}, as {flags.spare:g} of {in_bytes(memory)} is spared"
    )
    return Machine(nodes, network, rate, held, least_s), words
