"""Training runs with a fault that is planted in one of their ranks, and what they say of the ranks' health.

    mpirun -n 2 python -m mpi_tests.helpers.faults slow 1 40 0.5 --max_iters 100

Of the four words before the run's flags, the second is the rank, and the third the first step with the fault.  The last
is the fraction of the others' speed at which the rank computes ("slow"), its wait for input as a multiple of the time
between two ("input"), or the file of a control group that it enters ("cpu").  A kind of `bit_flips` flips one bit.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from threading import Event, Thread
from typing import TYPE_CHECKING, NamedTuple

from mpi_tests.helpers.cpu_limit import CPULimit
from mpi_tests.helpers.launch import environment, find_mpirun, watched
from mpi_tests.rig import Rig

if TYPE_CHECKING:
    from parallelism.step.events import Listener

TINY = (
    "--data LICENSE --warmup_iters 2 --eval_interval 10000 --block_size 64 --n_layer 4 --n_head 4 --n_embd 128 "
    "--sample_tokens 1 --micro_batch_size 4"
)


class Fault(NamedTuple):
    """A fault of kind "slow", "input", "none", "cpu", of which the rank gets a fraction of its core, or a bit flip."""

    kind: str
    rank: int = 0
    step: int = 0
    amount: float = 1.0


def changes(fault: Fault, num_ranks: int, flags: str, folder: Path, limit_s: float = 300) -> list[dict]:
    """Train with a fault; return the begins and ends of findings, each with its step as "iter".

    Each has "after_s", the seconds of the steps with the fault before it.
    """
    core = min(1.0, (os.cpu_count() or 1) / num_ranks)
    group = CPULimit(f"collectives-{folder.name}", fault.amount * core) if fault.kind == "cpu" else None
    words = [fault.kind, fault.rank, fault.step, group.tasks if group else fault.amount]
    program = [find_mpirun(), "-n", num_ranks, sys.executable, "-m", "mpi_tests.helpers.faults", *words]
    try:
        watched([*program, *TINY.split(), *flags.split(), "--out_dir", folder], environment(), limit_s)
    finally:
        if group:
            group.remove()
    return findings(folder, fault.step)


def refusal(fault: Fault, num_ranks: int, flags: str, limit_s: float = 300) -> str:
    """Train with a bit that is flipped; return the line with which the run ends, if it does."""
    words = [fault.kind, fault.rank, fault.step, fault.amount]
    program = [find_mpirun(), "-n", num_ranks, sys.executable, "-m", "mpi_tests.helpers.faults", *words]
    run = watched([*program, *TINY.split(), *flags.split(), "--out_dir="], environment(), limit_s)
    line = re.search(r"^.*(step \d+: .*)$", run.stderr, re.MULTILINE)
    return line[1] if line and run.returncode else ""


def changes_on_rig(
    rig: Rig, host: int, rate: str, step: int, flags: str, folder: Path, limit_s: float = 300
) -> list[dict]:
    """Train on the hosts of a rig, of which one gets another rate after a step; return what `changes` does."""
    ended = Event()

    def act() -> None:
        while not ended.wait(0.05):
            if any(record["iter"] >= step for record in records(folder)):
                rig.set_rate(host, rate)
                return

    thread = Thread(target=act)
    thread.start()
    try:
        rig.launch(
            sys.executable, "-m", "training", *TINY.split(), *flags.split(), "--out_dir", folder, timeout=limit_s
        )
    finally:
        ended.set()
        thread.join()
    return findings(folder, step)


def findings(folder: Path, first: int) -> list[dict]:
    step_s = {r["iter"]: (r["compute_ms"] + r["comm_ms"]) / 1e3 for r in records(folder) if "loss" in r}
    changed = [record for record in records(folder) if "health" in record]
    return [
        {"iter": last, "after_s": sum(s for step, s in step_s.items() if first <= step <= last), **record["health"]}
        for record in changed
        if (last := record["iter"])
    ]


def records(folder: Path) -> list[dict]:
    path = folder / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def plant(kind: str, first: int, amount: str) -> None:
    """Have this process's training run have the fault from step `first` on."""
    from mpi_tests.helpers import bit_flips
    from training import loop
    from training.parallel.run import TrainingRun

    if kind in bit_flips.TARGETS:
        bit_flips.plant(kind, first)
        return
    own_step, own_inputs = loop.step, TrainingRun.inputs

    def step(run, iteration, batches):
        if iteration == first and kind == "cpu":
            Path(amount).write_text(str(os.getpid()))
        if iteration == first and kind == "slow":
            run.pipeline.listeners.insert(run.pipeline.listeners.index(run.pipeline.times) + 1, slow(float(amount)))
            run.optimizer.step = slowly(run.optimizer.step, float(amount))
        return own_step(run, iteration, batches)

    def late(batches, run):
        begin_s = time.perf_counter()
        for number, batch in enumerate(batches, run.first):
            time.sleep((time.perf_counter() - begin_s) * float(amount) * (number >= first))
            begin_s = time.perf_counter()
            yield batch

    def inputs(run):
        if kind == "input":
            return run.profiler.inputs(late(run._micro_batches(), run))
        return own_inputs(run)

    loop.step, TrainingRun.inputs = step, inputs


def slow(speed: float) -> Listener:
    """Return a listener with which actions take as long as on a slower processor."""
    from parallelism.step.events import Listener

    class Slow(Listener):
        def before(self, *_):
            self.begin_s = time.perf_counter()

        def after(self, _):
            stretch(self.begin_s, speed)

    return Slow()


def slowly(function: Callable, speed: float) -> Callable:
    def longer(*arguments):
        begin_s = time.perf_counter()
        result = function(*arguments)
        stretch(begin_s, speed)
        return result

    return longer


def stretch(begin_s: float, speed: float) -> None:
    """Compute on, as a slower processor would since a time."""
    now_s = time.perf_counter()
    end_s = now_s + (now_s - begin_s) * (1 / speed - 1)
    while time.perf_counter() < end_s:
        pass


def main() -> None:
    import collectives
    from training import loop

    kind, rank, first, amount = sys.argv[1:5]
    del sys.argv[1:5]
    if collectives.world().rank == int(rank):
        plant(kind, int(first), amount)
    loop.main()


if __name__ == "__main__":
    main()
