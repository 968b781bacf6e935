"""Compare our pipelines with torch.distributed.pipelining over gloo, in one run: same model, stages and schedules.

    mpirun -n 2 python benchmarks/pipeline_parallel.py --output benchmarks/results/pipeline-parallel-openmpi-2.json

A step is a schedule's forward and backward passes of some micro-batches, without an optimizer.  Before anything is
timed, every contestant's loss and gradients are compared with those of the plain model.  In breadth-first, torch runs
the backward passes of the micro-batches in reverse order, at the same cost; otherwise the orders are the same.

There are two models.  The stages of "sleep" send activations of a GPT's size, and sleep, so that few cores can emulate
many ranks; those of "gpt" compute.

A schedule's price is its predicted time with messages of zero time; the times of its actions are measured in each
round, on all ranks at once, on our stages.  The overhead is the step less the price; it is not given for a model that
computes on more ranks than there are cores.  Contestants alternate, round by round; times are medians of the slowest
rank.
"""

import argparse
import math
import os
import time
from collections.abc import Callable
from statistics import median
from typing import Any, NamedTuple

import torch
from helpers.pipeline_models import Gpt, Model, Sleep
from helpers.result_files import output, write
from helpers.torch_pipelines import SCHEDULES
from peers import MPI, start_torch
from pipeline_table import table
from torch import Tensor

import collectives
from collectives.job.progress_bar import progress_bar
from collectives.job.settings import Parser, positive
from models.config import ModelConfig
from parallelism.pipeline.schedule import registry
from parallelism.pipeline.schedule.actions import Schedule
from parallelism.pipeline.schedule.price import Costs, price
from parallelism.pipeline.stage import Batch
from parallelism.step.actions import WEIGHTS

RTOL = 1e-4  # float32 sums differ in order
REHEARSALS = 3  # repetitions of each action, whose median is its time


class Round(NamedTuple):
    """Seconds."""

    price: float
    ours: float
    torch: float


class Match:
    """Our pipeline and torch's, for one model and one schedule."""

    def __init__(self, model: Model, schedule: Schedule):
        self.model, self.schedule = model, schedule
        self.contestants = {"ours": model.ours(schedule), "torch": model.torch(schedule)}
        self.rounds: list[Round] = []

    @property
    def has_price(self) -> bool:
        return not self.model.computes or self.schedule.num_ranks <= len(os.sched_getaffinity(0))

    def check(self) -> None:
        """Compare losses and gradients with the plain model's.

        Raises: SystemExit with the difference.
        """
        expected_loss, expected = self.model.plain(self.schedule.num_stages)
        for name, contestant in self.contestants.items():
            contestant.zero_grad()
            errors = {"the loss": abs(MPI.COMM_WORLD.allreduce(float(contestant.step())) / expected_loss - 1)}
            gradients = contestant.gradients()
            errors |= {f"the gradient of {part}": off(gradient, expected[part]) for part, gradient in gradients.items()}
            worst, what = max(MPI.COMM_WORLD.allgather(max((error, what) for what, error in errors.items())))
            if not worst < RTOL:
                message = f"{name}, {self.schedule.name}: {what} is off by {worst:.1e} of the plain model's"
                raise SystemExit(1 if MPI.COMM_WORLD.rank else message)

    def round(self) -> None:
        price_s = price(self.schedule, self.costs()).span_s
        self.rounds.append(Round(price_s, **{name: step_s(each) for name, each in self.contestants.items()}))

    def costs(self) -> Costs:
        """Measure each stage's actions; whole backward passes count as INPUTS."""
        parts = any(action.kind == WEIGHTS for order in self.schedule.orders for action in order)
        MPI.COMM_WORLD.Barrier()
        stages = self.contestants["ours"].stages
        own = {number: self.action_costs_s(number, stage, parts) for number, stage in stages.items()}
        times = dict(sorted(item for each in MPI.COMM_WORLD.allgather(own) for item in each.items()))
        return Costs(*zip(*times.values(), strict=True))

    def action_costs_s(self, number: int, stage: Any, parts: bool) -> list[float]:
        """Return the seconds of a stage's forward pass, and of its backward pass: in parts, or whole and 0."""
        x = self.model.activation if number else None
        times = [rehearse(stage, x, self.model.batches[0], parts) for _ in range(REHEARSALS)]
        return [median(seconds) for seconds in zip(*times, strict=True)]

    def figures(self) -> dict[str, float | None]:
        """Return the medians over all rounds but the first, in milliseconds."""
        steps = {"ours_ms": self.median_ms(lambda r: r.ours), "torch_ms": self.median_ms(lambda r: r.torch)}
        if not self.has_price:
            return steps | dict.fromkeys(("price_ms", "ours_overhead_ms", "torch_overhead_ms"))
        return steps | {
            "price_ms": self.median_ms(lambda r: r.price),
            "ours_overhead_ms": self.median_ms(lambda r: r.ours - r.price),
            "torch_overhead_ms": self.median_ms(lambda r: r.torch - r.price),
        }

    def median_ms(self, value: Callable[[Round], float]) -> float:
        return 1e3 * median(map(value, self.rounds[1:]))


