"""all_reduce on oversubscribed cores: plans, calls, the MPI library's; by torch.distributed, ours and gloo's.

    mpirun -n 2 python benchmarks/oversubscribed_cores.py --out busy.md

Rank 0 starts the neighbours, processes that compute without waiting.  Times are those of the slowest rank, in us: the
median of rounds in which all ways alternate and, in brackets, the mean, which includes stalls.  A round has as many
calls as take `--seconds` undisturbed.
"""

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from helpers.result_files import machine, output

import collectives
import collectives.torch_backend  # registers the backend
from collectives.job.launch import start_mpi
from collectives.job.progress_bar import progress_bar, show

BUSY = "while True: pass"
Ways = dict[str, Callable[[], object]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--neighbours", type=int, nargs="*", default=[0, 1, 4])
    parser.add_argument("--bytes", type=int, nargs="*", default=[1 << power for power in (10, 14, 18, 22, 26)])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument(
        "--seconds", type=float, default=0.03, help="how long each way's part of a round takes undisturbed"
    )
    parser.add_argument("--out", type=output, default=Path("busy-neighbours.md"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("collectives")
    gloo = dist.new_group(backend="gloo")
    comm = collectives.world()
    lines = []
    bar = progress_bar(len(args.neighbours) * len(args.bytes), "size", comm.rank)
    for num_busy in args.neighbours:
        with neighbours(num_busy if comm.rank == 0 else 0):
            for nbytes in args.bytes:
                times = measure(ways(comm, gloo, nbytes), args.rounds, args.seconds)
                lines.append([num_busy, nbytes, *(map(cell, times.values()))])
                bar.update()
                if comm.rank == 0:
                    show(" ".join(map(str, lines[-1])))
    bar.close()
    if comm.rank == 0:
        args.out.write_text(table(lines, list(times)))
    dist.destroy_process_group()


@contextmanager
def neighbours(number: int) -> Iterator[None]:
    """Run processes that compute continuously."""
    busy = [subprocess.Popen([sys.executable, "-P", "-c", BUSY]) for _ in range(number)]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


def ways(comm: collectives.Communicator, gloo: dist.ProcessGroup, nbytes: int) -> Ways:
    x = comm.empty(nbytes // 4, "float32")
    x[:] = 0
    mine, theirs = torch.zeros(nbytes // 4), torch.zeros(nbytes // 4)
    native, ordinary = np.zeros(nbytes // 4, "float32"), np.zeros(nbytes // 4, "float32")
    in_place = start_mpi().IN_PLACE
    return {
        "ours, a plan": comm.plan("all_reduce", x),
        "ours, a call": lambda: comm.all_reduce(ordinary),
        "MPI": lambda: comm.mpi.Allreduce(in_place, native),
        "ours, by torch": lambda: dist.all_reduce(mine),
        "gloo, by torch": lambda: dist.all_reduce(theirs, group=gloo),
    }


def measure(ways: Ways, num_rounds: int, limit_s: float) -> dict[str, list[float]]:
    """Return the seconds of a call of each way, round by round."""
    quickest = {name: min(calls_s(way, 3) for _ in range(9)) for name, way in ways.items()}
    counts = {name: max(1, int(limit_s / seconds)) for name, seconds in quickest.items()}
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(num_rounds):
        for name, way in ways.items():
            times[name].append(calls_s(way, counts[name]))
    return times


def cell(times: list[float]) -> str:
    return f"{1e6 * statistics.median(times):.1f} ({1e6 * statistics.mean(times):.1f})"


def calls_s(way: Callable[[], object], count: int) -> float:
    """Return the slowest rank's seconds of a call."""
    mpi = start_mpi()
    way()
    mpi.COMM_WORLD.Barrier()
    begin = time.perf_counter()
    for _ in range(count):
        way()
    return mpi.COMM_WORLD.allreduce((time.perf_counter() - begin) / count, mpi.MAX)


def table(lines: list[list], names: list[str]) -> str:
    here = machine()
    head = ["busy neighbours", "bytes", *names]
    ranks = f"{dist.get_world_size()} ranks, {here['cores']} cores, {here['processor']}"
    rows = [f"| {' | '.join(map(str, row))} |" for row in (head, ["---"] * len(head), *lines)]
    return "\n".join([f"all_reduce of float32 on {ranks}; us a call.", "", *rows, ""])


if __name__ == "__main__":
    main()
