"""Command line of the planner: model, batch and layout as train.py's flags, and the machine."""

import argparse
import shlex
from collections.abc import Container, Sequence
from dataclasses import dataclass, field, fields
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, get_type_hints

from collectives.job.settings import Parser, Range, check
from collectives.schedule import draw, fabrics
from collectives.schedule.fabrics import FABRICS, RANKS
from collectives.schedule.network import Network, Nodes
from parallelism.numerics.precision import DTYPES, Precision
from parallelism.pipeline.schedule import registry
from parallelism.planner import presets, ranges
from parallelism.planner.accelerators import ACCELERATORS, BY_FABRIC
from parallelism.planner.cluster import GIGABYTE, LEAST_PASS_S, MICROSECONDS, Cluster, read
from parallelism.planner.counts import STATES
from parallelism.planner.layout import BALANCES, RECOMPUTE, ZERO_GROUPS, ParallelLayout, TrainingJob
from parallelism.planner.memory import in_bytes, in_unit
from parallelism.planner.place import SPARE, Machine
from parallelism.planner.settings import add_flag, config_file, config_help, from_toml, overridden
from parallelism.planner.uses import check_uses
from parallelism.sequence.token_shards import MODES, ORDERS

LAYOUT = ParallelLayout._fields
EFFICIENCY = 0.5  # where no products have been timed: a typical value, from no source
IN_CLUSTER = ("hosts", "gpus", "accelerator", "tflops", "efficiency", "memory")  # flags that a cluster file replaces
EFFICIENCIES, SPARES = Range(0, 1, open="above"), Range(0, 1, open="below")
GIGABYTES = Range(0, 10**6, open="above", unit="GB")
FLOP_RATES = {" TFLOP/s": 1e12, " GFLOP/s": 1e9}


def flag(default: Any, text: str, values: Any = None, sets: Sequence[str] = ()) -> Any:
    """Return a field with its help, its valid values, a range or a choice, and the fields that a flag of it sets."""
    valid = {} if values is None else {"range" if isinstance(values, Range) else "choices": values}
    return field(default=default, metadata={"help": text, "sets": sets, **valid})


