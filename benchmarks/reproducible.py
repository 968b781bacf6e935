"""Compare training steps with --reproducible with ordinary ones, in several layouts, in one run.

    COLLECTIVES_LINKS=0 mpirun -n 2 python benchmarks/reproducible.py --output reproducible.json

Both runs of a layout exist at the same time, and alternate in turns of several steps, the first of which, with cold
caches, do not count.  The ratio is the median over turns of the reproducible run's median step to the other's, of the
slowest rank.  "bytes" is a rank's memory for gradients, per parameter of the model.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from helpers.result_files import table, write
from helpers.training_flags import training_parser

import collectives
from collectives.job.progress_bar import progress_bar
from collectives.job.settings import positive
from training.loop import step
from training.parallel.run import TrainingRun
from training.settings.config import Config

WARM_UP, STEPS = 1, 4  # steps per turn


def layouts(size: int, num_tiles: int) -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Yield the name of each layout, its settings, and those of the reproducible run alone."""
    yield f"dp {size}", {}, {}
    for stage in (1, 2, 3):
        yield f"dp {size}, ZeRO {stage}", {"zero_stage": stage}, {}
    yield f"pp {size}", {"pp": size}, {}
    if size == 4:
        yield "dp 2, pp 2, ZeRO 1", {"pp": 2, "zero_stage": 1}, {}
    yield f"tp {size}", {"tp": size}, {"tiles": num_tiles}
    yield f"sp {size}", {"sp": size}, {"sequence_parts": 2 * size}


def steps_of(config: Config, comm: collectives.Communicator, resources: ExitStack) -> tuple[Callable[[], float], float]:
    """Return a function that runs a step and returns the slowest rank's seconds, and the bytes of gradients."""
    run = resources.enter_context(TrainingRun(config, comm))
    inputs = enumerate(resources.enter_context(closing(run.inputs())), 1)

    def timed() -> float:
        comm.barrier()
        begin_s = time.perf_counter()
        step(run, *next(inputs)).metrics()
        return comm.all_reduce(np.array([time.perf_counter() - begin_s]), op="max")[0]

    return timed, run.replica.arrays[1].nbytes / run.num_params


def compare(ordinary: Config, exact: Config, turns: int, comm: collectives.Communicator) -> dict[str, float]:
    """Return both runs' medians, their ratio, and both runs' bytes.  Collective."""
    with ExitStack() as resources:
        (plain, plain_bytes), (reproducible, exact_bytes) = (
            steps_of(config, comm, resources) for config in (ordinary, exact)
        )
        times_s: list[tuple[float, float]] = []
        for _ in range(turns + 1):
            turn = [[way() for _ in range(WARM_UP + STEPS)][WARM_UP:] for way in (plain, reproducible)]
            times_s.append((statistics.median(turn[0]), statistics.median(turn[1])))
        pairs = times_s[1:]
    return {
        "ordinary_ms": statistics.median(first for first, _ in pairs) * 1e3,
        "reproducible_ms": statistics.median(second for _, second in pairs) * 1e3,
        "ratio": statistics.median(second / first for first, second in pairs),
        "ordinary_bytes": plain_bytes,
        "reproducible_bytes": exact_bytes,
    }


def parse() -> argparse.Namespace:
    parser = training_parser(__doc__)
    parser.add_argument("--num_micro_batches", type=positive, default=4, help="of a step, over all ranks")
    parser.add_argument("--tiles", type=positive, default=4, help="of sums that tp splits")
    parser.add_argument("--turns", type=positive, default=7)
    return parser.parse_args()


def main() -> None:
    torch.set_num_threads(1)
    comm = collectives.world()
    with comm.agreed("reproducible"):
        args = parse()
    base = Config(
        model=args.model,
        block_size=args.block_size,
        vocab_size=50304 if args.model == "gpt2" else None,
        micro_batch_size=args.micro_batch_size,
        global_batch_size=args.num_micro_batches * args.micro_batch_size,
        warmup_iters=0,
        out_dir="",
    )
    results = {}
    for name, layout, more in progress_bar([*layouts(comm.size, args.tiles)], "layout", comm.rank):
        ordinary = replace(base, **layout)
        results[name] = compare(ordinary, replace(ordinary, reproducible=True, **more), args.turns, comm)
    if comm.rank == 0:
        titles = ["", "ordinary, ms", "reproducible, ms", "ratio", "bytes", "reproducible, bytes"]
        print(table(titles, [[name, *(f"{value:.2f}" for value in row.values())] for name, row in results.items()]))
        if args.output:
            write(args.output, results, **vars(args))


if __name__ == "__main__":
    main()
