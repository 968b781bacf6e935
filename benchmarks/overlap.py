"""Measure how much of an all-reduce overlaps with other work: `start()`, work, `wait()`, against both in sequence.

    mpirun -n 2 python benchmarks/overlap.py

The other work is torch's matrix products on the rank's own core, or waiting ("idle", as for a GPU or a disk), for about
as long as the all-reduce takes.  Medians of the slowest rank, in milliseconds; "hidden" is the part of the shorter of
the two that costs nothing.
"""

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

import collectives
from collectives.job.launch import library_name


def median_ms(comm: collectives.Communicator, action: Callable[[], None], repeats: int) -> float:
    """Return the slowest rank's median milliseconds."""
    times = []
    for _ in range(repeats + 1):
        comm.barrier()
        begin = time.perf_counter()
        action()
        elapsed_s = np.array([time.perf_counter() - begin])
        times.append(float(comm.all_reduce(elapsed_s, op="max")[0]) * 1e3)
    return float(np.median(times[1:]))


def products(seconds: float) -> Callable[[], None]:
    """Return a function whose matrix products take about so long."""
    a = torch.ones(256, 256)
    begin = time.perf_counter()
    for _ in range(50):
        a @ a
    number = max(1, round(seconds / ((time.perf_counter() - begin) / 50)))

    def work() -> None:
        for _ in range(number):
            a @ a

    return work


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=int, default=32, help="size of the vector in MiB")
    parser.add_argument("--algorithms", nargs="+", default=["auto", "ring"])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--out", type=Path, help="write the numbers as JSON")
    args = parser.parse_args()
    torch.set_num_threads(1)
    comm = collectives.world()
    x = comm.empty(args.mib << 18)
    results = []
    for algorithm in args.algorithms:
        x[:] = 0
        plan = comm.plan("all_reduce", x, algorithm=algorithm)
        alone = median_ms(comm, plan, args.repeats)
        for name, work in {"torch": products(alone / 1e3), "idle": lambda s=alone: time.sleep(s / 1e3)}.items():

            def overlapped(plan=plan, work=work) -> None:
                plan.start()
                work()
                plan.wait()

            def in_sequence(plan=plan, work=work) -> None:
                plan()
                work()

            other, both, after = (median_ms(comm, action, args.repeats) for action in (work, overlapped, in_sequence))
            hidden = (after - both) / min(alone, other)
            times = {"all_reduce_ms": alone, "work_ms": other, "in_turn_ms": after, "overlapped_ms": both}
            results.append({"algorithm": plan.name.split()[-1], "work": name, **times, "hidden": hidden})
            if comm.rank == 0:
                words = "  ".join(f"{key} {value:.1f}" for key, value in times.items())
                print(f"{plan.name.split()[-1]:<12} {name:<6} {words}  hidden {hidden:.0%}", flush=True)
    if args.out and comm.rank == 0:
        from mpi4py import MPI

        header = {"ranks": comm.size, "cores": os.cpu_count(), "mpi": library_name(MPI), "torch": torch.__version__}
        args.out.write_text(json.dumps({**header, "mib": args.mib, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