@dataclass
class Settings:
    """Settings of train.py that affect a step's memory or time, with the same defaults.

    Raises: ValueError for values that are invalid for every model or layout.
    """

    vocab_size: int = flag(None, "vocabulary size; by default the model's (256 for bytes)", ranges.VOCABULARY)
    model: str = flag(
        presets.DEFAULT,
        "model shape by name, which the flags below override",
        [*presets.PRESETS],
        presets.SET_BY_MODEL,
    )
    depth: int | None = flag(
        None,
        "number of blocks that sets n_embd (64 per block), n_head, lr and the batch size; overrides model",
        ranges.LAYERS,
        presets.SET_BY_DEPTH,
    )
    n_layer: int = flag(None, "number of transformer blocks; by default the model's", ranges.LAYERS)
    n_head: int = flag(None, "number of attention heads; by default the model's", ranges.HEADS)
    n_kv_head: int | None = flag(
        None,
        "number of key and value heads (grouped-query attention); by default the model's, or n_head",
        ranges.HEADS,
    )
    n_embd: int = flag(None, "embedding width; by default the model's", ranges.WIDTH)
    n_hidden: int | None = flag(
        None,
        "hidden width of the MLP; by default the model's, or 4 n_embd, for a llama 8/3 of it, rounded up",
        ranges.WIDTH,
    )
    tied: bool | None = flag(None, "tie a llama's head to its embedding; by default the model's")
    architecture: str | None = flag(
        None,
        "the rest of the model's description in JSON, such as {\"head_dim\": 64}; by default the model's",
    )
    block_size: int = flag(None, "sequence length in tokens; by default the model's", ranges.LENGTH)
    num_experts: int = flag(
        None, "number of experts that replace each MLP; by default the model's, 0 for dense MLPs", ranges.EXPERTS
    )
    experts_per_token: int = flag(
        None, "number of experts that process each token; by default the model's, or 2", ranges.EXPERTS_PER_TOKEN
    )
    expert_capacity: float | None = flag(
        None,
        "capacity of an expert as a multiple of the mean number of tokens of a sequence; tokens beyond it are dropped",
        ranges.CAPACITY,
    )
    balance_loss: float = flag(0.0, "weight of the loss that balances the experts' load", ranges.LOSS_WEIGHT)
    dropout: float = flag(0.0, "dropout probability", ranges.DROPOUT)
    bias: bool | None = flag(None, "use biases in linear layers and norms of a GPT-2; by default the model's")
    optimizer: str = flag(
        "adamw", "optimizer; muon updates the matrices of blocks, and adamw the other parameters", [*STATES]
    )
    dtype: str = flag("float32", "dtype of computing; weights stay float32 unless master_weights is set", DTYPES)
    master_weights: bool = flag(False, "store parameters in 16 bits, and float32 master weights for the optimizer")
    grad_dtype: str | None = flag(None, "dtype in which gradients are reduced: float32 (the default) or 16 bits")
    global_batch_size: int | None = flag(
        None, "samples in a step; by default ranks x micro_batch_size x num_micro_batches", ranges.SAMPLES
    )
    micro_batch_size: int = flag(8, "samples in a micro-batch; on the command line, of all layouts", ranges.SAMPLES)
    num_micro_batches: int = flag(1, "micro-batches of a rank with data parallelism alone", ranges.MICRO_BATCHES)
    dp: int | None = flag(None, "data-parallel ranks; by default any number", ranges.RANKS)
    pp: int | None = flag(None, "pipeline-parallel ranks; by default any number", ranges.RANKS)
    sp: int | None = flag(None, "sequence-parallel ranks; by default any number", ranges.RANKS)
    tp: int | None = flag(None, "tensor-parallel ranks; by default any number", ranges.RANKS)
    ep: int | None = flag(None, "expert-parallel ranks within dp; by default any number", ranges.RANKS)
    sequence_parallel: bool | None = flag(None, "shard sequences over tp between split layers; by default either")
    schedule: str | None = flag(None, "pipeline schedule; by default any that no other beats", registry.names())
    virtual_stages: int | None = flag(None, "stages on each pp rank; by default any number", ranges.STAGES)
    balance: str = flag(
        "counted", "costs that stages balance: counted, measured with ranks' speeds, or numbers of layers", BALANCES
    )
    zero_stage: int | None = flag(None, "ZeRO stage; by default any", range(4))
    zero_group: str | None = flag(None, "ranks over which ZeRO shards; by default either", ZERO_GROUPS)
    recompute: str | None = flag(None, "activations that blocks recompute; by default any", RECOMPUTE)
    sp_mode: str = flag(
        "ring", "attention across sp ranks; hybrid exchanges heads within groups and runs rings across them", MODES
    )
    sp_order: str = flag("zigzag", "order in which tokens of a sequence are assigned to sp ranks", ORDERS)
    sp_heads: int | None = flag(
        None, "ranks in a group that exchanges heads in hybrid mode; by default 2", ranges.RANKS
    )
    bucket_mb: float = flag(4.0, "size of a gradient bucket in MiB", ranges.MEBIBYTES)

    def __post_init__(self):
        presets.fill(self)
        if self.vocab_size is None:
            self.vocab_size = presets.PRESETS[self.model].settings["vocab_size"]
        check(self)
        presets.refuse_other_family(self)
        Precision(self.dtype, self.master_weights, self.grad_dtype)  # raises for incompatible values
        check_uses(self)


class PlanRequest(NamedTuple):
    """Parsed command line, and its description in words."""

    job: TrainingJob
    machine: Machine
    fixed: dict[str, Any]
    number: int
    words: list[str]
    command: str  # train.py on as many ranks, without the layout's flags
    written: list[str]  # names of the settings in the config file
    up_to: int | None = None  # ranks, for numbers of which to plan as well
    html: Path | None = None  # of the page to write


class PlanFlags(NamedTuple):
    """Command line, the settings that it and the config file give, and the parts of the layout that they fix."""

    flags: argparse.Namespace
    file: dict[str, Any]
    own: dict[str, Any]  # settings on the command line
    settings: Settings
    fixed: dict[str, Any]

    @property
    def measures_ranks(self) -> bool:
        return bool(self.flags.measure and self.flags.cluster)

    def job(self, world_size: int) -> TrainingJob:
        settings = self.settings
        alone = world_size * settings.micro_batch_size * settings.num_micro_batches  # with data parallelism only
        return TrainingJob.of(settings, settings.vocab_size, settings.global_batch_size or alone)


