"""Compare our collectives with the MPI library's own and gloo's, in one run, for each size in turn.

    mpirun -n 2 python benchmarks/peers.py --out benchmarks/results/peers-openmpi-2.json

Times are medians of the slowest rank, with peers alternating; results are checked.  Sizes are those of the whole
vector: the input of all_reduce, reduce_scatter and all_to_all, the output of all_gather, the message of broadcast.
"copy" is a concurrent NumPy copy on every rank of as many bytes as it must read and write: n for an all-reduce of n
bytes, so that p ranks move 2pn.  benchmarks/peers_table.py makes tables of the files.
"""

import argparse
import json
import os
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

import collectives
from collectives.job.launch import library_name, start_mpi
from collectives.job.progress_bar import progress_bar, show
from collectives.job.settings import ladder

MPI = start_mpi()
from collectives.bench.peers import mpi_call, start_torch, torch_call  # noqa: E402  once MPI is ready

COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast")
LONG_ENOUGH_S = 2e-4  # approximate duration of a measurement of many calls


def arrays(collective: str, nbytes: int, size: int, empty: Callable) -> tuple[Any, Any]:
    """Return a rank's input and output; the same array if the collective works in place."""
    count = nbytes // 4
    match collective:
        case "all_reduce" | "broadcast":
            x = empty(count)
            return x, x
        case "reduce_scatter":
            return empty(count), empty(count // size)
        case "all_gather":
            return empty(count // size), empty(count)
        case _:
            return empty(count), empty(count)


def ours(comm: collectives.Communicator, collective: str, x: Any, out: Any, algorithm: str) -> Callable:
    more = {} if x is out else {"out": out}
    return comm.plan(collective, x, algorithm=algorithm, **more)


def copy(collective: str, nbytes: int, size: int) -> Callable:
    """Return a function that copies a rank's part of the memory that the collective must at least read and write."""
    fraction = {"reduce_scatter": (size + 1) / (2 * size), "broadcast": (size - 1) / size}.get(collective, 1)
    source = np.ones(max(1, int(nbytes * fraction) // 4), "float32")
    target = np.ones_like(source)
    return lambda: np.copyto(target, source)


def fill(collective: str, x: Any, rank: int) -> None:
    x[:] = np.arange(len(x)) % 7 + rank


def is_right(collective: str, out: Any, rank: int, size: int) -> bool:
    """Return whether the result is exact, as it must be for small integers."""
    n = len(out)
    match collective:
        case "all_reduce":
            want = size * (np.arange(n) % 7) + size * (size - 1) // 2
        case "reduce_scatter":
            want = size * ((np.arange(n) + rank * n) % 7) + size * (size - 1) // 2
        case "all_gather":
            want = np.concatenate([np.arange(n // size) % 7 + r for r in range(size)])
        case "all_to_all":
            want = np.concatenate([(np.arange(n // size) + rank * (n // size)) % 7 + r for r in range(size)])
        case _:
            want = np.arange(n) % 7
    return bool(np.array_equal(out.astype("float32"), want.astype("float32")))


class Contestant:
    """A function to time, on separate arrays."""

    def __init__(self, mpi: Any, collective: str, call: Callable, x: Any, out: Any):
        self.mpi, self.collective, self.call, self.x, self.out = mpi, collective, call, x, out
        self.calls = 1

    def check(self) -> None:
        if self.x is None:
            return
        for _ in range(2):  # staging buffers alternate
            fill(self.collective, self.x, self.mpi.rank)
            self.call()
            right = is_right(self.collective, self.out, self.mpi.rank, self.mpi.size)
            if not self.mpi.allreduce(right, MPI.LAND):
                raise SystemExit(f"{self.collective}: wrong result of {self.call}")
        if self.collective == "all_reduce":
            self.x[:] = 0  # repeated sums would overflow

    def time(self) -> float:
        """Return the slowest rank's seconds per call."""
        self.mpi.Barrier()
        begin = time.perf_counter()
        for _ in range(self.calls):
            self.call()
        return self.mpi.allreduce((time.perf_counter() - begin) / self.calls, MPI.MAX)

    def settle(self) -> None:
        """Warm up, and determine the number of calls per measurement."""
        self.time()
        self.calls = max(1, min(400, int(LONG_ENOUGH_S / self.time())))
        self.calls = self.mpi.bcast(self.calls)


def contest(comm: collectives.Communicator, mpi: Any, collective: str, nbytes: int, args: Any) -> dict[str, float]:
    """Return each contestant's median seconds."""
    size = comm.size
    empties = {"symmetric": comm.empty, "ordinary": lambda count: np.empty(count, "float32")}
    contestants = {"copy": Contestant(mpi, collective, copy(collective, nbytes, size), None, None)}
    for memory in args.memory:
        for algorithm in args.algorithms:
            names = collectives.algorithms.names(collective, size)
            if algorithm == "auto" or algorithm in names:
                x, out = arrays(collective, nbytes, size, empties[memory])
                call = ours(comm, collective, x, out, algorithm)
                contestants[f"{algorithm} {memory}"] = Contestant(mpi, collective, call, x, out)
    if collective == "all_reduce":
        x = comm.empty(nbytes // 2, "bfloat16")
        contestants["auto bfloat16"] = Contestant(mpi, collective, ours(comm, collective, x, x, "auto"), x, x)
    makers = {
        "mpi": lambda x, out: mpi_call(mpi, collective, x, out),
        "gloo": lambda x, out: torch_call(collective, x, out),
    }
    for peer in args.peers:
        x, out = arrays(collective, nbytes, size, empties["ordinary"])
        contestants[peer] = Contestant(mpi, collective, makers[peer](x, out), x, out)
    for contestant in contestants.values():
        contestant.check()
        contestant.settle()
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(args.repeats):
        for name, contestant in contestants.items():
            times[name].append(contestant.time())
    return {name: float(np.median(values)) for name, values in times.items()}


def parse_size(text: str) -> int:
    return int(text.rstrip("KM")) << {"K": 10, "M": 20}.get(text[-1], 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--collectives", nargs="+", default=COLLECTIVES)
    parser.add_argument("--begin", type=parse_size, default=8)
    parser.add_argument("--end", type=parse_size, default=64 << 20)
    parser.add_argument("--memory", nargs="+", default=["symmetric", "ordinary"])
    parser.add_argument("--algorithms", nargs="+", default=["auto"])
    parser.add_argument("--peers", nargs="*", default=["mpi", "gloo"])
    parser.add_argument("--repeats", type=int, default=11)
    parser.add_argument("--out", type=Path, help="write the numbers as JSON")
    args = parser.parse_args()
    comm, mpi = collectives.world(), MPI.COMM_WORLD
    if "gloo" in args.peers:
        start_torch(mpi, "gloo", alone=True)
    results = []
    sizes = [nbytes for nbytes in ladder(args.begin, args.end, 2) if nbytes // 4 >= comm.size]
    for collective, nbytes in progress_bar([*product(args.collectives, sizes)], "size", comm.rank):
        seconds = contest(comm, mpi, collective, nbytes, args)
        results.append({"collective": collective, "bytes": nbytes, "seconds": seconds})
        if comm.rank == 0:
            line = "  ".join(f"{name} {s * 1e6:.1f}" for name, s in seconds.items())
            show(f"{collective:>14} {nbytes:>9}  {line}")
    if args.out and comm.rank == 0:
        header = {"ranks": comm.size, "cores": os.cpu_count(), "mpi": library_name(MPI), "numpy": np.__version__}
        args.out.write_text(json.dumps({**header, "repeats": args.repeats, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
