"""Training jobs whose ranks are killed or stopped, or whose host is lost, under `python -m training.supervise`."""

import os
import random
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from mpi_tests.helpers.launch import ROOT, end, environment, find_mpirun, watched
from mpi_tests.helpers.trained import config, flags, left_in
from mpi_tests.rig import AGENT, HOSTFILE, job_environment, on
from mpi_tests.rig import lose as lose_host

pytestmark = pytest.mark.shares_cores

SETTINGS = {"max_iters": 100, "eval_interval": 100, "checkpoint_interval": 10}


def words_of(folder: Path, **more) -> list[str]:
    return [
        *(sys.executable, "-m", "training"),
        *flags(config(2, out_dir=str(folder / "out"), checkpoint_dir=str(folder / "saved"), **SETTINGS, **more)),
    ]


def losses_in(folder: Path) -> dict[int, float]:
    """Return the losses by step; a step that was done again has its last one."""
    return {record["iter"]: record["loss"] for record in left_in(folder / "out").records if "loss" in record}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> dict[int, float]:
    folder = tmp_path_factory.mktemp("undisturbed")
    result = watched([find_mpirun(), "-n", 2, *words_of(folder)], environment(), 180)
    assert result.returncode == 0, result.stderr
    return losses_in(folder)


def ranks_in(folder: Path) -> list[int]:
    """Return the processes of the job's ranks."""
    mark, pids = str(folder / "saved").encode(), []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        words = path.read_bytes().split(b"\0") if path.exists() else []
        if mark in words and words[1:3] == [b"-m", b"training"]:
            pids.append(int(path.parent.name))
    return pids


def supervised(command: list[str], disturb, env=None, cwd=ROOT) -> str:
    """Run a supervisor, and `disturb` its job once it has reported step 25; return the output."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    lines, is_done = [], False
    with subprocess.Popen(command, cwd=cwd, env=env or environment(), start_new_session=True, **pipes) as process:
        try:
            for line in process.stdout:
                lines.append(line)
                if line.startswith("iter 25/") and not is_done:
                    is_done = True
                    disturb()
        finally:
            if process.poll() is None and sys.exc_info()[0]:
                end(process)
    assert process.returncode == 0, "".join(lines)
    return "".join(lines)


@pytest.mark.parametrize(
    ("number", "limits", "how"),
    [
        (signal.SIGKILL, [], "status "),
        pytest.param(signal.SIGSTOP, ["--silence_s", "8"], "no new step for 8 s", marks=pytest.mark.proof),
    ],
)
def test_a_rank_that_dies_or_stops_costs_the_steps_since_its_checkpoint(tmp_path, undisturbed, number, limits, how):
    launcher = [find_mpirun(), "-n", "2"]
    supervisor = [sys.executable, "-m", "training.supervise", *limits, "--", *launcher, *words_of(tmp_path)]
    output = supervised(supervisor, lambda: os.kill(random.choice(ranks_in(tmp_path)), number))
    assert f", with {how}" in output, output
    assert f"weights of {tmp_path}/saved/" in output, output
    losses = losses_in(tmp_path)
    assert losses.keys() == undisturbed.keys()
    np.testing.assert_allclose([*losses.values()], [*undisturbed.values()], rtol=1e-5)


@pytest.mark.proof
def test_a_lost_host_leaves_the_others_to_go_on(tmp_path, rig, undisturbed):
    """Two of the rig's hosts; the second one is lost, with all its processes and its memory.

    Each has written half of a snapshot; the first one has the other half, too, and nothing is on a disk.
    """
    hostfile, shell = tmp_path / "hosts", tmp_path / "shell"
    hostfile.write_text("".join(HOSTFILE.read_text().splitlines(keepends=True)[:2]).replace("2\n", "1\n"))
    shell.write_text(f'#!/bin/sh\n[ ! -e {tmp_path}/lost ] && exec {AGENT} "$@"\n')
    shell.chmod(0o755)

    def lose():
        (tmp_path / "lost").touch()
        lose_host("rig2")

    words = words_of(tmp_path, snapshot_interval=10)
    words[words.index("--checkpoint_interval") + 1] = "0"
    job = [find_mpirun(), "--hostfile", str(hostfile), "-n", "2", *words]
    supervisor = on("rig1", sys.executable, "-m", "training.supervise", "--remote_shell", shell, "--", *job)
    output = supervised(supervisor, lose, env=job_environment())
    assert "supervise: the next start is on rig1\n" in output, output
    assert "supervise: 1 of 2 ranks, and --layout auto in place of the command's layout\n" in output
    assert re.search(r"weights of /dev/shm/snapshots-\w+/\d+-step-\d0, ", output), output
    losses = losses_in(tmp_path)
    np.testing.assert_allclose([*losses.values()], [*undisturbed.values()], rtol=1e-5)
