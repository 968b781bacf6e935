"""SIGUSR1 to training while its ranks start, and after its last step; in the middle of a run: test_end_to_end.py."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mpi_tests.helpers.launch import ROOT, environment, find_mpirun, ranks_with
from mpi_tests.helpers.trained import config, flags

pytestmark = pytest.mark.skipif(not Path("/proc/self/cmdline").exists(), reason="needs /proc")


@pytest.mark.parametrize("saves", [True, False])
def test_a_signal_while_ranks_start_waits_until_they_can_save(tmp_path, saves):
    """The signal arrives while torch is imported; it ends a run that saves no checkpoints."""
    saving = {"checkpoint_dir": str(tmp_path / "checkpoints")} if saves else {}
    endless = flags(config(2, **saving, max_iters=10**6, eval_interval=10**6))
    command = ["timeout", "100", find_mpirun(), "-n", "2", sys.executable, "train.py", *endless]
    ends = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with subprocess.Popen(command, cwd=ROOT, env=environment(), text=True, **ends) as run:
        assert run.stdout.readline() == "2 ranks are starting\n"
        rank = ranks_with(endless)[0]
        assert "torch" not in Path(f"/proc/{rank}/maps").read_text()
        os.kill(rank, signal.SIGUSR1)
        output = run.stdout.read()
    assert (run.returncode == 0) == saves, output
    assert run.returncode != 124, output  # the status of `timeout`
    assert ("SIGUSR1: the run ends with a checkpoint of step 1" in output) == saves


def test_signals_after_the_last_step_change_nothing(tmp_path):
    words = flags(config(2, checkpoint_dir=str(tmp_path / "checkpoints"), max_iters=2, eval_interval=2))
    command = ["timeout", "100", find_mpirun(), "-n", "2", sys.executable, "train.py", *words]
    ends = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with subprocess.Popen(command, cwd=ROOT, env=environment(), text=True, **ends) as run:
        for line in run.stdout:
            if line.startswith("iter 2/2 | val loss"):
                break
        num_signals = 0
        while ranks := ranks_with(words):
            for rank in ranks:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(rank, signal.SIGUSR1)
                    num_signals += 1
            time.sleep(0.02)
        output = run.stdout.read()
    assert num_signals > 2
    assert run.returncode == 0, output
