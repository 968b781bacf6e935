"""Measure the cost of a step's input: memory for many token files, and the wait for batches.

    mpirun -n 8 python benchmarks/training_input.py --output benchmarks/results/training-input-openmpi-8.json

Trains on files of tokens, 100 of 10 MB by default, and before that on one small file.  "private" is a rank's unshared
memory, "files" its mapped file pages, which all ranks have in common; both are those of the rank with most.  Linux
only.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from contextlib import closing
from pathlib import Path

import numpy as np
from helpers.result_files import output, table, write

import collectives
from collectives.job.launch import start_mpi
from collectives.job.settings import Parser, positive
from training.loop import step
from training.parallel.run import TrainingRun
from training.settings.config import Config


def write_shards(folder: Path, number: int, mebibytes: float) -> None:
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 50_000, int(mebibytes * (1 << 19)), dtype=np.uint16)
    for shard in range(number):
        tokens.tofile(folder / f"train_{shard:03}.bin")
    tokens[:100_000].tofile(folder / "val.bin")


def mebibytes(field: str) -> float:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) / 1024


def measure(comm: collectives.Communicator, data: str, steps: int) -> dict[str, float]:
    """Train; return a rank's final memory, and the longest wait of a step."""
    config = Config(data=[data], n_layer=1, n_head=2, n_embd=32, max_iters=steps, out_dir="")
    waits, durations = [], []
    with TrainingRun(config, comm) as run, closing(run.inputs()) as inputs:
        for iteration in range(1, steps + 1):
            begin_s = time.perf_counter()
            batches = next(inputs)
            waits.append(time.perf_counter() - begin_s)
            step(run, iteration, batches)
            durations.append(time.perf_counter() - begin_s)
        figures = [mebibytes("RssAnon"), mebibytes("RssFile"), 1e3 * statistics.median(waits), 1e3 * max(waits[1:])]
        figures.append(1e3 * statistics.median(durations))
    most = comm.all_reduce(np.array(figures), op="max").tolist()
    return dict(zip(("private_mib", "files_mib", "wait_ms", "longest_wait_ms", "step_ms"), most, strict=True))


def arguments() -> argparse.Namespace:
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("--shards", type=positive, default=100)
    parser.add_argument("--shard_mb", type=positive, default=10)
    parser.add_argument("--steps", type=positive, default=30)
    parser.add_argument("--output", type=output, default=Path("training-input.json"))
    return parser.parse_args()


def main() -> None:
    comm = collectives.world()
    with comm.agreed():
        args = arguments()
    world = start_mpi().COMM_WORLD
    with tempfile.TemporaryDirectory() as own:
        folder = Path(world.bcast(own))
        small, large = folder / "small", folder / "large"
        if comm.rank == 0:
            for subfolder, number in ((small, 1), (large, args.shards)):
                subfolder.mkdir()
                write_shards(subfolder, number, args.shard_mb if subfolder is large else 0.25)
        comm.barrier()
        results = {name: measure(comm, str(data), args.steps) for name, data in (("small", small), ("large", large))}
        comm.barrier()
    if comm.rank == 0:
        titles = list(results["small"])
        print(table(["data", *titles], [[name, *(f"{row[t]:.1f}" for t in titles)] for name, row in results.items()]))
        write(args.output, results, **vars(args))


if __name__ == "__main__":
    main()
