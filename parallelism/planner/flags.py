"""Command line of the planner: model, batch and layout as train.py's flags, and the machine."""

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

EFFICIENCY, LEAST_PASS_US = 0.5, 50.0  # typical values, from no source
EFFICIENCIES, SPARES = Range(0, 1, open="above"), Range(0, 1, open="below")
MICROSECONDS, GIGABYTES = Range(0, 10**9, unit="us"), Range(0, 10**6, open="above", unit="GB")


def flag(default: Any, text: str, **more: Any) -> Any:
    return field(default=default, metadata={"help": text, **more})


@dataclass
class Settings:
    """Settings of train.py that affect a step's memory or time, with the same defaults.

    Raises: ValueError for values that are invalid for every model or layout.
    """

    vocab_size: int = flag(
        None, "vocabulary size; by default the model's, which is 256 for text as bytes", range=ranges.VOCABULARY
    )
    model: str = flag(
        presets.DEFAULT, "model shape by name, which the flags below override", choices=[*presets.PRESETS]
    )
    depth: int | None = flag(None, "number of blocks that sets the other sizes; overrides model", range=ranges.LAYERS)
    n_layer: int = flag(None, "number of transformer blocks; by default the model's", range=ranges.LAYERS)
    n_head: int = flag(None, "number of attention heads; by default the model's", range=ranges.HEADS)
    n_kv_head: int | None = flag(
        None, "number of key and value heads; by default the model's, or n_head", range=ranges.HEADS
    )
    n_embd: int = flag(None, "embedding width; by default the model's", range=ranges.WIDTH)
    n_hidden: int | None = flag(None, "hidden width of a llama's MLP; by default the model's", range=ranges.WIDTH)
    tied: bool | None = flag(None, "tie a llama's head to its embedding; by default the model's")
    block_size: int = flag(None, "sequence length in tokens; by default the model's", range=ranges.LENGTH)
    num_experts: int = flag(0, "number of experts that replace each MLP; 0 for dense MLPs", range=ranges.EXPERTS)
    experts_per_token: int = flag(2, "number of experts that process each token", range=ranges.EXPERTS_PER_TOKEN)
    expert_capacity: float | None = flag(
        None, "capacity of an expert as a multiple of the mean number of tokens", range=ranges.CAPACITY
    )
    balance_loss: float = flag(0.0, "weight of the loss that balances the experts' load", range=ranges.LOSS_WEIGHT)
    dropout: float = flag(0.0, "dropout probability", range=ranges.DROPOUT)
    bias: bool | None = flag(None, "use biases in linear layers and norms of a GPT-2; by default the model's")
    optimizer: str = flag("adamw", "optimizer, which determines the bytes of states", choices=[*STATES])
    dtype: str = flag("float32", "dtype of computing", choices=DTYPES)
    master_weights: bool = flag(False, "store parameters in 16 bits, and float32 master weights for the optimizer")
    grad_dtype: str | None = flag(None, "dtype of gradients with master weights; by default float32", choices=DTYPES)
    global_batch_size: int | None = flag(
        None, "samples in a step; by default ranks x micro_batch_size x num_micro_batches", range=ranges.SAMPLES
    )
    micro_batch_size: int = flag(
        8, "samples in a rank's micro-batch; on the command line, of all layouts", range=ranges.SAMPLES
    )
    num_micro_batches: int = flag(
        1, "micro-batches of a rank in a step with data parallelism alone", range=ranges.MICRO_BATCHES
    )
    dp: int | None = flag(None, "data-parallel ranks; by default any number", range=ranges.RANKS)
    pp: int | None = flag(None, "pipeline-parallel ranks; by default any number", range=ranges.RANKS)
    sp: int | None = flag(None, "sequence-parallel ranks; by default any number", range=ranges.RANKS)
    tp: int | None = flag(None, "tensor-parallel ranks; by default any number", range=ranges.RANKS)
    ep: int | None = flag(None, "expert-parallel ranks within dp; by default any number", range=ranges.RANKS)
    sequence_parallel: bool | None = flag(
        None, "shard the sequence over tp ranks between split layers; by default either"
    )
    schedule: str | None = flag(None, "pipeline schedule; by default any that no other beats", choices=registry.names())
    virtual_stages: int | None = flag(None, "stages on each pp rank; by default any number", range=ranges.STAGES)
    zero_stage: int | None = flag(None, "ZeRO stage; by default any", choices=range(4))
    zero_group: str | None = flag(None, "ranks over which ZeRO shards; by default either", choices=ZERO_GROUPS)
    recompute: str | None = flag(None, "activations that blocks recompute; by default any", choices=RECOMPUTE)
    sp_mode: str = flag("ring", "attention across sp ranks", choices=MODES)
    sp_order: str = flag("zigzag", "order in which tokens are assigned to sp ranks", choices=ORDERS)
    sp_heads: int | None = flag(
        None, "ranks in a group that exchanges heads in hybrid mode; by default 2", range=ranges.RANKS
    )
    bucket_mb: float = flag(4.0, "size of a gradient bucket in MiB", range=ranges.MEBIBYTES)

    def __post_init__(self):
        presets.fill(self)
        if self.vocab_size is None:
            self.vocab_size = presets.PRESETS[self.model].vocab_size
        check(self)
        presets.refuse_other_family(self)
        Precision(self.dtype, self.master_weights, self.grad_dtype)  # raises for incompatible values


class PlanRequest(NamedTuple):
    """Parsed command line, and its description in words."""

    job: TrainingJob
    machine: Machine
    fixed: dict[str, Any]
    number: int
    words: list[str]
    command: str  # train.py on as many ranks, without the layout's flags
    written: list[str]  # names of the settings in the config file