def parse_request(arguments: Sequence[str] | None, description: str | None) -> PlanRequest:
    """Parse the request, for this machine or a described one; raise ValueError for bad flags, with the remedy."""
    parsed = parse_flags(arguments, description)
    if parsed.flags.cluster:
        return request(parsed, *machine_of_cluster(parsed.flags, read(parsed.flags.cluster)))
    nodes, network, links = nodes_and_links(parsed.flags)
    job = parsed.job(sum(map(len, nodes)))
    machine, ranks = machine_of(parsed.flags, job, nodes, network)
    return request(parsed, machine, [f"{nodes_in_words(nodes)} ranks: {links}", ranks])


def parse_flags(arguments: Sequence[str] | None, description: str | None) -> PlanFlags:
    """Parse flags and the config file; raise ValueError for inconsistent ones, with the remedy.

    A micro_batch_size in the file, which train.py needs, determines the samples per step; layouts may use another.
    """
    flags = parser(description).parse_args(arguments)
    hints = get_type_hints(Settings)
    own = {name: getattr(flags, name) for name in hints if hasattr(flags, name)}
    file = from_toml(flags.config, Settings, strict=False) if flags.config else {}
    in_file = overridden(file, own, Settings)
    settings = Settings(**{name: value for name, value in {**in_file, **own}.items() if name in hints})
    fixing = {*in_file} - {"micro_batch_size"} | {*own}
    fixed = {name: getattr(settings, name) for name in LAYOUT if name in fixing and name != "num_micro_batches"}
    if flags.cluster:
        for name in IN_CLUSTER:
            if (value := getattr(flags, name)) is not None:
                raise ValueError(f"--{name} {value:g} has no effect with --cluster, which states it: omit one of them")
    return PlanFlags(flags, file, own, settings, fixed)


def request(parsed: PlanFlags, machine: Machine, words: list[str]) -> PlanRequest:
    """Return the request to plan for a machine, which is described in words."""
    flags, file, own, settings, fixed = parsed
    hints = get_type_hints(Settings)
    job = parsed.job(machine.world_size)
    if others := [name for name in file if name not in hints]:
        words.append(f"{flags.config}: {', '.join(others)} do not affect the plan")
    if len(machine.nodes) > 1 and not flags.hostfile:
        words.append("the command below names no hosts: pass --hostfile, or submit it as COMMAND of a batch script")
    rest = {"config": flags.config} if flags.config else {}
    rest |= {name: value for name, value in own.items() if name not in LAYOUT} | train_settings(flags, settings, file)
    start = "mpirun " + (as_flag("hostfile", flags.hostfile) + " ") * bool(flags.hostfile)
    train = [f"{start}-n {machine.world_size} python -m training", *(as_flag(*each) for each in rest.items())]
    if flags.up_to and machine.hosts:
        raise ValueError(
            f"--up_to {flags.up_to} needs nodes that are alike, and the hosts of {flags.cluster} differ: omit it"
        )
    if flags.html:
        draw.refuse(str(flags.html), "--html ")
    return PlanRequest(job, machine, fixed, flags.number, words, " ".join(train), [*file], flags.up_to, flags.html)


def train_settings(flags: argparse.Namespace, settings: Settings, file: Container[str]) -> dict[str, Any]:
    """Return the settings of train.py that the plan stands for, unless the file has them: data, vocabulary, device."""
    rest = {name: getattr(flags, name) for name in ("data", "val_data", "tokenizer", "device") if getattr(flags, name)}
    if (
        "device" not in file
        and (flags.accelerator or flags.fabric in BY_FABRIC)
        and not (flags.measure or flags.cluster)
    ):
        rest.setdefault("device", "cuda")
    has_vocabulary = any(name in rest or name in file for name in ("data", "tokenizer", "vocab_size"))
    if not has_vocabulary and settings.vocab_size != presets.PRESETS[presets.DEFAULT].settings["vocab_size"]:
        rest["vocab_size"] = settings.vocab_size
    return rest


