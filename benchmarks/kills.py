"""Kill a rank every few seconds, and count the steps a minute that are left: supervised training beside torchft's DDP.

    pip install torchft-nightly
    COLLECTIVES_LINKS=0 python benchmarks/kills.py --minutes 10 --output kills.json

Both train the same GPT on two ranks, or replicas, of 8 samples a step each.  When a rank of a supervised job is killed,
all ranks start again from a snapshot.  torchft's other replica goes on, and a new process replaces the one that was
killed, and copies the other's state; its lighthouse gives up a replica after a second without a sign of life.  A step
that a restart repeats counts once; torchft's step of one replica has half of the samples.  Runs without kills come
first.
"""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any

from helpers.result_files import output, table, write

from collectives.job.settings import Parser, Range, positive
from mpi_tests.helpers.launch import ROOT, environment, find_mpirun
from mpi_tests.helpers.survival import ranks_of

MINUTES = Range(0, 10**4, open="above", unit="min")
STEP = re.compile(r"(?:iter|step) (\d+)(?: of (\d+) replicas)?")
PORT = 29510
SIZE, BATCH_SIZE = 2, 8  # ranks, and samples of each in a step
REPLICA = Path(__file__).parent / "helpers" / "torchft_replica.py"


class Job:
    """Processes whose lines are read: `newest` is the latest step reported by any of them, `samples` are all steps'."""

    def __init__(self) -> None:
        self.processes: list[subprocess.Popen[str]] = []
        self.newest, self.samples, self._steps = 0, 0, SimpleQueue[tuple[int, int]]()

    def start(self, words: list[Any], **env: str) -> subprocess.Popen[str]:
        files: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        process = subprocess.Popen([*map(str, words)], **files, text=True, cwd=ROOT, env=environment() | env)
        Thread(target=self._read, args=(process,), daemon=True).start()
        self.processes.append(process)
        return process

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout
        for line in process.stdout:
            if step := STEP.match(line):
                self._steps.put((int(step[1]), int(step[2] or SIZE)))

    def wait(self, until_s: float, first: bool = False) -> None:
        """Take steps until a time, or until the first one."""
        while (left_s := until_s - time.monotonic()) > 0:
            try:
                step, replicas = self._steps.get(timeout=left_s)
            except Empty:
                return
            self.samples += max(0, step - self.newest) * replicas * BATCH_SIZE
            self.newest = max(self.newest, step)
            if first:
                return

    def kill(self, draw: random.Random) -> bool:
        """Kill a rank; return whether there was one."""
        raise NotImplementedError

    def tend(self) -> None:
        """Replace ranks that have ended; raise RuntimeError if what should not end has."""
        if self.processes[0].poll() is not None:  # the supervisor, or the lighthouse
            raise RuntimeError(f"{self.processes[0].args} has ended: run it alone, to see why")


class Supervised(Job):
    """A job of training.supervise, whose ranks are forked, with a snapshot after each tenth step."""

    def __init__(self, folder: str):
        super().__init__()
        flags = f"--data LICENSE --micro_batch_size {BATCH_SIZE} --num_micro_batches 1 --max_iters 1000000 --out_dir="
        flags += f" --eval_interval 1000000 --snapshot_interval 10 --checkpoint_interval 0 --checkpoint_dir {folder}"
        job = [find_mpirun(), "-n", SIZE, sys.executable, "-u", "-m", "training.forked", *flags.split()]
        self.supervisor = self.start([sys.executable, "-u", "-m", "training.supervise", "--", *job])

    def kill(self, draw: random.Random) -> bool:
        with suppress(FileNotFoundError, ProcessLookupError):  # none while the job starts again
            if ranks := ranks_of(self.supervisor.pid):
                os.kill(draw.choice(ranks), signal.SIGKILL)
                return True
        return False


class Torchft(Job):
    """Replicas of torchft's DDP, and the lighthouse that they agree by."""

    def __init__(self, folder: str):
        super().__init__()
        flags = "--min_replicas 1 --quorum_tick_ms 100 --join_timeout_ms 1000"
        flags += f" --heartbeat_timeout_ms 1000 --bind [::]:{PORT}"
        self.start(["torchft_lighthouse", *flags.split()], PYTHONPATH=path())
        self.num_started = 0
        self.replicas = [self._replica() for _ in range(SIZE)]

    def _replica(self) -> subprocess.Popen[str]:
        self.num_started += 1
        words = [f"replica-{self.num_started}", f"http://localhost:{PORT}", BATCH_SIZE]
        return self.start([sys.executable, "-u", REPLICA, *words], OMP_NUM_THREADS="1", PYTHONPATH=path())

    def kill(self, draw: random.Random) -> bool:
        draw.choice(self.replicas).kill()
        return True

    def tend(self) -> None:
        super().tend()
        self.replicas = [each if each.poll() is None else self._replica() for each in self.replicas]


JOBS = {"supervised": Supervised, "torchft": Torchft}


def path() -> str:
    return os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])


@contextmanager
def running(kind: type[Supervised] | type[Torchft]) -> Iterator[Job]:
    with ExitStack() as cleanup:
        job = kind(cleanup.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm")))
        try:
            yield job
        finally:
            for process in job.processes:
                process.terminate()
            for process in job.processes:
                try:
                    process.wait(20)
                except subprocess.TimeoutExpired:
                    process.kill()


def measure(job: Job, minutes: float, every_s: float | None, draw: random.Random) -> dict[str, float]:
    """Return the steps and samples a minute from the first step on, and the kills and the steps after the last one."""
    job.wait(time.monotonic() + 120, first=True)
    if not job.newest:
        raise RuntimeError("no step in 120 s: run the job alone, to see why")
    first, samples, begin_s, kills, last = job.newest, job.samples, time.monotonic(), 0, job.newest
    end_s = begin_s + 60 * minutes
    next_s = begin_s + every_s if every_s else end_s
    while (now_s := time.monotonic()) < end_s:
        if now_s >= next_s:
            kills, next_s, last = kills + job.kill(draw), next_s + (every_s or 0), job.newest
        job.wait(min(end_s, next_s, now_s + 0.1))
        job.tend()
    rates = {"steps_a_minute": job.newest - first, "samples_a_minute": job.samples - samples}
    counts = {"kills": kills, "steps_after": job.newest - last}
    return {name: number / minutes for name, number in rates.items()} | counts


def main() -> None:
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=MINUTES.number, default=10, help="with kills, and at most 1 without")
    parser.add_argument("--every_s", type=positive, default=15, help="seconds from a kill to the next one")
    parser.add_argument("--jobs", nargs="+", choices=JOBS, default=[*JOBS])
    parser.add_argument("--output", type=output, help="write the numbers as JSON")
    args = parser.parse_args()
    results = {}
    for name in args.jobs:
        for every_s, minutes in ((None, min(1, args.minutes)), (args.every_s, args.minutes)):
            title = f"{name}, {f'a kill each {every_s} s' if every_s else 'no kills'}"
            with running(JOBS[name]) as job:
                results[title] = measure(job, minutes, every_s, random.Random(0))
            print(f"{title}: {results[title]}", flush=True)
            if args.output:
                write(args.output, results, **vars(args))
    rows = [[name, *(round(number) for number in [*row.values()][:3])] for name, row in results.items()]
    print(table(["", "steps a minute", "samples a minute", "kills"], rows))


if __name__ == "__main__":
    main()