def parse_request(arguments: Sequence[str] | None, description: str | None) -> PlanRequest:
    """Parse the request; raise ValueError for inconsistent flags, with the remedy."""
    flags = parser(description).parse_args(arguments)
    settings, fixed, flag_values, file_names = settings_of(flags)
    nodes, network, links = place(flags)
    job = job_of(settings, sum(map(len, nodes)))
    machine, ranks = machine_of(flags, job, nodes, network)
    words = [f"{len(nodes)} x {len(nodes[0])} ranks: {links}", ranks]
    if others := [name for name in file_names if not hasattr(settings, name)]:
        words.append(f"{flags.config}: {', '.join(others)} do not affect the plan")
    own = {"config": flags.config} if flags.config else {}
    own |= {name: value for name, value in flag_values.items() if name not in (*ParallelLayout._fields, "vocab_size")}
    train = ["mpirun", "-n", str(machine.world_size), "python -m training", *(as_flag(*each) for each in own.items())]
    return PlanRequest(job, machine, fixed, flags.number, words, " ".join(train), file_names)


def settings_of(flags: argparse.Namespace) -> tuple[Settings, dict[str, Any], dict[str, Any], list[str]]:
    """Return the merged settings, those that fix the layout, those of the flags, and the names in the file.

    A micro_batch_size in the file, which train.py needs, determines the samples per step; layouts may use another.
    """
    hints = get_type_hints(Settings)
    flag_values = {name: getattr(flags, name) for name in hints if hasattr(flags, name)}
    file_values = from_toml(flags.config, Settings, strict=False) if flags.config else {}
    file_settings = {name: value for name, value in file_values.items() if name in hints}
    settings = Settings(**{**file_settings, **flag_values})
    asked_for = {*file_settings, *flag_values} - {"num_micro_batches"} - ({"micro_batch_size"} - {*flag_values})
    fixed = {name: getattr(settings, name) for name in ParallelLayout._fields if name in asked_for}
    return settings, fixed, flag_values, list(file_values)


def parser(description: str | None) -> argparse.ArgumentParser:
    command = Parser("python -m parallelism.planner", description, allow_abbrev=False)
    command.add_argument("--config", type=config_file, help=f"{config_help()}; flags override it")
    fabrics = "; ".join(f"{name}: {fabric.words}" for name, fabric in FABRICS.items())
    text = f"network; measured: the saved measurements; {fabrics} (default: ndr)"
    command.add_argument("--fabric", default="ndr", choices=[*FABRICS, "measured"], help=text)
    own = "by default that of the fabric's devices"
    for name, kind, default, text in (
        ("number", Range(1, 1000).whole, 5, "number of best meshes to show (default: 5)"),
        ("hosts", RANKS.whole, None, "number of nodes; by default 1, or the measured ones"),
        ("gpus", RANKS.whole, None, "ranks on each node; by default as many as the fabric's nodes have"),
        ("tflops", ranges.TFLOPS.number, None, f"peak TFLOP/s of a rank in matrix products; {own}"),
        ("efficiency", EFFICIENCIES.number, EFFICIENCY, f"achieved fraction of the peak (default: {EFFICIENCY})"),
        ("least_pass", MICROSECONDS.number, None, f"least time of a block's pass in us (default: {LEAST_PASS_US:g})"),
        ("memory", GIGABYTES.number, None, f"memory of a rank in GB; {own}"),
        ("spare", SPARES.number, SPARE, f"fraction of memory to spare for what is not counted (default: {SPARE})"),
    ):
        command.add_argument(f"--{name}", type=kind, default=default, help=text)
    command.add_argument("--measure", action="store_true", help="measure this machine's products and free memory")
    add_network_flags(command)
    hints = get_type_hints(Settings)
    for each in fields(Settings):
        add_flag(command, each, hints[each.name])
    return command


def job_of(settings: Settings, world_size: int) -> TrainingJob:
    """Return the training job; samples per step default to those of pure data parallelism."""
    alone = world_size * settings.micro_batch_size * settings.num_micro_batches
    model = presets.shape_of(settings, settings.vocab_size)
    rest = {name: getattr(settings, name) for name in TrainingJob._fields if name not in ("model", "global_batch_size")}
    return TrainingJob(model, settings.global_batch_size or alone, **rest)


def place(flags: argparse.Namespace) -> tuple[Nodes, Network, str]:
    """Return the ranks of each node, the link speeds, and the origin of these."""
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
    """Return the machine and its origin; ranks are from flags, measurement or the fabric's devices, in this order."""
    peak, memory, least_s, efficiency = None, None, LEAST_PASS_US * 1e-6, flags.efficiency
    if device := DEVICES.get(flags.fabric):
        peak, memory = device.peak_flops_per_s[job.dtype], device.memory_bytes
    if flags.measure:
        ranks = import_module("parallelism.planner.ranks")  # the only module here that needs torch
        peak, efficiency, least_s = ranks.flops_per_s(job), 1.0, ranks.least_pass_s(job)
        memory = ranks.memory_bytes(ranks=len(nodes[0]))
    if flags.tflops is not None:
        peak, efficiency = flags.tflops * 1e12, flags.efficiency
    memory = memory if flags.memory is None else flags.memory * 1e9
    least_s = least_s if flags.least_pass is None else flags.least_pass * 1e-6
    if peak is None or memory is None:
        raise ValueError(f"--fabric {flags.fabric} has no device: pass --tflops and --memory, or --measure")
    rate, usable = peak * efficiency, memory * (1 - flags.spare)
    words = (
        f"a rank: {rate / 1e12:.4g} TFLOP/s, {efficiency:g} of {peak / 1e12:.4g}; "
        f"{in_bytes(usable)}, as {flags.spare:g} of {in_bytes(memory)} is spared"
    )
    return Machine(nodes, network, rate, usable, least_s), words
