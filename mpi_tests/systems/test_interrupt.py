"""Ctrl-C: programs keep their results so far, both without mpirun and with it, which gives its ranks no time."""

import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from collectives.runtime.choose.auto import parse_tuning
from mpi_tests.helpers.launch import ROOT, environment, find_mpirun, launch
from mpi_tests.helpers.trained import config, flags
from training.reports.jsonl import draw_missing

pytestmark = pytest.mark.shares_cores

LAUNCHERS = {"alone": 0, "mpirun": 2}
INTERRUPTED = 130


def interrupted(num_ranks: int, words: list[str], is_time: Callable[[str], bool]) -> subprocess.CompletedProcess:
    """Start a command, with or without ranks, and interrupt it when its output so far satisfies a condition."""
    launcher = [find_mpirun(), "-n", str(num_ranks)] if num_ranks else []
    command, env = [*launcher, sys.executable, *words], environment() | {"COLLECTIVES_LINKS": "0"}
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder, name) for name in ("stdout", "stderr")]
        with outputs[0].open("w") as stdout, outputs[1].open("w") as stderr:
            process = subprocess.Popen(
                command, cwd=ROOT, env=env, stdout=stdout, stderr=stderr, preexec_fn=take_interrupts
            )
        try:
            deadline = time.monotonic() + 100
            while not is_time(outputs[0].read_text()):
                assert process.poll() is None, outputs[1].read_text()
                assert time.monotonic() < deadline, outputs[0].read_text()
                time.sleep(0.05)
            process.send_signal(signal.SIGINT)
            process.wait(60)
        finally:
            process.terminate()
            process.wait(10)
        return subprocess.CompletedProcess(command, process.returncode, *(path.read_text() for path in outputs))


def take_interrupts() -> None:
    """Undo that a shell lets its jobs in the background ignore them."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def check_ended(result, launcher: str) -> None:
    assert "Traceback" not in result.stderr
    if launcher == "alone":
        assert (result.returncode, result.stderr.splitlines()[-1]) == (INTERRUPTED, "interrupted")
    else:
        assert result.returncode != 0


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_the_benchmark_leaves_what_it_has_measured(tmp_path, launcher):
    """The interrupt comes during the second size."""
    file = tmp_path / "r.json"
    words = ["-m", "collectives.bench", "-A", "ring", "-b", "8", "-e", "64M", "-f", str(1 << 23), "--json", str(file)]
    result = interrupted(LAUNCHERS[launcher], [*words, "-n", "300"], lambda output: file.exists())
    check_ended(result, launcher)
    (row, *_) = json.loads(file.read_text())["results"]
    assert (row["bytes"], row["wrong"], len(row["samples_us"])) == (8, 0, 300)
    assert {path.name for path in tmp_path.iterdir()} == {"r.json"}


@pytest.mark.proof
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_tuning_leaves_what_it_has_measured(tmp_path, launcher):
    file = tmp_path / "tuning.json"
    words = ["-m", "collectives.bench", "--tune", str(file), "-b", "8", "-e", "64M", "-n", "200"]
    result = interrupted(LAUNCHERS[launcher], words, lambda output: file.exists())
    check_ended(result, launcher)
    tuning = parse_tuning(file.read_text(), str(file))
    assert {case.collective for case in tuning.fastest} == {"all_reduce"}
    env = {"COLLECTIVES_TUNING": str(file)}
    assert launch(2, "python", "examples/sum.py", env=env).returncode == 0


def test_a_simulation_shows_what_it_has_predicted():
    words = ["-m", "collectives.schedule.simulate", "--exact", "--topology", "16x8", "-b", "8", "-e", "32K", "--all"]
    result = interrupted(0, words, lambda output: "predicted exactly" in output)
    assert result.returncode == INTERRUPTED
    assert result.stderr.splitlines()[-1] == "interrupted: entries marked - were not predicted"
    head, *rows = result.stdout.splitlines()[2:]
    assert head.split() == ["us", "8", "64", "512", "4K", "32K"]
    cells = [cell for row in rows for cell in row.split()[1:]]
    assert len(cells) == len(rows) * 5
    assert "-" in cells


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_training_run_leaves_its_metrics_and_their_picture(tmp_path, launcher):
    words = ["train.py", *flags(config(max(1, LAUNCHERS[launcher]), out_dir=str(tmp_path), max_iters=10**6))]
    result = interrupted(LAUNCHERS[launcher], words, lambda output: "iter 3/" in output)
    check_ended(result, launcher)
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [record["iter"] for record in records if "loss" in record][:3] == [1, 2, 3]
    draw_missing(str(tmp_path))  # as the next start does: some launchers give ranks no time to draw
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert not (tmp_path / "model.safetensors").exists()


def test_a_job_whose_ranks_are_interrupted_ends_with_one_line(tmp_path):
    """The ranks receive the signal, as from MPICH's mpirun; rank 0 writes first."""
    script, file = tmp_path / "script.py", tmp_path / "written"
    script.write_text(f"""
import os, signal, time
import collectives
comm = collectives.world()
comm.barrier()
try:
    if comm.rank:
        os.kill(os.getpid(), signal.SIGINT)
    time.sleep(1 if comm.rank else 0.5)
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(60)
finally:
    if comm.rank == 0:
        time.sleep(3)  # longer than rank 1 takes to tell that it was interrupted
        open({str(file)!r}, "w")
""")
    result = launch(2, "python", script)
    assert result.returncode != 0
    assert file.exists()
    assert [line for line in result.stderr.splitlines() if line == "interrupted" or "Traceback" in line] == [
        "interrupted"
    ]


@pytest.mark.parametrize("call", ["comm.all_reduce(x)", "time.sleep(60)", "comm.mpi.Barrier()"])
def test_an_interrupt_of_one_rank_is_one_of_rank_0(tmp_path, call):
    """Rank 0 writes its files, unless it is in a call of MPI's own that does not return."""
    script, file = tmp_path / "script.py", tmp_path / "written"
    script.write_text(f"""
import os, signal, time
import numpy as np
import collectives
comm = collectives.world()
x = np.ones(10)
comm.all_reduce(x)
try:
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGINT)
    while True:
        {call}
finally:
    if comm.rank == 0:
        open({str(file)!r}, "w")
""")
    result = launch(3, "python", script, env={"COLLECTIVES_CALLS": "0"}, timeout=60)
    assert result.returncode != 0
    assert "Traceback" not in result.stderr
    assert "rank 1 was interrupted: rank 0 ends the job\n" in result.stderr
    assert file.exists() == ("Barrier" not in call)
    last = "interrupted" if file.exists() else "rank 1 was interrupted, and rank 0 does not end; this ends the job"
    assert last in result.stderr.splitlines()
