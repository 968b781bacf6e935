"""Whole runs of the doctor, alone and on ranks, and what it finds of a device by children on ranks."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from collectives.doctor import cuda, run
from collectives.doctor.finding import VERDICTS
from mpi_tests.helpers.doctor import found, verdicts
from mpi_tests.helpers.launch import ROOT, environment, find_mpirun, launch

DOCTOR = ("python", "-m", "collectives.doctor")
GRAMMAR = re.compile(r"(?P<verdict>ok|note|problem) +(?P<topic>[a-z ]+)(?: \((?P<who>[^)]+)\))?: (?P<text>.+)")


@pytest.fixture
def fake_gpu(monkeypatch, tmp_path):
    """A stand-in for CuPy, for this process to find and for children to use."""
    for name, value in environment().items():
        monkeypatch.setenv(name, value)
    (tmp_path / "cupy.py").write_text("from mpi_tests.helpers.fake_cupy import *")
    monkeypatch.setenv("PATH", str(Path(find_mpirun()).parent), prepend=os.pathsep)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{ROOT}")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.syspath_prepend(tmp_path)
    return lambda kind: monkeypatch.setenv("FAKE_GPU", kind)


def test_a_device_that_mpi_reads(fake_gpu, monkeypatch):
    fake_gpu("aware")
    monkeypatch.setenv("COLLECTIVES_CUDA_AWARE", "1")
    device, ipc, aware = found(cuda.cuda)
    assert verdicts([device, ipc, aware]) == ["ok", "ok", "ok"], (device, ipc, aware)
    assert device.text == "device 0: Fake GPU, 16 GiB"
    assert "MPI is CUDA-aware" in aware.text


def test_a_device_that_mpi_does_not_read(fake_gpu):
    fake_gpu("blind")
    _, ipc, aware = found(cuda.cuda)
    assert ipc.verdict == "ok"
    assert re.match(r"MPI is not CUDA-aware: a ping of device memory: ended .*; arrays go by way of pinned", aware.text)


def test_a_device_that_is_broken(fake_gpu, monkeypatch):
    fake_gpu("broken")
    monkeypatch.setattr(cuda, "find_mpirun", lambda: None)
    mode, broken, ipc, aware = found(cuda.cuda)
    assert verdicts([mode, broken, ipc, aware]) == ["note", "problem", "note", "note"]
    assert "cudaErrorNotSupported" in ipc.text
    assert "not tried, without an mpirun" in aware.text


def examined(ended: subprocess.CompletedProcess) -> dict[str, str]:
    """The lines of a run by topic, after a look at each, and at the exit status."""
    assert "Traceback" not in ended.stdout + ended.stderr, ended.stderr
    lines = [match for line in ended.stdout.splitlines() if (match := GRAMMAR.fullmatch(line))]
    counts = [sum(line["verdict"] == verdict for line in lines) for verdict in VERDICTS]
    assert sum(counts) >= 8, ended.stdout + ended.stderr
    assert f"{counts[1]} note" in ended.stdout
    assert f", {counts[0]} ok" in ended.stdout
    assert (ended.returncode == 0) == (counts[2] == 0), ended.stdout
    assert all(" -> " in line["text"] for line in lines if line["verdict"] != "ok")
    return {line["topic"]: line[0] for line in lines}


def alone(*flags, python=sys.executable, **env) -> subprocess.CompletedProcess[str]:
    path = f"{Path(find_mpirun()).parent}{os.pathsep}{environment()['PATH']}"
    command = [python, "-m", "collectives.doctor", *map(str, flags)]
    surroundings = environment() | {"PATH": path} | env
    return subprocess.run(command, cwd=ROOT, env=surroundings, capture_output=True, text=True, timeout=300)


def test_alone(tmp_path):
    ended = alone("--json", tmp_path / "doctor.json")
    topics = examined(ended)
    assert topics["launching"] == "ok       launching: mpirun -n 2 starts two ranks that exchange messages"
    assert {topic.__name__.replace("_", " ") for topic in (*run.OF_HOST, *run.OF_RANK)} <= set(topics)
    assert {"mpi library", "threads in mpi", "memory of other ranks"} <= set(topics)
    assert ended.stdout.splitlines()[-1].startswith("To examine ranks and hosts: mpirun -n 4 python -m")
    written = json.loads((tmp_path / "doctor.json").read_text())["findings"]
    assert len(written) == sum(bool(GRAMMAR.fullmatch(line)) for line in ended.stdout.splitlines())
    assert {finding["topic"] for finding in written} == set(topics)
    assert [path.name for path in tmp_path.iterdir()] == ["doctor.json"]


def test_alone_with_nothing_installed(tmp_path):
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path], check=True)
    topics = examined(alone(python=tmp_path / "bin" / "python", PATH="/no/such/folder", PYTHONPATH=""))
    assert topics["mpirun"].startswith("problem  mpirun: there is none on the PATH")
    assert topics["numba"].startswith("problem  numba: does not compile")
    assert topics["launching"].startswith("problem  launching: not tried")
    assert "is not installed -> pip install ." in topics["versions"]


def test_on_ranks_of_which_one_differs(tmp_path):
    one = ("-n", "1", "env", "COLLECTIVES_CHECK=maybe", *DOCTOR)
    ended = launch(2, *DOCTOR, "--json", tmp_path / "doctor.json", ":", *one)
    topics = examined(ended)
    assert re.match(r"ok       ranks: 3 exchange messages: ranks 0-2 on \S+$", topics["ranks"])
    assert re.match(r"problem  settings \(rank 2 on \S+\): COLLECTIVES_CHECK='maybe' -> write 1", topics["settings"])
    assert re.search(r"^ok       settings \(ranks 0-1 on \S+\): .*COLLECTIVES_", ended.stdout, re.MULTILINE)
    assert "memory of other ranks (ranks 0-2): the system lets" in topics["memory of other ranks"]
    assert "3 ranks need 24 MiB" in topics["shared memory"]
    written = json.loads((tmp_path / "doctor.json").read_text())["findings"]
    (wrong,) = [finding for finding in written if finding["verdict"] == "problem"]
    assert (wrong["topic"], wrong["ranks"]) == ("settings", [2])


CRASH = """
import os, signal, sys, threading, time
def kill():
    while not getattr(sys.modules.get("mpi4py.MPI"), "Is_initialized", bool)():
        time.sleep(0.001)
    os.kill(os.getpid(), signal.SIGSEGV)
