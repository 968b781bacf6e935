"""Compare mpi4py's calls with our collectives and with the library's own, alternating in one run.

mpirun -n 4 python benchmarks/mpi4py_calls.py --out benchmarks/results/mpi4py-face-openmpi-4.md

Buffers are plain NumPy arrays of float64; sizes are those of a call's vector.  A cell is the ratio of medians, the
library's over ours, which is near 1 for calls that the library does in both; the last row has geometric means from
64 KiB on.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from mpi4py import MPI

from collectives.job.launch import library_name
from collectives.job.progress_bar import progress_bar, show
from collectives.mpi4py import wrap

SIZES = [8 << 2 * power for power in range(12)] + [64 << 20]
MEANS_FROM = 64 << 10
TRIALS_S, MOST_TRIALS, FEWEST_TRIALS = 1.0, 400, 9
Call = Callable[[], object]


METHODS = "Allreduce Reduce_scatter Reduce_scatter_block Allgather Allgatherv Alltoall Bcast Scatter Scan Iallreduce "
METHODS += "Allreduce_init"


def methods(comm: MPI.Intracomm) -> SimpleNamespace:
    """Return a communicator's current methods, before they are replaced."""
    functions = {name: partial(getattr(MPI.Intracomm, name), comm) for name in METHODS.split()}
    return SimpleNamespace(size=comm.size, rank=comm.rank, **functions)


def calls(comm: SimpleNamespace, nbytes: int) -> dict[str, Call]:
    """Return the calls of one size on a communicator, on separate arrays."""
    size, rank = comm.size, comm.rank
    count = max(nbytes // 8 // size, 1)
    x, out, part = np.ones(count * size), np.empty(count * size), np.empty(count)
    counts = [count] * size
    persistent = comm.Allreduce_init(x, out)

    def started() -> None:
        comm.Iallreduce(x, out).Wait()

    def restarted() -> None:
        persistent.Start()
        persistent.Wait()

    return {
        "Allreduce": lambda: comm.Allreduce(x, out),
        "Reduce_scatter": lambda: comm.Reduce_scatter(x, part, counts),
        "Reduce_scatter_block": lambda: comm.Reduce_scatter_block(x, part),
        "Allgather": lambda: comm.Allgather(part, out),
        "Allgatherv": lambda: comm.Allgatherv(part, [out, counts]),
        "Alltoall": lambda: comm.Alltoall(x, out),
        "Bcast": lambda: comm.Bcast(x),
        "Scatter": lambda: comm.Scatter(x if rank == 0 else None, part),
        "Scan": lambda: comm.Scan(x, out),
        "Iallreduce": started,
        "Allreduce_init": restarted,
    }


def medians(both: list[Call], comm: MPI.Comm) -> list[float]:
    """Return the slowest rank's medians of two alternating calls, each started after a barrier."""
    times: list[list[float]] = [[], []]
    trials = FEWEST_TRIALS
    for trial in range(MOST_TRIALS):
        if trial >= trials:
            break
        for durations, call in zip(times, both, strict=True):
            comm.Barrier()
            begin = time.perf_counter()
            call()
            durations.append(time.perf_counter() - begin)
        if trial == 2:  # the first trials bind plans
            times = [[], []]
            trials = comm.bcast(int(TRIALS_S / (durations[-1] + 1e-6)) if durations else trials)
            trials = min(max(trials, FEWEST_TRIALS), MOST_TRIALS)
    return [comm.allreduce(statistics.median(durations), MPI.MAX) for durations in times]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="bytes")
    parser.add_argument("--only", nargs="+", help="methods")
    parser.add_argument("--out", type=Path, default=Path("mpi4py-face.md"))
    args = parser.parse_args()
    world = MPI.COMM_WORLD
    library = methods(world.Dup())
    ours = methods(wrap(world.Dup()))
    names = args.only or list(calls(library, 8))
    ratios: dict[str, dict[int, float]] = {name: {} for name in names}
    bar = progress_bar(len(args.sizes) * len(names), "call", world.rank)
    for nbytes in args.sizes:
        both = [calls(comm, nbytes) for comm in (library, ours)]
        for name in names:
            theirs, own = medians([of[name] for of in both], world)
            ratios[name][nbytes] = theirs / own
            bar.update()
            if library.rank == 0:
                show(f"{name:22}{nbytes:12,} B {theirs * 1e6:12.1f} us {own * 1e6:12.1f} us {theirs / own:8.2f}")
    bar.close()
    if library.rank == 0:
        args.out.write_text(table(ratios, args.sizes, f"{library_name(MPI)}, {library.size} ranks"))


def table(ratios: dict[str, dict[int, float]], sizes: list[int], where: str) -> str:
    rows = [f"The library's time over that with ours, {where}; by `benchmarks/mpi4py_calls.py`.", ""]
    rows += [f"| bytes | {' | '.join(ratios)} |", f"|---:|{'---:|' * len(ratios)}"]
    rows += [f"| {n:,} | {' | '.join(f'{of[n]:.2f}' for of in ratios.values())} |" for n in sizes]
    large = [[of[n] for n in sizes if n >= MEANS_FROM] for of in ratios.values()]
    means = [f"{statistics.geometric_mean(values):.2f}" if values else "" for values in large]
    return "\n".join([*rows, f"| mean from {MEANS_FROM:,} | {' | '.join(means)} |", ""])


if __name__ == "__main__":
    main()
