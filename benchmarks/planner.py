"""Compare the planner's predictions of memory and time with steps of train.py, for layouts of 2, 4 or 8 ranks.

    mpirun -n 4 python benchmarks/planner.py --output planner.json
    python -m mpi_tests.rig run --hosts 4 --slots 1 --rate 1gbit --cpu 1,1,0.5,0.25 -- python benchmarks/planner.py \\
        --micro_batch_size 1 --layouts "dp 4" "dp 2, pp 2" "pp 4"

Before each layout, the hosts' links and the speed of their ranks, while all compute at once, are measured.  Memory is
the largest increase on any rank during some steps, relative to the time before the run was set up, with a rank's part
of shared memory; it includes data and libraries' memory.  Time is the median step of the slowest rank, in other steps:
to return memory at once, so that it can be counted, takes time.  For both, the rank correlation of predicted and
measured values is printed: 1 if the order of the layouts is the same.  Linux with glibc only.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import NamedTuple

import numpy as np
import torch
from helpers.result_files import output, table, write
from memory import LIBC, M_MMAP_THRESHOLD, MIB, process_mib, settled_mib, shared_by_others_mib
from peers import MPI

import collectives
from collectives.job.progress_bar import progress_bar
from collectives.job.settings import Parser, positive
from parallelism.pipeline.stage import Batch
from parallelism.planner import ParallelLayout, PlannedLayout, TrainingJob, best
from parallelism.planner.place import SPARE
from parallelism.planner.presets import shape_of
from parallelism.planner.ranks import measured_cluster
from training.data.tokens import load_tokens
from training.loop import step
from training.parallel.run import TrainingRun
from training.settings.config import Config

LAYOUTS = {
    "dp 2": ParallelLayout(dp=2),
    "tp 2": ParallelLayout(tp=2),
    "sp 2": ParallelLayout(sp=2),
    "pp 2": ParallelLayout(pp=2),
    "dp 2, zero 3": ParallelLayout(dp=2, zero_stage=3),
    "dp 2, Llama": ParallelLayout(dp=2),
    "tp 2, Llama": ParallelLayout(tp=2),
    "dp 2, ep 2, 8 experts": ParallelLayout(dp=2, ep=2),
    "dp 4": ParallelLayout(dp=4),
    "dp 4, zero 1": ParallelLayout(dp=4, zero_stage=1),
    "dp 4, zero 2": ParallelLayout(dp=4, zero_stage=2),
    "dp 4, zero 3": ParallelLayout(dp=4, zero_stage=3),
    "dp 4, recomputed": ParallelLayout(dp=4, recompute="full"),
    "dp 2, tp 2": ParallelLayout(dp=2, tp=2),
    "dp 2, sp 2": ParallelLayout(dp=2, sp=2),
    "dp 2, pp 2": ParallelLayout(dp=2, pp=2),
    "tp 4": ParallelLayout(tp=4),
    "pp 4": ParallelLayout(pp=4),
    "tp 2, pp 2": ParallelLayout(tp=2, pp=2),
    "dp 4, 8 experts": ParallelLayout(dp=4),
    "dp 4, ep 2, 8 experts": ParallelLayout(dp=4, ep=2),
    "dp 4, ep 4, 8 experts": ParallelLayout(dp=4, ep=4),
    "dp 4, ep 2, zero 1, 8 experts": ParallelLayout(dp=4, ep=2, zero_stage=1),
    "dp 4, Llama": ParallelLayout(dp=4),
    "dp 2, pp 2, Llama": ParallelLayout(dp=2, pp=2),
    "dp 8": ParallelLayout(dp=8),
    "dp 8, zero 3": ParallelLayout(dp=8, zero_stage=3),
    "dp 4, pp 2": ParallelLayout(dp=4, pp=2),
    "dp 2, tp 2, pp 2": ParallelLayout(dp=2, tp=2, pp=2),
    "pp 8": ParallelLayout(pp=8),
    "dp 8, Llama": ParallelLayout(dp=8),
    "dp 8, ep 4, 8 experts": ParallelLayout(dp=8, ep=4),
}
SETTINGS = {
    "8 experts": {"num_experts": 8, "experts_per_token": 2},
    "Llama": {"model": "llama-tiny"},
}  # by a name's end
WARMUPS = 2  # steps
M_TRIM_THRESHOLD, MOST_MMAP_THRESHOLD = -1, 32 << 20  # of glibc, the latter by default, which it reaches by itself


class Figures(NamedTuple):
    """MiB per rank, and milliseconds per step."""

    predicted_mib: float
    measured_mib: float
    predicted_ms: float
    measured_ms: float

    def ratios(self) -> dict[str, float]:
        return {
            "predicted_to_measured_mib": self.predicted_mib / self.measured_mib,
            "predicted_to_measured_ms": self.predicted_ms / self.measured_ms,
        }


def with_batch_size(layout: ParallelLayout, samples: int, size: int | None) -> ParallelLayout:
    """Return the layout with micro-batches of `size`; by default of all samples, or in a pipeline of one."""
    own = samples // layout.dp
    size = size or (own if layout.pp == 1 else 1)
    return layout._replace(micro_batch_size=size, num_micro_batches=own // size)


def plan_layout(name: str, config: Config, args: argparse.Namespace, comm: collectives.Communicator) -> PlannedLayout:
    """Measure the ranks, and plan the only layout with all values that a name stands for.  Collective."""
    job = TrainingJob(shape_of(config, load_tokens(config.data).vocab_size), args.samples)
    cluster = measured_cluster(comm, job)
    with comm.agreed("planner"):
        assert cluster.network
        target = cluster.machine(cluster.network, SPARE)._replace(memory_bytes=float("inf"))
        return best(job, target, with_batch_size(LAYOUTS[name], args.samples, args.micro_batch_size)._asdict())


def ranks_of(layout: ParallelLayout) -> int:
    return layout.dp * layout.pp * layout.sp * layout.tp


def config_for(name: str, shape: Mapping[str, int]) -> Config:
    """Return the settings of the model that a layout's name ends with."""
    return Config(out_dir="", **shape, **SETTINGS.get(name.split(", ")[-1], {}))