def off(actual: Tensor, expected: Tensor) -> float:
    return float(((actual - expected).abs().max() / expected.abs().max()).nan_to_num(nan=math.inf))


def rehearse(stage: Any, x: Tensor | None, batch: Batch, parts: bool) -> list[float]:
    begin = time.perf_counter()
    y = stage.forward(0, x, batch)
    forward_s, gradient = time.perf_counter() - begin, torch.ones_like(y)
    if not parts:
        return [forward_s, duration_s(lambda: stage.backward(0, gradient)), 0.0]
    return [
        forward_s,
        duration_s(lambda: stage.backward_inputs(0, gradient)),
        duration_s(lambda: stage.backward_weights(0)),
    ]


def duration_s(act: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    act()
    return time.perf_counter() - begin


def step_s(contestant: Any) -> float:
    """Return the slowest rank's seconds."""
    contestant.zero_grad()
    MPI.COMM_WORLD.Barrier()
    return MPI.COMM_WORLD.allreduce(duration_s(contestant.step), MPI.MAX)


def parse(size: int) -> tuple[argparse.Namespace, list[Schedule]]:
    """Parse the flags; return them and the schedules.

    Raises: ValueError for invalid flags.
    """
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=("sleep", "gpt"), default=("sleep", "gpt"))
    parser.add_argument("--schedules", nargs="+", choices=tuple(SCHEDULES), default=tuple(SCHEDULES))
    parser.add_argument("--num_micro_batches", type=positive, default=8)
    parser.add_argument("--samples", type=positive, default=2, help="sequences of a micro-batch")
    parser.add_argument("--seq", type=positive, default=256, help="tokens of a sequence")
    parser.add_argument("--n_layer", type=positive, default=8)
    parser.add_argument("--n_head", type=positive, default=4)
    parser.add_argument("--n_embd", type=positive, default=256)
    parser.add_argument("--vocab_size", type=positive, default=256)
    parser.add_argument(
        "--forward_ms", type=positive, default=5, help="sleep of a forward pass, half a backward pass's"
    )
    parser.add_argument("--repeats", type=positive, default=15)
    parser.add_argument("--output", type=output, help="write the numbers as JSON")
    args = parser.parse_args()
    if size < 2:
        raise ValueError("1 rank is not a pipeline: start more, as with mpirun -n 2")
    if args.num_micro_batches % size:
        flag = f"--num_micro_batches {args.num_micro_batches}"
        raise ValueError(f"{flag} can't be interleaved by torch on {size} ranks: use a multiple")
    schedules = [registry.make_schedule(name, size, args.num_micro_batches) for name in args.schedules]
    most = max(schedule.num_stages for schedule in schedules)
    if "gpt" in args.models and args.n_layer < most:
        raise ValueError(f"--n_layer {args.n_layer} is too few for {most} stages: use {most} or more")
    return args, schedules


def models(comm: collectives.Communicator, args: argparse.Namespace) -> dict[str, Model]:
    shape = {name: getattr(args, name) for name in ("n_layer", "n_head", "n_embd", "vocab_size")}
    sent = args.samples, args.seq, args.n_embd
    makers = {
        "sleep": lambda: Sleep(comm, args.num_micro_batches, sent, args.forward_ms / 1e3),
        "gpt": lambda: Gpt(comm, args.num_micro_batches, args.samples, ModelConfig(block_size=args.seq, **shape)),
    }
    return {name: makers[name]() for name in args.models}


def main() -> None:
    torch.set_num_threads(1)
    comm = collectives.world()
    with comm.agreed("pipeline_parallel"):
        args, schedules = parse(comm.size)
    start_torch(MPI.COMM_WORLD, "gloo", alone=True)
    pairs = models(comm, args).items()
    matches = {f"{name}, {schedule.name}": Match(model, schedule) for name, model in pairs for schedule in schedules}
    for match in matches.values():
        match.check()
    for _ in progress_bar(range(args.repeats + 1), "round", comm.rank):
        for match in matches.values():
            match.round()
    if comm.rank == 0:
        figures = {name: match.figures() for name, match in matches.items()}
        print("\n".join(table(comm.size, figures)))
        if args.output:
            write(args.output, figures, **vars(args))
    comm.barrier()


if __name__ == "__main__":
    main()
