"""The decision whether MPI receives device memory: settings, the library's answer, and the doctor's trial."""

import ctypes
import json
import platform
import shutil
import subprocess
from pathlib import Path

import pytest

from collectives import doctor as checks
from collectives.doctor import Ended
from collectives.job import cuda_aware, environment
from mpi_tests.helpers.cuda_on_host.load import SITE
from mpi_tests.helpers.doctor import examine, verdicts
from mpi_tests.helpers.launch import ROOT

OPEN_MPI = "int MPIX_Query_cuda_support(void) {{ return {}; }}"
MPICH = "int MPIX_GPU_query_support(int type, int *answer) {{ *answer = type == 0 && {}; return {}; }}"


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    monkeypatch.setenv("COLLECTIVES_LINKS", str(tmp_path / "links"))
    monkeypatch.delenv("COLLECTIVES_CUDA_AWARE", raising=False)
    cuda_aware.automatic.cache_clear()
    yield tmp_path / "links"
    cuda_aware.automatic.cache_clear()


@pytest.fixture
def build(tmp_path):
    """Return a function that compiles a C library and returns its path."""
    if shutil.which("cc") is None:
        pytest.skip("needs a C compiler")

    def library(source):
        path = tmp_path / f"libmpi-{len(list(tmp_path.iterdir()))}.so"
        subprocess.run(["cc", "-shared", "-fPIC", "-xc", "-", "-o", path], input=source, text=True, check=True)
        return path

    return library


@pytest.fixture
def answers(monkeypatch, build):
    """Return a function that makes a library with the given source the loaded MPI library."""

    def use(source):
        path = build(source)
        monkeypatch.setattr(cuda_aware, "loaded_library", lambda: path)
        monkeypatch.setattr(cuda_aware, "library", lambda: "Some MPI 1.0")

    return use


@pytest.mark.parametrize(
    ("source", "answer"),
    [
        (OPEN_MPI.format(1), True),
        (OPEN_MPI.format(0), False),
        (MPICH.format(1, 0), True),
        (MPICH.format(0, 0), False),
        (MPICH.format(1, 7), False),
        (OPEN_MPI.format(0) + MPICH.format(1, 0), False),
        ("int MPI_Send(void) { return 0; }", None),
    ],
)
def test_what_a_library_answers(build, source, answer):
    assert cuda_aware.supports_cuda(build(source)) is answer


def test_the_library_that_is_loaded():
    """It is the one loaded by mpi4py; no wheel is built with CUDA."""
    path = cuda_aware.loaded_library()
    assert str(path) in Path("/proc/self/maps").read_text()
    assert hasattr(ctypes.CDLL(str(path)), "MPI_Send")
    assert not cuda_aware.supports_cuda(path)


@pytest.mark.parametrize(
    ("source", "failure", "is_used", "reason"),
    [
        (OPEN_MPI.format(1), "", True, "have exchanged some through Some MPI 1.0"),
        (OPEN_MPI.format(1), None, False, "Some MPI 1.0 is built with CUDA, but untried on"),
        (OPEN_MPI.format(1), "ended by signal 11", False, "failed on {}: ended by signal 11"),
        (OPEN_MPI.format(0), "", False, "Some MPI 1.0 is built without CUDA"),
        ("int nothing;", "", False, "Some MPI 1.0 does not say whether it reads device memory"),
    ],
)
def test_the_decision_and_its_reason(answers, capsys, source, failure, is_used, reason):
    answers(source)
    if failure is not None:
        cuda_aware.save_trial("Some MPI 1.0", failure)
    decision = cuda_aware.cuda_awareness()
    assert decision.is_used is is_used
    assert reason.format(platform.node()) in decision.reason
    assert capsys.readouterr().err == f"{decision}\n"
    cuda_aware.cuda_awareness()
    assert capsys.readouterr().err == ""


def test_only_rank_0_prints_the_reason(answers, capsys, monkeypatch):
    answers(OPEN_MPI.format(0))
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "1")
    assert not cuda_aware.cuda_awareness().is_used
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("value", ["0", "1"])
def test_a_setting_asks_no_library(monkeypatch, capsys, value):
    monkeypatch.setenv("COLLECTIVES_CUDA_AWARE", value)
    monkeypatch.setattr(cuda_aware, "loaded_library", lambda: 1 / 0)
    assert cuda_aware.cuda_awareness() == (value == "1", f"COLLECTIVES_CUDA_AWARE={value}")
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("value", ["auto", ""])
def test_auto_is_the_default(monkeypatch, value):
    monkeypatch.setenv("COLLECTIVES_CUDA_AWARE", value)
    assert environment.mpi_reads_device_memory() is None


