"""All-reduce between ranks that share a device, compared with its memory bandwidth and the MPI library's all-reduce.

python -m mpi_tests.gpu_check.all_reduce_speed cuda
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

import collectives
from collectives import algorithms
from collectives.arrays import views
from collectives.bench.constants import medians
from collectives.bench.run import contestant
from collectives.bench.trial import Trial, Workload
from mpi_tests.gpu_check.rows import SKIPPED, Row, Setting
from mpi_tests.gpu_check.started import program

NAME = "all_reduce of 256 MiB"
LIMIT_GOAL, MPI_GOAL = 0.70, 3.0
LARGE, SMALL = 256 << 20, 64 << 10  # bytes
REPEATS, WARMUPS = 10, 3


def check(setting: Setting) -> Iterator[Row]:
    for size in (4,) if setting.is_small else (2, 4):
        yield from rows(setting, size, program(setting, size, "all_reduce_speed"))


def rows(setting: Setting, size: int, figures: dict[str, Any]) -> list[Row]:
    """Compare with copies: an all-reduce accesses at least 2 p n bytes, the traffic of p copies of n bytes."""
    limit_s = size * figures["copy_s"]
    name = min(figures["ours_s"], key=lambda name: figures["ours_s"][name])
    ours_s = figures["ours_s"][name]
    fraction, goal = limit_s / ours_s, f"{LIMIT_GOAL:.0%} of the memory limit"
    each = ", ".join(f"{name} {1e3 * seconds:.2f} ms" for name, seconds in figures["ours_s"].items())
    text = f"{fraction:.1%}: {name}; limit {1e3 * limit_s:.2f} ms; {each}"
    first = Row(f"{NAME}, {size} ranks", f"at least {goal}", text, setting.speed(fraction >= LIMIT_GOAL))
    beside, mpi_s = f"at least {MPI_GOAL:g} times as fast as MPI's own", figures["mpi_s"]
    if mpi_s is None:
        return [first, Row(f"{NAME}, {size} ranks", beside, figures["why_no_mpi"], SKIPPED)]
    text = f"{mpi_s / ours_s:.1f} times; MPI's own {1e3 * mpi_s:.2f} ms"
    return [first, Row(f"{NAME}, {size} ranks", beside, text, setting.speed(mpi_s / ours_s >= MPI_GOAL))]


def copy_s(comm: collectives.Communicator, device: str, nbytes: int) -> float:
    """Return the median seconds of an array copy on rank 0 while the other ranks wait.  Collective."""
    times, memory = np.zeros(REPEATS + WARMUPS), views.device(device)
    if comm.rank == 0:
        source, target = (memory.empty(nbytes, np.dtype(np.uint8)) for _ in range(2))
        for i in range(len(times)):
            begin = time.perf_counter()
            memory.begin()
            memory.copy(target, source)
            memory.synchronize()
            times[i] = time.perf_counter() - begin
    return float(np.median(comm.broadcast(times)[WARMUPS:]))


def able(comm: collectives.Communicator, trial: Trial) -> tuple[dict[str, Callable[[], Any]], str]:
    """Return the all-reduces, ours and MPI's, that work here, and the reason if MPI's does not.  Collective."""
    direct = [row.name for row in algorithms.rows("all_reduce") if row.access]
    runs, why = {}, ""
    for name in ("auto", *direct, "mpi"):
        try:
            runs[name] = contestant(comm, trial, name).run
        except collectives.InputError as error:
            why = str(error) if name == "mpi" else why
    return runs, why


def main() -> None:
    comm, device = collectives.world(), sys.argv[1]
    nbytes = SMALL if device == "cpu" else LARGE
    trial = Trial(comm, Workload("all_reduce", "symmetric", device), nbytes // 4, True)
    trial.fill()
    runs, why = able(comm, trial)
    times = dict(zip(runs, medians(comm, list(runs.values()), REPEATS, WARMUPS), strict=True))
    mpi_s = times.pop("mpi", None)
    measurements = {"copy_s": copy_s(comm, device, nbytes), "ours_s": times, "mpi_s": mpi_s, "why_no_mpi": why}
    if comm.rank == 0:
        print(json.dumps(measurements))


if __name__ == "__main__":
    main()