def config_of(plan: PlannedLayout, config: Config) -> Config:
    """Return a run's settings for a plan."""
    config = replace(config, reproducible=bool(plan.numbers), balance_load=bool(plan.numbers), **plan.layout._asdict())
    return replace(config, balance="measured" if plan.layers else config.balance)


def measure(
    config: Config, world: collectives.Communicator, num_steps: int, numbers: Sequence[int] = ()
) -> tuple[float, float]:
    """Return the largest rank's MiB, and the slowest rank's median seconds.  Collective.

    Replicas have these numbers of micro-batches from the beginning.
    """
    MPI.COMM_WORLD.Barrier()
    before = settled_mib() - shared_by_others_mib()
    run = TrainingRun(config, world.split(0))  # a communicator with separate memory
    if numbers and run.health:
        run.health.better_numbers = lambda: [*numbers]  # type: ignore[method-assign]
        run.balance_load()
    settled_mib()
    steps_s = [step_s(run, *each) for each in enumerate(islice(run.inputs(), WARMUPS + num_steps), 1)]
    MPI.COMM_WORLD.Barrier()
    grown = process_mib("VmHWM") - shared_by_others_mib() - before
    return MPI.COMM_WORLD.allreduce(grown, MPI.MAX), float(np.median(steps_s[WARMUPS:]))


def step_s(run: TrainingRun, iteration: int, batches: list[Batch]) -> float:
    """Return the slowest rank's seconds."""
    MPI.COMM_WORLD.Barrier()
    begin = time.perf_counter()
    step(run, iteration, batches)
    return MPI.COMM_WORLD.allreduce(time.perf_counter() - begin, MPI.MAX)


def correlation(predicted: list[float], measured: list[float]) -> float:
    """Return Spearman's correlation of values without ties."""
    orders = [np.argsort(np.argsort(values)) for values in (predicted, measured)]
    return float(np.corrcoef(orders)[0, 1])