def test_a_trial_is_of_a_host_and_a_library(folder, monkeypatch):
    cuda_aware.save_trial("A 1", "")
    assert cuda_aware.load_trial("A 1") == ""
    assert cuda_aware.load_trial("A 2") is None
    monkeypatch.setattr(platform, "node", lambda: "another")
    assert cuda_aware.load_trial("A 1") is None
    (path,) = folder.iterdir()
    assert json.loads(path.read_text())["mpi"] == "A 1"


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"failure": 3}', '"failure"'])
def test_a_broken_file_is_none(text):
    cuda_aware.save_trial("A 1", "")
    cuda_aware.trial_file("A 1").write_text(text)
    assert cuda_aware.load_trial("A 1") is None


def test_nothing_is_kept_where_that_is_said(monkeypatch, folder):
    monkeypatch.setenv("COLLECTIVES_LINKS", "0")
    assert "COLLECTIVES_CUDA_AWARE=1" in cuda_aware.save_trial("A 1", "")
    assert cuda_aware.load_trial("A 1") is None
    assert not folder.exists()


# --- the doctor ---


@pytest.fixture
def doctor(monkeypatch):
    """Replace child processes of the doctor: `ended` is their outcome, `started` lists their launchers' arguments."""
    started = []

    def run_child(program, limit_s, launcher=()):
        started.append(launcher[1:])
        return doctor.ended

    monkeypatch.setattr(checks, "find_spec", lambda name: True)
    monkeypatch.setattr(checks, "run_child", run_child)
    monkeypatch.setattr(checks.shutil, "which", lambda name: f"/bin/{name}")
    doctor = type("Doctor", (), {"ended": Ended("", "size 2\nsize 2\n", ""), "started": started})
    return doctor


@pytest.mark.parametrize(
    ("result", "verdict", "failure"),
    [
        (Ended("", "size 2\nsize 2\n", ""), "ok", ""),
        (Ended("", "size 1\nsize 1\n", ""), "note", "its ranks do not see each other"),
        (Ended("ended by signal 11 (Segmentation fault)", "", ""), "note", "ended by signal 11 (Segmentation fault)"),
        (Ended("not finished after 30 s", "", ""), "note", "not finished after 30 s"),
    ],
)
def test_the_doctor_tries_and_keeps_the_result(answers, doctor, result, verdict, failure):
    answers(OPEN_MPI.format(1))
    doctor.ended = result
    (finding,) = examine(checks.device_memory_by_mpi)
    assert (finding.verdict, finding.topic) == (verdict, "device memory by mpi")
    assert doctor.started == [["-n", "2"]]
    assert cuda_aware.load_trial("Some MPI 1.0") == failure
    assert cuda_aware.cuda_awareness().is_used is (not failure)


def test_the_doctor_tries_nothing_that_a_library_denies(answers, doctor):
    answers(OPEN_MPI.format(0))
    (finding,) = examine(checks.device_memory_by_mpi)
    assert verdicts([finding]) == ["ok"]
    assert finding.text.endswith("Some MPI 1.0 is built without CUDA")
    assert doctor.started == []


def test_mpich_is_asked_once_it_has_started(answers, doctor, monkeypatch):
    """It ends a process that asks before."""
    calls = []
    answers(MPICH.format(0, 0))
    monkeypatch.setattr(cuda_aware, "library", lambda: "MPICH 5.0.2")
    monkeypatch.setattr(checks.launch, "start_mpi", lambda: calls.append("start"))
    monkeypatch.setattr(cuda_aware, "supports_cuda", lambda path: calls.append("support"))
    assert verdicts(examine(checks.device_memory_by_mpi)) == ["ok"]
    assert calls == ["start", "support"]


def test_a_rank_starts_no_job(answers, doctor, monkeypatch):
    answers(OPEN_MPI.format(1))
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    (finding,) = examine(checks.device_memory_by_mpi)
    assert finding.verdict == "note"
    assert cuda_aware.DOCTOR in finding.text
    cuda_aware.save_trial("Some MPI 1.0", "")
    assert verdicts(examine(checks.device_memory_by_mpi)) == ["ok"]
    assert doctor.started == []


def test_two_ranks_exchange_memory_of_devices(answers, cuda, monkeypatch):
    """The trial runs on the stand-in, whose device memory any MPI can read."""
    answers(OPEN_MPI.format(1))
    monkeypatch.delenv("COLLECTIVES_CUDA_AWARE")
    monkeypatch.setenv("PYTHONPATH", f"{SITE}:{ROOT}")
    (finding,) = examine(checks.device_memory_by_mpi, limit_s=120)  # the stand-in may have to be compiled
    assert finding.verdict == "ok", finding
    assert cuda_aware.load_trial("Some MPI 1.0") == ""