def parser(description: str | None) -> argparse.ArgumentParser:
    command = Parser("python -m parallelism.planner", description, allow_abbrev=False)
    command.add_argument("--config", type=config_file, help=f"{config_help()}; flags override it")
    names = "; ".join(f"{name}: {fabric.words}" for name, fabric in FABRICS.items())
    text = f"network; measured: the saved measurements; a FILE.toml as of collectives.bench --links; {names}"
    command.add_argument("--fabric", default="ndr", type=fabric, metavar="NAME", help=f"{text} (default: ndr)")
    by_default = f"by the shape of each product, or {EFFICIENCY} of --tflops and of 32 and 64 bits"
    own, default_us = "by default that of the fabric's devices", 1e6 * LEAST_PASS_S
    for name, kind, default, text in (
        ("number", Range(1, 1000).whole, 10, "number of best meshes to show (default: 10)"),
        ("hosts", RANKS.whole, None, "number of nodes; by default 1, or the measured ones"),
        ("gpus", RANKS.whole, None, "ranks on each node; by default as many as the fabric's nodes have"),
        ("tflops", ranges.TFLOPS.number, None, f"peak TFLOP/s of a rank in matrix products; {own}"),
        ("efficiency", EFFICIENCIES.number, None, f"achieved fraction of the peak; by default {by_default}"),
        ("least_pass", MICROSECONDS.number, None, f"least time of a block's pass in us (default: {default_us:g})"),
        ("memory", GIGABYTES.number, None, f"memory of a rank in GB; {own}"),
        ("spare", SPARES.number, SPARE, f"fraction of memory to spare for what is not counted (default: {SPARE})"),
    ):
        command.add_argument(f"--{name}", type=kind, default=default, help=text)
    text = "plan also for 1, 2, 4, ... up to so many ranks, in nodes like the first one"
    command.add_argument("--up_to", type=ranges.RANKS.whole, metavar="RANKS", help=text)
    text = "page to write: tables and pictures of the layouts, and with --up_to of time and memory by number of ranks"
    command.add_argument("--html", type=Path, metavar="FILE", help=text)
    text = "of a rank, by which its speed and memory are known; by default that of the fabric's nodes"
    command.add_argument("--accelerator", choices=[*ACCELERATORS], help=text)
    command.add_argument("--data", nargs="+", help="training data of the printed command")
    command.add_argument("--val_data", nargs="+", help="validation data of the printed command")
    command.add_argument("--tokenizer", help="tokenizer of the printed command")
    text = "device of the printed command (default: cuda if the plan is for the fabric's devices)"
    command.add_argument("--device", help=text)
    command.add_argument("--hostfile", help="hostfile of the printed command")
    text = "measure this machine's blocks and free memory, or under mpirun those of all ranks, and links"
    command.add_argument("--measure", action="store_true", help=text)
    text = "TOML file of hosts with speed, memory and links; --measure under mpirun writes it"
    command.add_argument("--cluster", type=Path, metavar="FILE", help=text)
    fabrics.add_network_flags(command)
    hints = get_type_hints(Settings)
    for each in fields(Settings):
        add_flag(command, each, hints[each.name])
    return command


def fabric(text: str) -> str:
    if text in FABRICS or text == "measured" or text.endswith(".toml"):
        return text
    raise argparse.ArgumentTypeError(f"{text!r} is not a network: use {', '.join(FABRICS)}, measured, or a FILE.toml")


def machine_of_cluster(flags: argparse.Namespace, cluster: Cluster) -> tuple[Machine, list[str]]:
    """Return the machine of a cluster, and its description; raise ValueError if the hostfile has other hosts."""
    if flags.hostfile:
        try:
            cluster.refuse_other_hosts(Path(flags.hostfile))
        except ValueError as error:
            raise ValueError(f"{flags.cluster}: {error}") from None
    network = fabrics.with_flags(cluster.network or fabrics.topology(flags.fabric, None)[1], flags)
    if flags.least_pass is not None:
        cluster = cluster._replace(least_pass_s=flags.least_pass * 1e-6)
    words = [f"{len(cluster.hosts)} hosts of {flags.cluster}; of each rank, {flags.spare:g} of the memory is spared"]
    for host in cluster.hosts:
        link = f", {host.gbit:.3g} Gbit/s" if host.gbit else ""
        rank = f"{in_unit(host.tflops * 1e12, FLOP_RATES)}, {in_bytes(host.memory * GIGABYTE)}"
        words.append(f"  {host.name}: {host.ranks} x {rank}{link}")
    return cluster.machine(network, flags.spare), words