if "collectives.doctor.ranks" in sys.orig_argv:
    threading.Thread(target=kill, daemon=True).start()
"""


def test_a_rank_that_crashes(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(CRASH)
    crashing = ("-n", "1", "env", f"PYTHONPATH={tmp_path}", *DOCTOR, "--timeout", "1")
    ended = launch(1, *DOCTOR, "--timeout", "1", ":", *crashing)
    topics = examined(ended)
    assert re.search(r"^rank 1 on \S+: .+: ended by signal 11 \(Segmentation fault\)$", ended.stderr, re.MULTILINE)
    assert re.match(r"problem  ranks: rank 0 .+: not over after 6 s \(rank 1 did not report\) -> ", topics["ranks"])


def test_under_an_mpirun_of_another_mpi():
    """Each process then finds itself alone."""
    topics = examined(alone(PMI_SIZE="2", PMI_RANK="0"))
    assert re.match(r"problem  ranks: rank 0 .*mpirun started 2 processes, but each is alone", topics["ranks"])
    other = alone(PMI_SIZE="2", PMI_RANK="1")
    assert other.stdout == ""
    assert re.match(r"rank 1 on \S+: .*mpirun started 2 processes", other.stderr)


def test_flags_that_cannot_be():
    ended = alone("--timeout", "soon")
    assert ended.returncode == 2
    assert "argument --timeout: 'soon' must be a number above 0 and at most 3600 s; see --help" in ended.stderr
