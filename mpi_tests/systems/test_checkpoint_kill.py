"""A rank is killed while it writes a checkpoint, or the disk is full: there is always a complete one to resume from."""

import os
import random
import signal
import subprocess
import time

import pytest
import torch

from mpi_tests.helpers.launch import ROOT, end, environment, find_mpirun, watched
from mpi_tests.helpers.played import ALONE
from mpi_tests.helpers.saving import state
from parallelism.checkpoint import Checkpoint, CheckpointLoader
from parallelism.checkpoint.folders import complete_checkpoints

KILLS = int(os.environ.get("KILLS", "3"))
NUM_RANKS = 2


def run_until_killed(directory, draw):
    """Start the ranks, and kill one a while after they have written a checkpoint.

    Returns the last step reported as complete, and whether the run noticed the death of the previous one.
    """
    command = [find_mpirun(), "-n", str(NUM_RANKS), "python", "-m", "mpi_tests.helpers.saving", str(directory)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=ROOT, env=environment(), start_new_session=True, **pipes) as run:
        pids, lines = {}, []
        for line in run.stdout:
            lines.append(line)
            word, number, *pid = line.split()
            if word == "rank":
                pids[int(number)] = int(*pid)
            if word == "whole":
                break
        assert len(pids) == NUM_RANKS, "".join([*lines, run.stderr.read()])
        time.sleep(draw.uniform(0, 0.3))
        os.kill(draw.choice([*pids.values()]), signal.SIGKILL)
        stdout, _ = end_of(run)
    last = max(int(line.split()[1]) for line in (*lines, *stdout.splitlines()) if line.startswith("whole "))
    return last, any("a run that wrote there has died" in line for line in lines)


def end_of(run):
    try:
        return run.communicate(timeout=180)
    except subprocess.TimeoutExpired:
        end(run)
        raise


def test_a_whole_checkpoint_is_always_left(tmp_path):
    draw, last = random.Random(0), 0
    for _ in range(KILLS):
        last_reported, noticed = run_until_killed(tmp_path, draw)
        assert last_reported > last
        assert noticed == (last > 0)
        path = CheckpointLoader(tmp_path, ALONE, say=lambda line: None).newest()
        assert path == complete_checkpoints(tmp_path)[-1]  # it is complete, as its name claims
        checkpoint = Checkpoint(path)
        last = checkpoint.index.step
        assert last_reported <= last <= last_reported + 1  # a checkpoint reported as complete stays
        part = state(0, parts=NUM_RANKS)
        checkpoint.fill([part])
        assert torch.equal(part.tensor, state(last, parts=NUM_RANKS).tensor)


def test_a_full_disk(tmp_path):
    """A disk of 10 MiB has room for two checkpoints of 4 MiB; its mount is invisible to other processes."""
    mount = f"mount -t tmpfs -o size=10m tmpfs {tmp_path}"
    alone = ["unshare", "--mount", "sh", "-c"]
    try:
        subprocess.run([*alone, mount], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("only root may mount a small disk")
    save = f"{find_mpirun()} -n {NUM_RANKS} python -m mpi_tests.helpers.saving {tmp_path}"
    result = watched([*alone, f"{mount} && {save}; ls {tmp_path}"], environment(), timeout=180)
    assert f"{tmp_path}/00003-step-3.unfinished/rank-" in result.stderr
    assert "No space left on device" in result.stderr
    assert result.stdout.splitlines()[-3:] == ["00001-step-1", "00002-step-2", "lock"]