def nodes_in_words(nodes: Nodes) -> str:
    """Format the nodes' numbers of ranks.

    >>> nodes_in_words(((0, 1), (2, 3))), nodes_in_words(((0, 1), (2,)))
    ('2 x 2', '2 + 1')
    """
    lengths = [len(node) for node in nodes]
    return f"{len(nodes)} x {lengths[0]}" if len({*lengths}) == 1 else " + ".join(map(str, lengths))


def nodes_and_links(flags: argparse.Namespace) -> tuple[Nodes, Network, str]:
    """Return the ranks of each node, the link speeds, and the origin of these."""
    nodes, network, words = fabrics.topology(flags.fabric, None)
    if flags.hosts is None and flags.gpus is None:
        return nodes, fabrics.with_flags(network, flags), words
    hosts, gpus = flags.hosts or len(nodes), flags.gpus or max(map(len, nodes))
    fabrics.refuse_too_many(hosts * gpus, f"--hosts {hosts} x --gpus {gpus}")
    return fabrics.in_nodes(hosts * gpus, gpus), fabrics.with_flags(network, flags), words


def machine_of(flags: argparse.Namespace, job: TrainingJob, nodes: Nodes, network: Network) -> tuple[Machine, str]:
    """Return the machine and its origin; ranks are from flags, measurement or the fabric's devices, in this order."""
    name = flags.accelerator or BY_FABRIC.get(flags.fabric)
    device = ACCELERATORS[name] if name else None
    peak, memory = (device.flops_per_s.get(job.dtype), device.memory_bytes) if device else (None, None)
    efficiency, least_s = EFFICIENCY if flags.efficiency is None else flags.efficiency, LEAST_PASS_S
    if flags.measure and flags.tflops is None and flags.efficiency is not None:
        raise ValueError(f"--efficiency {efficiency:g} has no effect with --measure: omit it, or pass --tflops")
    by_shape = not flags.measure and flags.tflops is None and flags.efficiency is None
    roofline = device.roofline(job.dtype) if device and by_shape else None
    update_s = 0.0
    if flags.measure:
        ranks = import_module("parallelism.planner.ranks")  # the only module here that needs torch
        peak, efficiency, least_s = ranks.flops_per_s(job), 1.0, ranks.least_pass_s(job)
        update_s = ranks.update_s(job)
        memory = ranks.memory_bytes(ranks=len(nodes[0]))
    if flags.tflops is not None:
        peak = flags.tflops * 1e12
    memory = memory if flags.memory is None else flags.memory * 1e9
    least_s = least_s if flags.least_pass is None else flags.least_pass * 1e-6
    if peak is None or memory is None:
        wanted = "pass --accelerator, --tflops and --memory, or --measure"
        raise ValueError(f"--fabric {flags.fabric} has no accelerator: {wanted}")
    rate, usable = peak * efficiency, memory * (1 - flags.spare)
    speed = f"{rate / 1e12:.4g} TFLOP/s, {efficiency:g} of {peak / 1e12:.4g}"
    if roofline:
        speed = f"{name}, {peak / 1e12:.4g} TFLOP/s at most, by the shape of each kernel"
    words = f"a rank: {speed}; {in_bytes(usable)}, as {flags.spare:g} of {in_bytes(memory)} is spared"
    own = Machine(nodes, network, rate, usable, least_s, overlaps=not flags.measure, roofline=roofline)
    return own._replace(update_s=update_s), words


def as_flag(name: str, value: Any) -> str:
    """Format a setting as a flag of train.py.

    >>> as_flag("bias", False), as_flag("config", "my run.toml")
    ('--no-bias', "--config 'my run.toml'")
    """
    if isinstance(value, bool):
        return f"--{'' if value else 'no-'}{name}"
    values = value if isinstance(value, list) else [value]
    return f"--{name} {shlex.join(map(str, values))}"
