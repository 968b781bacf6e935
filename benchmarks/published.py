"""Compare the planner's predictions with published training runs (published.toml).  Neither MPI nor torch is needed.

    python benchmarks/published.py
    python benchmarks/published.py --rows

Constants of the planner may be chosen on half of each source's rows, drawn by a seed, which `--rows` prints; the other
half is only for this report.  For each half of a source it prints the median and the largest error of a step's time,
by what fraction the prediction is off, and the fraction of pairs of rows that are in the published order.  Memory is
right where it is at most the device's, as the runs fitted.
"""

from __future__ import annotations

import random
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from helpers.result_files import output, write

from collectives.job.settings import Parser
from collectives.schedule.fabrics import in_nodes
from collectives.schedule.network import Link, Network
from models.config import ModelConfig
from parallelism.planner.accelerators import AMPERE, HOPPER, Accelerator
from parallelism.planner.division import divisions
from parallelism.planner.layout import ParallelLayout, TrainingJob, check_layout, check_mesh
from parallelism.planner.place import SPARE, Machine, RankPlacement
from parallelism.planner.search import variants
from parallelism.planner.shape import KernelKinds, ModelShape
from parallelism.planner.step import StepModel

FILE = Path(__file__).with_name("published.toml")
SEED = 2026
IN_NODE = 8  # devices of a node, of all sources
HOP_S, NETWORK_S = 3.4e-6, 9.6e-6  # as of fabrics of collectives.schedule.fabrics
FRACTIONS = {"ampere": AMPERE, "hopper": HOPPER}
RECOMPUTE = {"attention": ("none",), "alternate": ("none", "full")}  # by the mean of these of ours


class Run(NamedTuple):
    """A published run: what it states, and the seconds of a step; `seen` if constants were chosen on it."""

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
        return TrainingJob(self.model, self.batch, values["dtype"], master_weights=True, kernels=kernels)

    def predicted(self) -> tuple[float, float]:
        """Return the seconds of a step, and the memory as a fraction of the device's."""
        recompute = self.values["recompute"]
        layouts = [self.layout._replace(recompute=mode) for mode in RECOMPUTE.get(recompute, (recompute,))]
        seconds, memory = zip(*map(self.predict, layouts), strict=True)
        return sum(seconds) / len(layouts), sum(memory) / len(layouts)

    def predict(self, layout: ParallelLayout) -> tuple[float, float]:
        job, machine = self.job, self.machine
        check_mesh(job, layout)
        check_layout(job, layout)
        placement = RankPlacement(layout, machine, job.head_ranks(layout.sp))
        division = next(divisions(job, layout, placement, False))
        keeps = job._replace(kernels=job.kernels._replace(fused_attention=True))
        keeping = division if self.values["recompute"] == "none" else next(divisions(keeps, layout, placement, False))
        plain, fixed = layout._replace(zero_stage=0), {"zero_stage": layout.zero_stage, "zero_group": "all"}
        full, memory = next(variants(keeping, plain, fixed))  # recomputed scores are not kept
        return StepModel(division.of(full), division.setting.stage_costs()).time().total, memory.total / memory.limit


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
    return ModelShape.of(ModelConfig(block_size=block_size, **kinds, **sizes))


def published_s(run: Run) -> float:
    """Return the seconds of a step, by whichever of the three a source states."""
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
        """The prediction's relative difference from what was published."""
        return self.seconds / self.run.seconds - 1


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
            errors = [abs(each.error) for each in own]
            fits = sum(each.memory <= 1 for each in own)
            figures = f"{median(errors):>7.1%} {max(errors):>7.1%} {order(own):>6.0%} {fits:>3}/{len(own):<3}"
            yield f"{name:<28} {'seen' if half else 'unseen':<7} {len(own):>4} {figures}"


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
    return (
        f"{run.source:<28} {half:<7} {result.seconds:>9.3f} s of {run.seconds:>9.3f} s {result.error:>+7.1%} "
        f"{result.memory:>6.0%}  {run.values['model']} x{run.values['devices']} {run.layout}"
    )


def record(result: Result) -> dict[str, Any]:
    run = result.run
    names = ("model", "devices", "block_size")
    values = {name: run.values[name] for name in names}
    return {"source": run.source, "seen": run.seen, **values, "layout": str(run.layout)} | {
        "published_s": round(run.seconds, 4),
        "predicted_s": round(result.seconds, 4),
        "memory": round(result.memory, 3),
    }


if __name__ == "__main__":
    main(sys.argv[1:])
