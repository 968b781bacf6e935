"""Time what each step of a training run spends on the ranks' health: the exchange of times, and the verdict.

COLLECTIVES_LINKS=0 mpirun -n 2 python benchmarks/health_cost.py --output health-cost.json
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
    return parser.parse_args()


def main() -> None:
    torch.set_num_threads(1)
    comm = collectives.world()
    with comm.agreed("health"):
        args = parse()
    shape = {"model": args.model, "block_size": args.block_size, "micro_batch_size": args.micro_batch_size}
    results = comm.gather_object(measure(Config(**shape, warmup_iters=0, out_dir=""), args.steps, comm))
    if comm.rank == 0:
        rows = [[rank, *(f"{value:.4f}" for value in row.values())] for rank, row in enumerate(results)]
        print(table(["rank", *(name.replace("_ms", ", ms") for name in results[0])], rows))
        if args.output:
            write(args.output, results, **vars(args))


if __name__ == "__main__":
    main()
