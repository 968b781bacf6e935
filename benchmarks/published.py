"""Compare the planner's predictions with published training runs (published.toml).  Neither MPI nor torch is needed.

    python benchmarks/published.py
    python benchmarks/published.py --rows

Constants of the planner may be chosen on half of each source's rows, drawn by a seed, which `--rows` prints; the other
half is only for this report.  For each half of a source it prints the median and the largest error of a step's time,
by what fraction the prediction is off, and the fraction of pairs of rows that are in the published order.  Memory is
right where it is at most the device's, less what is spared, if the run fitted, and more if it was out of memory.
"""

from __future__ import annotations

import random
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from statistics import mean, median
from typing import Any, NamedTuple

from helpers.result_files import output, write

from collectives.job.settings import Parser
from collectives.schedule.fabrics import in_nodes
from collectives.schedule.network import Link, Network
from models.config import ModelConfig
from parallelism.planner import counts
from parallelism.planner.accelerators import AMPERE, HOPPER, Accelerator
from parallelism.planner.division import divisions
from parallelism.planner.layout import ParallelLayout, TrainingJob, check_layout, check_mesh
from parallelism.planner.memory import ModelShard, memory, model_shards
from parallelism.planner.place import SPARE, Machine, RankPlacement
from parallelism.planner.shape import KernelKinds, ModelShape, kv_width, q_width
from parallelism.planner.step import StepModel

FILE = Path(__file__).with_name("published.toml")
SEED = 2026
IN_NODE = 8  # devices of a node, of all sources
HOP_S, NETWORK_S = 3.4e-6, 9.6e-6  # as of fabrics of collectives.schedule.fabrics
FRACTIONS = {"ampere": AMPERE, "hopper": HOPPER}
# Others' recomputation, by the mean of these of ours: of attention's core, of every other block, and of all of a block
# but the results that `with_results` adds.
RECOMPUTE = {"attention": ("none",), "alternate": ("none", "full"), "operators": ("none",)}
STORED = {**RECOMPUTE, "operators": ("full",)}  # of memory


class Run(NamedTuple):
    """A published run: what it states, and the seconds of a step, 0 if none; `seen` if constants were chosen on it."""

    source: str
    values: Mapping[str, Any]
    model: ModelShape
    device: Mapping[str, Any]
    seconds: float
    seen: bool

    @property
    def layout(self) -> ParallelLayout:
        values = {name: self.values[name] for name in ParallelLayout._fields if name in self.values}
        if values.get("tp", 1) == 1:
            values["sequence_parallel"] = False
        values["recompute"] = "none"
        own = ParallelLayout(**values)
        dp = self.values["devices"] // (own.pp * own.sp * own.tp)
        number = self.batch // (dp * own.micro_batch_size)
        many = own.virtual_stages > 1
        return own._replace(dp=dp, num_micro_batches=number, schedule="interleaved" if many else "1f1b")

    @property
    def batch(self) -> int:
        values = self.values
        if "global_batch_size" in values:
            return values["global_batch_size"]
        ranks = values["devices"] // (values.get("tp", 1) * values.get("pp", 1) * values.get("sp", 1))
        return values["micro_batch_size"] * values["num_micro_batches"] * ranks

    @property
    def machine(self) -> Machine:
        device = self.device
        network = Network(
            within=Link(HOP_S, 1e-9 / device["within_gb_per_s"]),
            between=Link(NETWORK_S, 1e-9 / device["between_gb_per_s"]),
            nic=Link(0.0, 1e-9 / device["between_gb_per_s"] / IN_NODE),
            gamma_s_per_byte=3e-12 / device["memory_tb_per_s"],
            copy_s_per_byte=2e-12 / device["memory_tb_per_s"],
            meet_s=HOP_S,
        )
        nodes = in_nodes(self.values["devices"], IN_NODE)
        peaks, usable = {"bfloat16": device["tflops"] * 1e12}, device["memory_gb"] * 1e9 * (1 - SPARE)
        own = Accelerator(peaks, usable, device["memory_tb_per_s"] * 1e12, FRACTIONS[device["chip"]])
        roofline = own.roofline("bfloat16", self.values["attention"])
        assert roofline is not None
        roofline = roofline._replace(products=device.get("products", roofline.products))
        return Machine(nodes, network, roofline.flops_per_s, usable, roofline=roofline)

    @property
    def job(self) -> TrainingJob:
        values = self.values
        kernels = KernelKinds(
            values["attention"] != "unfused", values.get("compiled", False), values.get("fused_loss", False)
        )
        rest = {name: values[name] for name in ("balance", "grad_dtype") if name in values}
        return TrainingJob(self.model, self.batch, values["dtype"], master_weights=True, kernels=kernels, **rest)

    def by_recomputation(self, modes: Mapping[str, tuple[str, ...]]) -> list[ParallelLayout]:
        recompute = self.values["recompute"]
        return [self.layout._replace(recompute=mode) for mode in modes.get(recompute, (recompute,))]

    def predicted(self) -> tuple[float, float]:
        """Return the seconds of a step, and the memory as a fraction of the device's."""
        check_mesh(self.job, self.layout)
        check_layout(self.job, self.layout)
        return mean(map(self.step_s, self.by_recomputation(RECOMPUTE))), self.memory_fraction()

    def step_s(self, layout: ParallelLayout) -> float:
        placement = RankPlacement(layout, self.machine, self.job.head_ranks(layout.sp))
        division = next(divisions(self.job, layout, placement, False))
        return StepModel(division.of(layout), division.setting.stage_costs()).time().total

    def memory_fraction(self) -> float:
        """Return the memory of the fullest device as a fraction of its own."""
        return mean(map(self.stored_bytes, self.by_recomputation(STORED))) / self.machine.memory_bytes

    def stored_bytes(self, layout: ParallelLayout) -> float:
        """Return the bytes of the fullest device.

        Recomputed scores are not kept.  FSDP's shards of parameters are the master weights.  NCCL needs no buffers that
        grow with the gradients.
        """
        job, layout = self.job, layout._replace(zero_stage=self.values.get("stored_as", layout.zero_stage))
        if self.values["recompute"] != "none":
            job = job._replace(kernels=job.kernels._replace(fused_attention=True))
        shards = model_shards(job, layout)
        if self.values["recompute"] == "operators":
            shards = [with_results(job, layout, shard) for shard in shards]
        logits_bytes = self.values.get("logit_bytes", 0) * counts.tokens(job, layout) * self.model.vocab_size
        shards[-1] = shards[-1]._replace(working=max(shards[-1].working, logits_bytes))
        usage = memory(job, layout, shards, layout.dp * layout.sp)
        return usage.total - usage.parameters * (layout.zero_stage == 3)


