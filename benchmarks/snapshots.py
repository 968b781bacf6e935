"""Compare training steps of which each tenth is followed by a snapshot with steps that have none, in one run.

    COLLECTIVES_LINKS=0 mpirun -n 2 python benchmarks/snapshots.py --output snapshots.json

Turns of ten steps with and without alternate; a snapshot is taken after the first one of a turn, and written during the
others.  The ratio is the median over turns of the slowest rank's seconds.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
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

INTERVAL = 10


def layouts(size: int) -> Iterator[tuple[str, dict[str, Any]]]:
    yield f"dp {size}", {}
    yield f"dp {size}, ZeRO 1", {"zero_stage": 1}
    yield f"dp {size}, ZeRO 3", {"zero_stage": 3}
    yield f"pp {size}", {"pp": size}
    yield f"tp {size}", {"tp": size}


def compare(config: Config, turns: int, comm: collectives.Communicator) -> dict[str, float]:
    """Return the milliseconds of a step without snapshots and with them, and their ratio.  Collective."""
    with TrainingRun(config, comm) as run, closing(run.inputs()) as inputs:
        assert run.saving
        numbered, snapshots = enumerate(inputs, 1), run.saving.snapshots

        def take(count: int) -> float:
            comm.barrier()
            begin_s = time.perf_counter()
            for _ in range(count):
                number, batches = next(numbered)
                step(run, number, batches).metrics()
                run.saving.snap(number, lambda: None)
            return comm.all_reduce(np.array([time.perf_counter() - begin_s]), op="max")[0]

        take(INTERVAL - 1)
        times_s: list[tuple[float, float]] = []
        for _ in range(turns + 1):
            run.saving.snapshots = None
            without_s = take(INTERVAL)
            run.saving.snapshots = snapshots
            times_s.append((without_s, take(INTERVAL)))
        pairs = times_s[1:]
    return {
        "without_ms": statistics.median(first for first, _ in pairs) * 1e3 / INTERVAL,
        "with_ms": statistics.median(second for _, second in pairs) * 1e3 / INTERVAL,
        "ratio": statistics.median(second / first for first, second in pairs),
    }


def parse() -> argparse.Namespace:
    parser = training_parser(__doc__)
    parser.add_argument("--turns", type=positive, default=7)
    return parser.parse_args()


def main() -> None:
    torch.set_num_threads(1)
    comm = collectives.world()
    with comm.agreed("snapshots"):
        args = parse()
    results = {}
    with tempfile.TemporaryDirectory() as own:
        folder = comm.broadcast_object(own)
        for name, layout in progress_bar([*layouts(comm.size)], "layout", comm.rank):
            config = Config(
                model=args.model,
                block_size=args.block_size,
                micro_batch_size=args.micro_batch_size,
                global_batch_size=4 * args.micro_batch_size,
                warmup_iters=0,
                out_dir="",
                checkpoint_dir=f"{folder}/saved",
                snapshot_interval=INTERVAL,
                **layout,
            )
            results[name] = compare(config, args.turns, comm)
        comm.barrier()
    if comm.rank == 0:
        rows = [[name, *(f"{value:.3f}" for value in row.values())] for name, row in results.items()]
        print(table(["", "without, ms", "with snapshots, ms", "ratio"], rows))
        if args.output:
            write(args.output, results, **vars(args))


if __name__ == "__main__":
    main()
