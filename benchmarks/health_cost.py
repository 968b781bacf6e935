"""Time what each step of a training run spends on the ranks' health: the exchange of times, and the verdict.

With `--check_interval`, gradients are added exactly, and steps with checks are timed beside the others.

COLLECTIVES_LINKS=0 mpirun -n 2 python benchmarks/health_cost.py --output health-cost.json
COLLECTIVES_LINKS=0 mpirun -n 2 python benchmarks/health_cost.py --check_interval 5 --output check-cost.json
"""

from __future__ import annotations

import argparse
import time
from contextlib import closing

import numpy as np
import torch
from helpers.result_files import table, write
from helpers.training_flags import training_parser

import collectives
from collectives.job.settings import positive
from training.loop import step
from training.parallel.run import TrainingRun
from training.settings.config import Config


def measure(config: Config, steps: int, comm: collectives.Communicator) -> dict[str, float]:
    """Return medians and the 95th percentile of this rank's milliseconds.  Collective."""
    whole_s, health_s = [], []
    with TrainingRun(config, comm) as run, closing(run.inputs()) as inputs:
        assert run.health
        own = run.health.add

        def add(*arguments) -> None:
            begin_s = time.perf_counter()
            own(*arguments)
            health_s.append(time.perf_counter() - begin_s)

        run.health.add = add  # type: ignore[method-assign]
        for number, batches in zip(range(1, 31 + steps), inputs, strict=False):
            begin_s = time.perf_counter()
            step(run, number, batches).metrics()
            whole_s.append(time.perf_counter() - begin_s)
    whole, health = 1e3 * np.array(whole_s[30:]), 1e3 * np.array(health_s[30:])
    if config.check_interval:
        checked = (np.arange(31, 31 + steps) % config.check_interval) == 0
        more_ms = float(np.median(whole[checked]) - np.median(whole[~checked]))
        return {
            "step_ms": float(np.median(whole[~checked])),
            "checked_step_ms": float(np.median(whole[checked])),
            "fraction_each_100_steps": more_ms / 100 / float(np.median(whole[~checked])),
        }
    return {
        "step_ms": float(np.median(whole)),
        "health_mean_ms": float(health.mean()),
        "health_median_ms": float(np.median(health)),
        "health_95_ms": float(np.percentile(health, 95)),
        "fraction": float(health.sum() / whole.sum()),
    }


def parse() -> argparse.Namespace:
    parser = training_parser(__doc__)
    parser.add_argument("--steps", type=positive, default=200)
    parser.add_argument("--num_micro_batches", type=positive, default=1, help="of a rank in a step")
    parser.add_argument("--check_interval", type=positive, help="steps between checks for wrong numbers")
    return parser.parse_args()


def main() -> None:
    torch.set_num_threads(1)
    comm = collectives.world()
    with comm.agreed("health"):
        args = parse()
    names = "model", "block_size", "micro_batch_size", "num_micro_batches"
    shape = {name: getattr(args, name) for name in names}
    if args.check_interval:
        shape |= {"reproducible": True, "check_interval": args.check_interval}
    results = comm.gather_object(measure(Config(**shape, warmup_iters=0, out_dir=""), args.steps, comm))
    if comm.rank == 0:
        rows = [[rank, *(f"{value:.4f}" for value in row.values())] for rank, row in enumerate(results)]
        print(table(["rank", *(name.replace("_ms", ", ms") for name in results[0])], rows))
        if args.output:
            write(args.output, results, **vars(args))


if __name__ == "__main__":
    main()