def parse(size: int) -> argparse.Namespace:
    """Parse the flags; raise ValueError for invalid ones."""
    parser = Parser(description=__doc__.splitlines()[0])
    own = [name for name, layout in LAYOUTS.items() if ranks_of(layout) == size]
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=own)
    parser.add_argument("--n_layer", type=positive, default=8)
    parser.add_argument("--n_head", type=positive, default=8)
    parser.add_argument("--n_embd", type=positive, default=256)
    parser.add_argument("--block_size", type=positive, default=128, help="tokens a sample")
    parser.add_argument("--samples", type=positive, default=8, help="of a step, on all ranks together")
    parser.add_argument("--micro_batch_size", type=positive, help="by default all of a replica's, or 1 in a pipeline")
    parser.add_argument("--steps", type=positive, default=7)
    parser.add_argument("--output", type=output, help="write the numbers as JSON")
    args = parser.parse_args()
    numbers = {ranks_of(LAYOUTS[name]) for name in args.layouts or LAYOUTS}
    if numbers != {size}:
        number = min(numbers - {size})
        raise ValueError(f"the layouts are of {number} ranks, not {size}: start as many, as with mpirun -n {number}")
    if len(set(args.layouts)) < 2:
        raise ValueError(f"--layouts {args.layouts[0]} alone has no order: name two or more")
    if args.samples % size:
        raise ValueError(f"--samples {args.samples} is not divisible by {size} ranks: use a multiple")
    return args


def main() -> None:
    torch.set_num_threads(1)
    comm = collectives.world()
    with comm.agreed("planner"):
        args = parse(comm.size)
        shape = {name: getattr(args, name) for name in ("n_layer", "n_head", "n_embd", "block_size")}
        plain = Config(out_dir="", **shape)
        configs = {name: config_for(name, shape) for name in args.layouts}
    LIBC.mallopt(M_MMAP_THRESHOLD, 1 << 16)  # return freed memory immediately
    # Exclude the memory of loading and compiling.
    for recompute in ("none", "full"):  # torch loads Dynamo when it first recomputes
        measure(replace(plain, recompute=recompute), comm, 1)
    measure(replace(plain, pp=comm.size, num_micro_batches=comm.size, micro_batch_size=1, balance="measured"), comm, 1)
    usage_mib, figures = {}, {}
    for name in progress_bar(args.layouts, "layout", comm.rank):
        plan = plan_layout(name, configs[name], args, comm)
        usage_mib[name] = measure(config_of(plan, configs[name]), comm, args.steps, plan.numbers)[0]
    LIBC.mallopt(M_MMAP_THRESHOLD, MOST_MMAP_THRESHOLD)
    LIBC.mallopt(M_TRIM_THRESHOLD, 2 * MOST_MMAP_THRESHOLD)
    for name in progress_bar(args.layouts, "layout", comm.rank):
        plan = plan_layout(name, configs[name], args, comm)
        _, seconds = measure(config_of(plan, configs[name]), comm, args.steps, plan.numbers)
        figures[name] = Figures(plan.memory.total / MIB, usage_mib[name], 1e3 * plan.time.total, 1e3 * seconds)
    if comm.rank == 0:
        report(args, figures)
    comm.barrier()


def report(args: argparse.Namespace, figures: dict[str, Figures]) -> None:
    rows = [[name, *(f"{x:.1f}" for x in f), *(f"{x:.2f}" for x in f.ratios().values())] for name, f in figures.items()]
    titles = ["", "predicted, MiB", "measured", "predicted, ms", "measured", "MiB / MiB", "ms / ms"]
    print(table(titles, rows))
    columns = dict(zip(Figures._fields, map(list, zip(*figures.values(), strict=True)), strict=True))
    correlations = {
        unit: correlation(columns[f"predicted_{unit}"], columns[f"measured_{unit}"]) for unit in ("mib", "ms")
    }
    print(f"rank correlation: memory {correlations['mib']:.2f}, time {correlations['ms']:.2f}")
    if args.output:
        results = {
            "layouts": {name: f._asdict() | f.ratios() for name, f in figures.items()},
            "correlation": correlations,
        }
        write(args.output, results, **vars(args))


if __name__ == "__main__":
    main()
