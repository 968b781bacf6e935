"""All-reduce by hand against the MPI library's own, side by side in one run.

    mpirun -n 2 python benchmarks/all_reduce.py --out benchmarks/results/all_reduce-openmpi-2.json

Times are of the slowest rank, in turn over the algorithms, so that a change of the machine's speed hits all alike.
"""

import argparse
import json
import os
import time
from pathlib import Path

import numpy as np
from mpi4py import MPI

import collectives
from collectives.job import library_name


def measure(comm: collectives.Communicator, nbytes: int, names: list[str], repeats: int) -> dict[str, list[float]]:
    """Seconds of each repeat of each algorithm; results are checked against the sum of the ranks' inputs."""
    x = np.empty(nbytes // 4, "float32")
    plans = {name: comm.plan("all_reduce", x, algorithm=name) for name in names}
    slowest = np.empty(1)
    times: dict[str, list[float]] = {name: [] for name in names}
    for repeat in range(repeats + 1):
        for name, plan in plans.items():
            x.fill(comm.rank + 1)
            comm.barrier()
            begin = time.perf_counter()
            plan()
            slowest[0] = time.perf_counter() - begin
            assert np.all(x == comm.size * (comm.size + 1) / 2), name
            comm.all_reduce(slowest, op="max")
            if repeat:  # the first is a warm-up
                times[name].append(slowest[0])
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", nargs="+", default=["64M"], help="bytes, with K or M for 2^10 or 2^20")
    parser.add_argument("--algorithms", nargs="+", default=["ring", "recursive_doubling", "mpi"])
    parser.add_argument("--repeats", type=int, default=21)
    parser.add_argument("--segment_bytes", type=int, default=None)
    parser.add_argument("--out", type=Path, help="write the numbers as JSON")
    args = parser.parse_args()
    comm = collectives.world()
    if args.segment_bytes:
        comm = collectives.Communicator(MPI.COMM_WORLD, segment_bytes=args.segment_bytes)
    results = []
    for size in args.sizes:
        nbytes = int(size.rstrip("KM")) << {"K": 10, "M": 20}.get(size[-1], 0)
        for name, times in measure(comm, nbytes, args.algorithms, args.repeats).items():
            low, median, high = (float(np.percentile(times, q)) * 1e3 for q in (25, 50, 75))
            results.append({"bytes": nbytes, "algorithm": name, "ms_p25": low, "ms_median": median, "ms_p75": high})
            if comm.rank == 0:
                print(
                    f"{nbytes:>10} B  {name:<20} median {median:8.3f} ms  (quartiles {low:.3f}, {high:.3f})", flush=True
                )
    if args.out and comm.rank == 0:
        header = {"ranks": comm.size, "cores": os.cpu_count(), "mpi": library_name(MPI), "numpy": np.__version__}
        args.out.write_text(json.dumps({**header, "repeats": args.repeats, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