def with_results(job: TrainingJob, layout: ParallelLayout, shard: ModelShard) -> ModelShard:
    """Add the results that blocks keep beside their inputs where torchtitan recomputes by operator.

    These are attention's, with a number for each head and token, and those of every other product: q, v, the gate, and
    the last one's unless it is compiled.  With tp, the sum of attention's projection over the ranks is kept, too.

    Source: pytorch/torchtitan at 9dec370, torchtitan/parallelisms/parallelize_llama.py, _apply_ac_to_transformer_block.
    """
    assert layout.pp == 1, layout
    model, tokens = job.model, counts.tokens(job, layout)
    split = tokens / layout.tp * (2 * q_width(model) + kv_width(model) + model.hidden_width)
    whole = model.n_embd * (tokens * (not job.kernels.compiled) + tokens / layout.tp * (layout.tp > 1))
    each = (split + whole) * job.precision.activation + 4 * tokens / layout.tp * model.n_head
    return shard._replace(activations=shard.activations + model.n_layer * each)


def runs() -> Iterator[Run]:
    """Yield the rows of the file."""
    table = tomllib.loads(FILE.read_text(encoding="utf-8"))
    draws = random.Random(SEED)
    for source in table["sources"]:
        number = len(source["rows"])
        seen = draws.sample(range(number), number // 2)
        for index, row in enumerate(source["rows"]):
            stated = dict(zip(source["columns"], row, strict=True))
            values = {**source["assumed"], **source["common"], **stated}
            model = shape(table["models"][values["model"]], values["block_size"])
            device = table["devices"][values["device"]]
            run = Run(source["name"], values, model, device, 0.0, index in seen)
            yield run._replace(seconds=published_s(run))


def shape(values: Mapping[str, Any], block_size: int) -> ModelShape:
    """Return the shape of a model of the file."""
    sizes = {name: value for name, value in values.items() if name != "kind"}
    if values["kind"] == "llama":
        kinds = {
            "has_rms_norms": True,
            "embeds_positions": False,
            "is_gated": True,
            "activation": "silu",
            "tied": False,
        }
    else:
        kinds = {"bias": True}
    return ModelShape.of(ModelConfig(block_size=block_size, **kinds | sizes))


def published_s(run: Run) -> float:
    """Return the seconds of a step, by whichever of the three a source states; 0 where it states none."""
    values, model = run.values, run.model
    if "seconds" in values:
        return values["seconds"]
    tokens = run.batch * model.block_size
    if "tokens_per_s" in values:
        return tokens / values["tokens_per_s"] / values["devices"]
    return tokens * FORMULAS[values["counts"]](model) / (values["tflops"] * 1e12 * values["devices"])


def megatron_flops(model: ModelShape) -> float:
    """Return a token's operations with full recomputation.  Source: that of Megatron-LM, 2021, equation 3."""
    layers, width = model.n_layer, model.n_embd
    return 96 * layers * width**2 * (1 + model.block_size / (6 * width) + model.vocab_size / (16 * layers * width))


def causal_flops(model: ModelShape) -> float:
    """Return a token's operations without recomputation, half of attention's: 6 for a parameter in matrix products."""
    width, kv_width = model.n_embd, model.head_size * model.num_kv_heads
    block = 2 * width * (width + kv_width) + 3 * width * model.hidden_width
    return 6 * (model.n_layer * block + width * model.vocab_size) + 6 * model.n_layer * width * model.block_size


FORMULAS = {"megatron": megatron_flops, "causal": causal_flops}


class Result(NamedTuple):
    """A run, and the planner's prediction of it."""

    run: Run
    seconds: float
    memory: float

    @property
    def error(self) -> float:
        """The prediction's relative difference from the time that was published."""
        return self.seconds / self.run.seconds - 1

    @property
    def fits_rightly(self) -> bool:
        return (self.memory <= 1) == self.run.values.get("fits", True)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = Parser("python benchmarks/published.py", __doc__)
    parser.add_argument("--rows", action="store_true", help="also print each row on which constants may be chosen")
    parser.add_argument("--output", type=output, help="JSON file for the results")
    flags = parser.parse_args(arguments)
    results = [Result(run, *run.predicted()) for run in runs()]
    print(*report(results), *(line(each) for each in results if flags.rows and each.run.seen), sep="\n")
    if flags.output:
        write(flags.output, [record(result) for result in results])


def report(results: Sequence[Result]) -> Iterator[str]:
    """Yield a line for each half of each source, and of all."""
    yield f"{'source':<28} {'half':<7} {'rows':>4} {'median':>7} {'worst':>7} {'order':>6} {'fits':>7}"
    for name in [*dict.fromkeys(result.run.source for result in results), "all"]:
        for half in (True, False):
            own = [each for each in results if each.run.seen == half and name in (each.run.source, "all")]
            timed = [each for each in own if each.run.seconds]
            errors = [abs(each.error) for each in timed]
            right = sum(each.fits_rightly for each in own)
            figures = f"{median(errors):>7.1%} {max(errors):>7.1%} {order(timed):>6.0%}" if timed else f"{'':>22}"
            yield f"{name:<28} {'seen' if half else 'unseen':<7} {len(own):>4} {figures} {right:>3}/{len(own):<3}"


def order(results: Sequence[Result]) -> float:
    """Return the fraction of pairs of a source's rows, by a device's speed, that are in the published order."""
    pairs = [pair for pair in combinations(results, 2) if pair[0].run.source == pair[1].run.source]
    right = [(speed(a, a.run.seconds) < speed(b, b.run.seconds)) == (speed(a) < speed(b)) for a, b in pairs]
    return sum(right) / len(right) if right else 1.0


def speed(result: Result, seconds: float = 0.0) -> float:
    """Return the operations of a device in a second, of the model's parameters alone."""
    run = result.run
    params = 12 * run.model.n_layer * run.model.n_embd**2
    return params * run.batch * run.model.block_size / ((seconds or result.seconds) * run.values["devices"])


def line(result: Result) -> str:
    run = result.run
    half = "seen" if run.seen else "unseen"
    time = f"of {run.seconds:>9.3f} s {result.error:>+7.1%}" if run.seconds else f"{'':>22}"
    fits = "" if result.fits_rightly else " fits" if run.values.get("fits", True) else " out of memory"
    memory_words = f"{result.memory:>6.0%}{fits}"
    return (
        f"{run.source:<28} {half:<7} {result.seconds:>9.3f} s {time} {memory_words}  "
        f"{run.values['model']} x{run.values['devices']} {run.layout}"
    )


def record(result: Result) -> dict[str, Any]:
    run = result.run
    names = ("model", "devices", "block_size")
    values = {name: run.values[name] for name in names}
    return {"source": run.source, "seen": run.seen, **values, "layout": str(run.layout)} | {
        "published_s": round(run.seconds, 4),
        "predicted_s": round(result.seconds, 4),
        "memory": round(result.memory, 3),
        "fits": run.values.get("fits", True),
    }


if __name__ == "__main__":
    main(sys.argv[1:])
