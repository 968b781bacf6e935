"""train.py as a user starts it: the few end-to-end runs in `make test` besides with_ranks/test_train.py."""

import contextlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from mpi_tests.helpers.launch import ROOT, environment, find_mpirun, launch, ranks_with, watched
from mpi_tests.helpers.trained import SMALL, VALIDATED, check_same, config, flags, left_in, plain_training

LAST = SMALL.max_iters
SLOW_IMPORTS = ("torch._dynamo", "sympy")  # 2 s and 0.5 s, acceptable only with --compile


def test_a_run_has_the_losses_of_one_process_and_leaves_its_files(tmp_path):
    words = flags(config(2, out_dir=str(tmp_path)))
    result = launch(2, "python", "-X", "importtime", "train.py", *words, timeout=300)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "import time:" in result.stderr
    assert not [name for name in SLOW_IMPORTS if name in result.stderr]
    check_same(left_in(tmp_path), plain_training())
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "config.json",
        "config.toml",
        "loss.png",
        "meta.json",
        "metrics.jsonl",
        "model.safetensors",
    ]
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert result.stdout.startswith("2 ranks are starting\n")
    iterations = [line.split("|")[0].strip() for line in result.stdout.splitlines() if "grad norm" in line]
    assert iterations == [f"iter {i}/{LAST}" for i in range(1, LAST + 1)]
    assert result.stdout.count("val loss") == len(VALIDATED)
    assert f"{LAST}/{LAST} [" not in result.stdout  # no progress bar


def test_help_is_printed_once():
    result = launch(2, "python", "train.py", "--help")
    assert result.returncode == 0
    assert result.stdout.count("usage: train.py") == 1
    assert "mpirun -n 2 python -m training" in result.stdout


def test_a_progress_bar_is_for_terminals():
    assert "3/3 [" in on_a_terminal(2, "train.py", *flags(config(2, max_iters=3)))
    assert "0/2 [" in on_a_terminal(2, "-m", "collectives.bench", "-e", "32", "-n", "1")  # 2 sizes


def test_one_rank_tells_a_terminal_from_a_file():
    """A launcher may give the rank a pseudo-terminal."""
    program = "-c", "from collectives.job import environment; print('on terminal', environment.on_terminal())"
    assert "on terminal True" in on_a_terminal(1, *program)
    assert "on terminal False" in launch(1, sys.executable, *program).stdout


def on_a_terminal(ranks, *program):
    """Run a program on a pseudo-terminal; return its output."""
    command = [find_mpirun(), "-n", str(ranks), sys.executable, *program]
    screen, terminal = os.openpty()
    ends = {"stdin": terminal, "stdout": terminal, "stderr": terminal}
    with subprocess.Popen(command, cwd=ROOT, env=environment(), **ends) as run:
        os.close(terminal)
        output = b""
        with contextlib.suppress(OSError):  # a closed pseudo-terminal raises it
            while part := os.read(screen, 1 << 16):
                output += part
        os.close(screen)
        assert run.wait(60) == 0, output.decode()
    return output.decode()


@pytest.mark.skipif(not Path("/proc/self/cmdline").exists(), reason="needs /proc")
def test_a_signal_ends_a_run_with_a_checkpoint(tmp_path):
    """One rank receives the signal at the first step; another layout resumes the run."""
    saving = {"checkpoint_dir": str(tmp_path / "checkpoints")}
    endless = flags(config(2, **saving, max_iters=10**6, eval_interval=10**6, resume="auto"))
    command = ["timeout", "100", find_mpirun(), "-n", "2", sys.executable, "train.py", *endless]
    ends = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with subprocess.Popen(command, cwd=ROOT, env=environment(), text=True, **ends) as run:
        start = ""
        for line in run.stdout:
            if line.startswith("iter 1/"):
                os.kill(ranks_with(endless)[-1], signal.SIGUSR1)
                break
            start += line
        output = run.stdout.read()
    assert run.returncode == 0, output
    assert f"no complete checkpoint in {tmp_path}/checkpoints, so the run begins with step 1\n" in start
    step = int(re.search(r"SIGUSR1: the run ends with a checkpoint of step (\d+)", output)[1])
    layout = {"pp": 2, "num_micro_batches": 2, "zero_stage": 3}
    words = flags(config(1, **saving, **layout, max_iters=step + 1, resume="auto"))
    result = launch(2, "python", "-X", "importtime", "train.py", *words, timeout=300)
    assert f"iter {step + 1}/{step + 1} " in result.stdout, result.stderr
    assert "so the run begins" not in result.stdout
    assert not [name for name in SLOW_IMPORTS if name in result.stderr]


def test_the_planners_command_runs_as_it_stands(tmp_path):
    model = "n_layer = 1\nn_head = 1\nn_embd = 8\nblock_size = 8\n"
    (tmp_path / "run.toml").write_text(f"{model}max_iters = 1\nsample_tokens = 1\nval_fraction = 0.1\nout_dir = ''")
    (tmp_path / "hosts").write_text("localhost\nlocalhost\n")
    (tmp_path / "a text").write_text("To be, or not to be. " * 100)
    machine = "--fabric 100gbe --gpus 2 --tflops 0.1 --memory 1 --hostfile"
    files = f"--config {tmp_path}/run.toml --data '{tmp_path}/a text'"
    path = {"PATH": f"{Path(find_mpirun()).parent}:{Path(sys.executable).parent}:{environment()['PATH']}"}
    command = f"python -m parallelism.planner {machine} {tmp_path}/hosts {files} | tail -n 1 | bash -x"
    result = watched(["bash", "-c", command], environment() | path, 120)
    assert result.returncode == 0, result.stderr
    assert "a text: 2,100 tokens" in result.stdout
    assert "iter 1/1 | val loss" in result.stdout, result.stderr
