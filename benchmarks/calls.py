"""Compare calls with plans and with the MPI library's own collectives, in one run.

    mpirun -n 2 python benchmarks/calls.py --out benchmarks/results/calls-openmpi-2.md

Arrays are ordinary NumPy arrays of float32.  "call" passes the same arrays each time, "moving" alternates between 8
sets at different addresses; "symmetric" uses arrays from `comm.empty`.  Sizes are those of the whole vector: the input
of all_reduce, reduce_scatter and all_to_all, the output of all_gather, the message of broadcast.  Times are those of
the slowest rank, in us: medians of rounds in which all ways alternate.  `--collectives`, `--bytes` and `--rounds`
choose.
"""

import argparse
import statistics
from collections.abc import Callable
from functools import partial
from itertools import cycle, product
from pathlib import Path
from typing import Any

import numpy as np
from document import machine, output
from peers import COLLECTIVES, LONG_ENOUGH_S, arrays, mpi_call

import collectives
from collectives.job.launch import library_name, start_mpi
from collectives.job.progress_bar import progress_bar, show

MPI = start_mpi()
NUM_SETS = 8  # of alternating arrays
SIZES = [8, 64, 1 << 10, 1 << 14, 1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 24, 1 << 26]
WAYS = ("plan", "call", "moving", "symmetric", "MPI", "MPI moving")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--collectives", nargs="*", default=COLLECTIVES)
    parser.add_argument("--bytes", type=int, nargs="*", default=SIZES)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=output, default=Path("calls.md"))
    args = parser.parse_args()
    comm = collectives.world()
    rows = []
    for collective, nbytes in progress_bar([*product(args.collectives, args.bytes)], "size", comm.rank):
        nbytes = max(nbytes, 4 * comm.size)
        times = measure(comm, ways(comm, collective, nbytes), args.rounds)
        rows.append([collective, str(nbytes), *(f"{1e6 * seconds:.1f}" for seconds in times)])
        if comm.rank == 0:
            show(" ".join(rows[-1]))
    if comm.rank == 0:
        args.out.write_text(document(rows, comm.size))


def ways(comm: collectives.Communicator, collective: str, nbytes: int) -> list[Callable[[], Any]]:
    """Return a call of the collective for each of `WAYS`, on separate arrays."""
    sets = [arrays(collective, nbytes, comm.size, ordinary) for _ in range(NUM_SETS)]
    plan_sets = arrays(collective, nbytes, comm.size, ordinary)
    call = getattr(comm, collective)
    next_set = cycle(sets).__next__
    plan = comm.plan(collective, plan_sets[0], **more(*plan_sets))
    (x, out), shared = sets[0], arrays(collective, nbytes, comm.size, comm.empty)
    native = mpi_call(MPI.COMM_WORLD, collective, *arrays(collective, nbytes, comm.size, ordinary))

    def moving() -> None:
        x, out = next_set()
        call(x, **more(x, out))

    options, shared_options = more(x, out), more(*shared)
    natives = cycle([mpi_call(MPI.COMM_WORLD, collective, *pair) for pair in sets]).__next__
    symmetric = partial(call, shared[0], **shared_options)
    return [plan, partial(call, x, **options), moving, symmetric, native, lambda: natives()()]


def more(x: Any, out: Any) -> dict[str, Any]:
    return {} if x is out else {"out": out}


def ordinary(count: int) -> np.ndarray:
    return np.ones(count, np.float32)


def measure(comm: collectives.Communicator, calls: list[Callable[[], Any]], rounds: int) -> list[float]:
    """Return the slowest rank's seconds per call of each way."""
    clock, largest = MPI.Wtime, MPI.COMM_WORLD.allreduce
    numbers = []
    for call in calls:
        call()
        call()
        begin = clock()
        call()
        numbers.append(largest(max(1, min(2000, int(5 * LONG_ENOUGH_S / (clock() - begin)))), MPI.MAX))
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(rounds):
        for way, (call, number) in enumerate(zip(calls, numbers, strict=True)):
            MPI.COMM_WORLD.Barrier()
            call()
            begin = clock()
            for _ in range(number):
                call()
            times[way].append(largest((clock() - begin) / number, MPI.MAX))
    return [statistics.median(of_way) for of_way in times]


def document(rows: list[list[str]], size: int) -> str:
    """Return a table of the times, and a summary of it."""
    on = f"{machine()['cores']} cores, {machine()['processor']}"
    lines = [f"Calls, plans and {library_name(MPI)}'s own collectives on {size} ranks on {on}; times in us.", ""]
    lines += [f"| collective | bytes | {' | '.join(WAYS)} |", "|---|---:|" + "---:|" * len(WAYS)]
    lines += [f"| {' | '.join(row)} |" for row in rows]
    lines += ["", "Of 64 KiB to 64 MiB, how many times as fast as MPI's, as geometric mean and at least:", ""]
    lines += ["| collective | plan | call | moving, to MPI's moving | symmetric |", "|---|---:|---:|---:|---:|"]
    for collective in dict.fromkeys(row[0] for row in rows):
        long = [list(map(float, row[2:])) for row in rows if row[0] == collective and int(row[1]) >= 1 << 16]
        ratios = [[times[5 if way == 2 else 4] / times[way] for times in long] for way in range(4)]
        cells = [f"{statistics.geometric_mean(of_way):.2f}, {min(of_way):.2f}" for of_way in ratios if of_way]
        lines.append(f"| {' | '.join([collective, *cells])} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
