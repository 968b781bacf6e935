"""Complete runs of the doctor, alone and on ranks, and its findings on a device from child processes."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from collectives import doctor
from collectives.doctor import VERDICTS
from mpi_tests.helpers.cuda_on_host.load import SITE
from mpi_tests.helpers.doctor import examine
from mpi_tests.helpers.launch import ROOT, environment, find_mpirun, launch

pytestmark = pytest.mark.shares_cores

DOCTOR = ("python", "-m", "collectives.doctor")
GRAMMAR = re.compile(r"(?P<verdict>ok|note|problem) +(?P<topic>[a-z ]+)(?: \((?P<who>[^)]+)\))?: (?P<text>.+)")


def test_a_device(cuda, monkeypatch, tmp_path):
    monkeypatch.setenv("PYTHONPATH", f"{SITE}{os.pathsep}{ROOT}")
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidia0").touch()
    monkeypatch.setattr(doctor, "ROOT", tmp_path)
    monkeypatch.setenv("CUDA_ON_HOST_DEVICES", "2")
    devices = examine(doctor.cuda)
    assert [device.verdict for device in devices] == ["ok", "ok"]
    assert [device.text for device in devices] == [f"device {i}: CUDA on the host" for i in range(2)]
    monkeypatch.setenv("CUDA_ON_HOST_MEMORY_MB", "0")
    (broken,) = examine(doctor.cuda)
    assert broken.verdict == "problem"
    assert "OutOfMemoryError" in broken.text


def examined(result: subprocess.CompletedProcess) -> dict[str, str]:
    """Check each line of a run and its exit status; return the lines by topic."""
    assert "Traceback" not in result.stdout + result.stderr, result.stderr
    lines = [match for line in result.stdout.splitlines() if (match := GRAMMAR.fullmatch(line))]
    counts = [sum(line["verdict"] == verdict for line in lines) for verdict in VERDICTS]
    assert sum(counts) >= 3, result.stdout + result.stderr
    assert f"{counts[0]} problem, {counts[1]} note, {counts[2]} ok" in result.stdout
    assert (result.returncode == 0) == (counts[0] == 0), result.stdout
    assert all(" -> " in line["text"] for line in lines if line["verdict"] != "ok")
    return {line["topic"]: line[0] for line in lines}


def alone(*flags, python=sys.executable, **env) -> subprocess.CompletedProcess[str]:
    path = f"{Path(find_mpirun()).parent}{os.pathsep}{environment()['PATH']}"
    command = [python, "-m", "collectives.doctor", *map(str, flags)]
    surroundings = environment() | {"PATH": path} | env
    return subprocess.run(command, cwd=ROOT, env=surroundings, capture_output=True, text=True, timeout=300)


def test_alone():
    result = alone()
    topics = examined(result)
    assert topics["launching"].endswith("mpirun -n 2 starts two ranks that exchange messages")
    assert {"versions", "shared memory"} <= set(topics)
    assert result.stdout.splitlines()[-1].startswith("To examine ranks and hosts: mpirun -n 4 python -m")


def test_alone_with_a_setting_that_ends_every_program():
    topics = examined(alone(COLLECTIVES_TIMEOUT_S="abc"))
    assert topics["settings"].startswith("problem  settings: COLLECTIVES_TIMEOUT_S='abc' -> write seconds, as in 600")
    assert "launching" not in topics


def test_alone_with_nothing_installed(tmp_path):
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path], check=True)
    topics = examined(alone(python=tmp_path / "bin" / "python", PATH="/no/such/folder", PYTHONPATH=""))
    assert topics["launching"].startswith("problem  launching: there is no mpirun on the PATH")
    assert "is not installed -> pip install ." in topics["versions"]


def test_on_ranks():
    topics = examined(launch(3, *DOCTOR))
    assert re.match(r"ok       ranks: 3 exchange messages: ranks 0-2 on \S+$", topics["ranks"])
    assert "3 ranks on core" in topics["cores"]
    assert "process_vm_readv" in topics["memory of other ranks"]
    assert "3 ranks need 24 MiB" in topics["shared memory"]


HANG = """
import sys, time
if "collectives.doctor" in sys.orig_argv:
    time.sleep(1000)
"""
BRIEF = "from collectives import doctor; doctor.JOB_S = 6.0; raise SystemExit(doctor.main([]))"


def test_a_rank_that_hangs(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(HANG)
    hanging = ("-n", "1", "env", f"PYTHONPATH={tmp_path}", *DOCTOR)
    result = launch(1, "python", "-c", BRIEF, ":", *hanging)
    assert result.returncode != 0
    assert "Timeout (0:00:06)!" in result.stderr
    assert "in start_mpi" in result.stderr  # the place of the hang


def test_under_an_mpirun_of_another_mpi():
    """Each process is then a world of size 1."""
    topics = examined(alone(PMI_SIZE="2", PMI_RANK="0"))
    assert re.match(r"problem  ranks: rank 0 .*mpirun started 2 processes, but each is alone", topics["ranks"])
    other = alone(PMI_SIZE="2", PMI_RANK="1")
    assert other.stdout == ""
    assert re.match(r"rank 1 on \S+: .*mpirun started 2 processes", other.stderr)


def test_flags_that_cannot_be():
    result = alone("--json", "doctor.json")
    assert result.returncode == 2
    assert "error: unrecognized arguments: --json doctor.json; see --help" in result.stderr
