"""Compare calls with plans and with the MPI library's own collectives, in one run.

    mpirun -n 2 python benchmarks/calls_vs_mpi.py --out benchmarks/results/calls-openmpi-2.md

Arrays are ordinary NumPy arrays of float32.  "call" passes the same arrays each time, "moving" alternates between 8
sets at different addresses; "symmetric" uses arrays from `comm.empty`.  Sizes are those of the whole vector: the input
of all_reduce, reduce_scatter and all_to_all, the output of all_gather, the message of broadcast.  Times are those of
the slowest rank, in us: medians of rounds in which all ways alternate.  `--collectives`, `--bytes` and `--rounds`
choose.

    python benchmarks/calls_vs_mpi.py --median run1.md run2.md run3.md --out benchmarks/results/calls-openmpi-2.md

writes the medians of several runs.
"""

import argparse
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from itertools import cycle, product
from pathlib import Path
from typing import Any

import numpy as np
from helpers.result_files import machine, output
from peers import COLLECTIVES, LONG_ENOUGH_S, arrays, mpi_call

import collectives
from collectives.job.launch import library_name, start_mpi
from collectives.job.progress_bar import progress_bar, show

MPI = start_mpi()
NUM_SETS = 8  # of alternating arrays
SIZES = [8, 64, 1 << 10, 1 << 14, 1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 24, 1 << 26]
WAYS = ("plan", "call", "moving", "symmetric", "MPI", "MPI moving")
Times = dict[tuple[str, int], list[float]]  # in us, by way, of each collective and number of bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--collectives", nargs="*", default=COLLECTIVES)
    parser.add_argument("--bytes", type=int, nargs="*", default=SIZES)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=output, default=Path("calls.md"))
    parser.add_argument("--median", type=Path, nargs="+", metavar="RUN")
    args = parser.parse_args()
    if args.median:
        runs = [path.read_text() for path in args.median]
        args.out.write_text(document(runs[0].splitlines()[0], list(map(table, runs))))
        return
    comm = collectives.world()
    times_by_case: Times = {}
    for collective, nbytes in progress_bar([*product(args.collectives, args.bytes)], "size", comm.rank):
        nbytes = max(nbytes, 4 * comm.size)
        seconds = measure(comm, ways(comm, collective, nbytes), args.rounds)
        times_by_case[collective, nbytes] = [1e6 * each for each in seconds]
        if comm.rank == 0:
            show(f"{collective} {nbytes} {' '.join(f'{1e6 * each:.1f}' for each in seconds)}")
    if comm.rank == 0:
        where = f"{comm.size} ranks on {machine()['cores']} cores, {machine()['processor']}"
        title = f"Calls, plans and {library_name(MPI)}'s own collectives on {where}; times in us."
        args.out.write_text(document(title, [times_by_case]))


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


def document(title: str, runs: Sequence[Times]) -> str:
    """Return a table of the times, and a summary of them: medians of the runs."""
    lines = [title, "", f"| collective | bytes | {' | '.join(WAYS)} |", "|---|---:|" + "---:|" * len(WAYS)]
    for case in runs[0]:
        medians = map(statistics.median, zip(*(run[case] for run in runs), strict=True))
        lines.append(f"| {case[0]} | {case[1]} | {' | '.join(f'{time:.1f}' for time in medians)} |")
    of_runs = f" (medians of {len(runs)} runs)" if len(runs) > 1 else ""
    lines += ["", f"Of 64 KiB to 64 MiB, how many times as fast as MPI's{of_runs}, as geometric mean and at least:", ""]
    lines += ["| collective | plan | call | moving, to MPI's moving | symmetric |", "|---|---:|---:|---:|---:|"]
    for collective in dict.fromkeys(collective for collective, _ in runs[0]):
        long = [case for case in runs[0] if case[0] == collective and case[1] >= 1 << 16]
        ratios = [[statistics.median(ratio(run[case], way) for run in runs) for case in long] for way in range(4)]
        cells = [f"{statistics.geometric_mean(of_way):.2f}, {min(of_way):.2f}" for of_way in ratios if of_way]
        lines.append(f"| {' | '.join([collective, *cells])} |")
    return "\n".join(lines) + "\n"


def ratio(times: Sequence[float], way: int) -> float:
    """Return how many times as fast as MPI's a way is; moving arrays beside MPI's on moving arrays."""
    return times[WAYS.index("MPI moving" if WAYS[way] == "moving" else "MPI")] / times[way]


def table(text: str) -> Times:
    """Read the times of a run from its document."""
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("|")]
    return {(row[0], int(row[1])): list(map(float, row[2:])) for row in rows if row[1:] and row[1].isdecimal()}


if __name__ == "__main__":
    main()
