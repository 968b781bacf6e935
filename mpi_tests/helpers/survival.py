"""Training runs that lose ranks or hosts, and go on: without them, or started again by `training.supervise`."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from threading import Timer
from typing import NamedTuple

from mpi_tests.helpers.launch import ROOT, TERMINATION_S, environment, find_mpirun
from mpi_tests.rig import AGENT, HOSTFILE, Rig, job_environment, lose, on
from parallelism.checkpoint.folders import MEMORY, complete_checkpoints, snapshot_folder

TINY = (
    "--data LICENSE --warmup_iters 2 --eval_interval 1000 --block_size 64 --n_layer 4 --n_head 4 --n_embd 64 "
    "--sample_tokens 1 --checkpoint_interval 5 --out_dir="
)
LIMIT_S = 200.0
SUPERVISE = ["-m", "training.supervise"]
# How a run goes on, by name: what comes before mpirun, its flags, and the module that it starts.
WAYS = {
    "shrink": ([], ["--with-ft", "ulfm"], "training"),
    "shrink-forked": ([], ["--with-ft", "ulfm"], "training.forked"),
    "restart": ([*SUPERVISE, "--"], [], "training"),
    "fork": ([*SUPERVISE, "--"], [], "training.forked"),
}
GOES_ON = "ranks continue", "supervise: the job has failed"
STEP = re.compile(r"iter (\d+)/\d+ \| loss")


def is_open_mpi() -> bool:
    return "Open MPI" in subprocess.run([find_mpirun(), "--version"], text=True, capture_output=True).stdout


class Kill(NamedTuple):
    """The death of a rank: the latest step before it, the first one after it, and the seconds in between.

    `saved` is the step of the newest checkpoint or snapshot that was complete when the rank died.
    """

    before: int
    after: int
    seconds: float
    saved: int


class Outcome(NamedTuple):
    kills: list[Kill]
    lines: list[str]
    status: int

    @property
    def val_loss(self) -> float:
        """Return the last loss, which has 4 decimals."""
        return float(re.findall(r"val loss (\S+)", "\n".join(self.lines))[-1])


class Cluster:
    """A rig of which each host but the first may be lost, with its processes and its memory; `folder` is the job's."""

    def __init__(self, rig: Rig, folder: Path):
        self.left, self.folder, self.shell = rig.names[1:], folder, folder / "shell"
        self.shell.write_text(f'#!/bin/sh\n[ ! -e {folder}/lost-"$1" ] && exec {AGENT} "$@"\n')
        self.shell.chmod(0o755)

    def supervised(self, num_ranks: int, words: Sequence[str]) -> list[str]:
        """Return the command of a job on all hosts, and of its supervisor on the first one."""
        supervisor = [sys.executable, "-u", *SUPERVISE, "--remote_shell", self.shell, "--"]
        job = [find_mpirun(), "--hostfile", HOSTFILE, "-n", num_ranks, sys.executable, "-u", "-m", *words]
        return on("rig1", *supervisor, *job)

    def lose(self, draw: random.Random) -> None:
        self.left.remove(host := draw.choice(self.left))
        (self.folder / f"lost-{host}").touch()
        lose(host)


def train(
    num_ranks: int,
    flags: str,
    folder: Path,
    kill_after: Sequence[int] = (),
    draw: random.Random | None = None,
    way: str = "shrink",
    cluster: Cluster | None = None,
) -> Outcome:
    """Train, with checkpoints in a folder, and kill a random rank after each of these steps, within 0.3 s.

    On a cluster it is a host that is lost, whatever the way.  A job that takes longer than LIMIT_S is killed: its last
    loss is missing then.
    """
    draw = draw or random.Random(0)
    words = [*TINY.split(), "--checkpoint_dir", str(folder), *flags.split()]
    supervisor, own, module = WAYS[way]
    command = [sys.executable, "-u", *supervisor] if supervisor else []
    command += [find_mpirun(), *own, "-n", str(num_ranks), sys.executable, "-u", "-m", module, *words]
    if cluster:
        command = cluster.supervised(num_ranks, [module, *words])
    env = job_environment() if cluster else environment()
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT, env=env
    ) as process:
        assert process.stdout
        limit = Timer(LIMIT_S, process.terminate)
        limit.start()
        kills, lines, todo, latest, saved, died_s = [], [], list(kill_after), 0, 0, 0.0
        goes_on = False
        for line in process.stdout:
            lines.append(line.rstrip("\0\n"))
            goes_on |= any(words in line for words in GOES_ON)
            if not (step := STEP.match(line)):
                continue
            if died_s and goes_on:
                kills.append(Kill(latest, int(step[1]), time.monotonic() - died_s, saved))
                died_s = 0.0
            latest = int(step[1])
            if todo and not died_s and latest >= todo[0]:
                todo.pop(0)
                time.sleep(0.3 * draw.random())
                saved = newest_step(folder)
                if cluster:
                    cluster.lose(draw)
                else:
                    os.kill(draw.choice(ranks_of(process.pid)), signal.SIGKILL)
                died_s, goes_on = time.monotonic(), False
        limit.cancel()
        status = process.wait(TERMINATION_S)
    return Outcome(kills, lines, status)


def newest_step(folder: Path) -> int:
    """Return the step of the newest complete checkpoint in a folder, or snapshot beside it; 0 if there is none."""
    paths = chain(*map(complete_checkpoints, (folder, snapshot_folder(Path(MEMORY), folder))))
    return max((int(path.name.rpartition("-")[2]) for path in paths), default=0)


def ranks_of(parent: int) -> list[int]:
    """Return the processes that the mpirun has started which is a process, or its child."""
    ranks = []
    for child in map(int, Path(f"/proc/{parent}/task/{parent}/children").read_text().split()):
        words = Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0")
        ranks += [child] if words[1:3] == [b"-u", b"-m"] else ranks_of(child)
    return ranks
