"""The doctor's checks on systems with missing or broken parts."""

import os
import subprocess
import sys
import time

import pytest

from collectives import doctor
from collectives.doctor import Ended, Finding, RankReport, cores, fail, job_findings, show, single_copy
from mpi_tests.helpers.doctor import examine, verdicts
from mpi_tests.helpers.launch import ROOT, environment

# --- checks are isolated ---


def test_a_check_that_raises_is_a_finding_beside_those_it_had():
    def bad_one(limit_s):
        yield Finding("ok", "so far")
        raise OSError("gone\nfor good")

    def quits(limit_s):
        sys.exit("no more")
        yield

    first, failed = examine(bad_one)
    assert first == Finding("ok", "so far", "", "bad one")
    assert (failed.verdict, failed.topic, failed.text) == (
        "note",
        "bad one",
        "could not be examined (OSError: gone)",
    )
    assert failed.remedy
    (finding,) = examine(quits)
    assert finding.text == "could not be examined (SystemExit: no more)"


def test_a_finding_is_one_line():
    (finding,) = examine(lambda limit_s: [Finding("note", "a\nb", "c\n\n d")])
    assert (finding.text, finding.remedy) == ("a b", "c d")


# --- children ---


def test_a_child_that_ends_well():
    result = doctor.run_child("import sys; print('out'); print('why', file=sys.stderr)", 20)
    assert result == Ended("", "out\n", "why\n")


@pytest.mark.parametrize(
    ("last", "how"),
    [
        ("os.kill(os.getpid(), signal.SIGSEGV)", "ended by signal 11 (Segmentation fault)"),
        ("os._exit(3)", "ended with status 3"),
        ("raise KeyError(4)", "ended with status 1"),
    ],
)
def test_a_child_that_fails_has_still_said_what_it_said(last, how):
    result = doctor.run_child(f"import os, signal\nprint('so far', flush=True)\n{last}", 20)
    assert (result.how, result.output) == (how, "so far\n")
    assert str(result) == (f"{how} (KeyError: 4)" if "Key" in last else how)


@pytest.mark.parametrize("stubborn", [False, True])
def test_a_child_that_hangs_is_ended(monkeypatch, stubborn):
    monkeypatch.setattr(doctor, "TERMINATION_S", 0.5)
    deaf = "signal.signal(signal.SIGTERM, signal.SIG_IGN)" * stubborn
    body = f"import os, signal, time\n{deaf}\nprint(os.getpid(), flush=True)\ntime.sleep(60)"
    result = doctor.run_child(body, 1.5)
    assert result.how == "not finished after 1.5 s"
    with pytest.raises(ProcessLookupError):
        os.kill(int(result.output), 0)


def test_a_grandchild_that_stays_keeps_nobody_waiting():
    body = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(5)']); print(1)"
    began = time.monotonic()
    assert doctor.run_child(body, 20).output == "1\n"
    assert time.monotonic() - began < 5


def test_a_child_that_cannot_be_started():
    result = doctor.run_child("", 1, launcher=["/no/such/program"])
    assert result.how == "could not be started: [Errno 2] No such file or directory: '/no/such/program'"


@pytest.mark.skipif(not hasattr(os, "pipe2"), reason="needs pipes that keep writes apart")
def test_what_a_rank_answers_is_one_write():
    """Python writes pieces where PYTHONUNBUFFERED is set, and mpirun may put another rank's between them."""
    reader, writer = os.pipe2(os.O_DIRECT)
    env = environment() | {"PYTHONUNBUFFERED": "1"}
    subprocess.run([sys.executable, "-c", doctor.BARRIER], stdout=writer, env=env, cwd=ROOT, timeout=60, check=True)
    assert os.read(reader, 100) == b"size 1\n"
    os.close(reader)
    os.close(writer)


# --- a host ---


def ends(monkeypatch, result):
    monkeypatch.setattr(doctor, "run_child", lambda *args: result)


def test_no_mpirun(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    (finding,) = examine(doctor.launching)
    assert (finding.verdict, finding.text) == ("problem", "there is no mpirun on the PATH")
    monkeypatch.setenv("PMI_SIZE", "2")
    assert not examine(doctor.launching)


@pytest.mark.parametrize(
    ("result", "text", "remedy"),
    [
        (
            Ended("ended with status 1", "", "prterun has detected an attempt to run as root.\n\nWe\n"),
            "ended with status 1 (prterun has detected an attempt to run as root.)",
            "hostfiles/small.env",
        ),
        (
            Ended("ended with status 1", "", "---\nThere are not enough slots available\n"),
            "ended with status 1 (There are not enough slots available)",
            "--oversubscribe",
        ),
        (Ended("not finished after 30 s", "", ""), "not finished after 30 s", "network interface"),
        (
            Ended("ended with status 2", "", "error: mpirun started 2 processes, but each is alone in"),
            "ended with status 2 (error: mpirun started 2 processes, but each is alone in)",
            "install mpi4py for the MPI of mpirun",
        ),
        (Ended("", "size 1\nsize 1\n", ""), "its ranks do not see each other", "mpirun -n 2 hostname"),
    ],
)
def test_a_trial_that_fails(monkeypatch, result, text, remedy):
    monkeypatch.setattr(doctor.shutil, "which", lambda name: "mpirun")
    ends(monkeypatch, result)
    (finding,) = examine(doctor.launching)
    assert (finding.verdict, finding.text) == ("problem", f"mpirun -n 2 does not work: {text}")
    assert remedy in finding.remedy
    ends(monkeypatch, Ended("", "size 2\nsize 2\n", ""))
    assert verdicts(examine(doctor.launching)) == ["ok"]


@pytest.mark.parametrize(
    ("free_mib", "verdict", "words"),
    [
        (1, "problem", "has 1 MiB free, 4 ranks need 32 MiB to begin with"),
        (4096, "ok", "and arrays from comm.empty may have 1016 MiB a rank"),
    ],
)
def test_shared_memory(tmp_path, monkeypatch, free_mib, verdict, words):
    (tmp_path / "dev/shm").mkdir(parents=True)
    monkeypatch.setattr(doctor, "ROOT", tmp_path)
    monkeypatch.setenv("MPI_LOCALNRANKS", "4")
    monkeypatch.setattr(doctor, "free_mib", lambda folder: free_mib)
    (finding,) = examine(doctor.shared_memory)
    assert finding.verdict == verdict
    assert words in finding.text
    assert verdict == "ok" or "-o remount,size=" in finding.remedy


def test_no_shared_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(doctor, "ROOT", tmp_path)
    monkeypatch.setenv("MPI_LOCALNRANKS", "1")
    (finding,) = examine(doctor.shared_memory)
    assert finding.verdict == "problem"
    assert finding.text == f"there is no {tmp_path}/dev/shm, 1 rank needs 8 MiB to begin with"
    assert "mount -t tmpfs -o size=16m" in finding.remedy


def test_free_memory_is_that_of_the_file_system(tmp_path):
    status = os.statvfs(tmp_path)
    assert doctor.free_mib(tmp_path) == pytest.approx(status.f_bavail * status.f_frsize / 2**20, abs=100)


def test_packages_that_are_missing(monkeypatch):
    class Distribution:
        def __init__(self, name):
            self.metadata, self.version = {"Name": name}, "14"

    monkeypatch.setattr(doctor, "distributions", lambda: [Distribution("numpy")])
    texts = {finding.text for finding in examine(doctor.versions) if finding.verdict == "problem"}
    assert texts == {
        "mpi4py is not installed",
        "ml_dtypes is not installed",
        "numba is not installed",
    }


GPU = "device 0: Fake GPU"


@pytest.mark.parametrize(
    ("result", "has_gpu", "expected"),
    [
        (Ended("", f"{GPU}\n", ""), True, [("ok", GPU)]),
        (
            Ended("ended with status 1", f"{GPU}\n", "AssertionError: wrong sums"),
            True,
            [("ok", GPU), ("problem", "wrong sums")],
        ),
        (
            Ended("ended by signal 11 (x)", "", ""),
            True,
            [("problem", "CuPy does not work on a device: ended by")],
        ),
        (Ended("", "", ""), True, [("note", "no device is visible")]),
        (Ended("ended with status 1", "", "cudaErrorInsufficientDriver"), False, []),
        (Ended("ended with status 1", "", "cudaErrorInsufficientDriver"), True, [("problem", "InsufficientDriver")]),
    ],
)
def test_devices(monkeypatch, tmp_path, result, has_gpu, expected):
    monkeypatch.setattr(doctor, "ROOT", tmp_path)
    monkeypatch.setattr(doctor, "find_spec", lambda name: True)
    if has_gpu:
        (tmp_path / "dev").mkdir()
        (tmp_path / "dev/nvidia0").touch()
    ends(monkeypatch, result)
    findings = examine(doctor.cuda)
    assert verdicts(findings) == [verdict for verdict, _ in expected]
    assert all(words in finding.text for finding, (_, words) in zip(findings, expected, strict=True))


@pytest.mark.parametrize("file", ["dev/nvidia0", "proc/driver/nvidia/gpus/0000:01:00.0"])
def test_a_device_without_cupy(tmp_path, monkeypatch, file):
    monkeypatch.setattr(doctor, "find_spec", lambda name: None)
    monkeypatch.setattr(doctor, "ROOT", tmp_path)
    assert not examine(doctor.cuda)
    (tmp_path / file).parent.mkdir(parents=True)
    (tmp_path / file).touch()
    (finding,) = examine(doctor.cuda)
    assert (finding.verdict, finding.text) == ("note", "there is an NVIDIA device, but no CuPy")


# --- reports of ranks ---


def report(rank=0, host="h1", cores=(0,), num_cores=4, threads=1, reads=True, findings=()) -> RankReport:
    return RankReport(rank, host, cores, num_cores, threads, reads, findings)


def reports(*bound: list[int], **more) -> list[RankReport]:
    return [report(rank, cores=mine, **more) for rank, mine in enumerate(bound)]


@pytest.mark.parametrize(
    ("of_host", "verdict", "text"),
    [
        (reports([0], [1]), "ok", "2 ranks on cores 0-1"),
        (reports([0], [0]), "problem", "2 ranks on core 0 of 4 there are"),
        (reports([0, 1, 2, 3], [0, 1, 2, 3]), "ok", "2 ranks on cores 0-3"),
        (reports(*[[0, 1]] * 3, num_cores=2), "note", "3 ranks on cores 0-1: oversubscribed"),
        (reports([0, 1], [2, 3], threads=4), "note", "2 ranks on cores 0-3, computing with 8 threads"),
        (reports([5]), "ok", "1 rank on core 5"),
    ],
)
def test_cores(of_host, verdict, text):
    finding = cores(of_host)
    assert (finding.verdict, finding.text) == (verdict, text)


@pytest.mark.parametrize(("scope", "words"), [("1\n", "sysctl kernel.yama.ptrace_scope=0"), ("0\n", "SYS_PTRACE")])
def test_why_a_rank_may_not_read_another(tmp_path, monkeypatch, scope, words):
    (tmp_path / "scope").write_text(scope)
    monkeypatch.setattr(doctor, "PTRACE_SCOPE", tmp_path / "scope")
    assert words in single_copy(False).remedy
    assert single_copy(True).verdict == "ok"
    monkeypatch.setattr(doctor, "PTRACE_SCOPE", tmp_path / "none")
    assert "SYS_PTRACE" in single_copy(False).remedy


def test_findings_of_several_hosts(capsys):
    disk = [Finding("ok", f"{size} GiB", "", "disk") for size in (1, 2)]
    odd = Finding("problem", "other", "mend it", "mpi")
    job = [
        report(0, "h1", findings=disk[:1]),
        report(1, "h1", cores=[1]),
        report(2, "h2", findings=[disk[0], odd]),
        report(3, "h2", cores=[1], reads=False),
        report(4, "h3", findings=disk[1:]),
    ]
    assert show([*job_findings(job)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "ok       ranks: 5 exchange messages: ranks 0-1 on h1, ranks 2-3 on h2, rank 4 on h3"
    assert [line.partition(":")[0] for line in lines[1:6]] == [
        "ok       cores (h1)",
        "ok       memory of other ranks (h1)",
        "ok       cores (h2)",
        "note     memory of other ranks (h2)",
        "ok       cores (h3)",
    ]
    assert lines[6:] == [
        "ok       disk (h1, h2): 1 GiB",
        "problem  mpi (h2): other -> mend it",
        "ok       disk (h3): 2 GiB",
        "1 problem, 1 note, 7 ok",
    ]
    assert show([*job_findings(job[:1])]) == 0


def test_what_goes_wrong_between_ranks(monkeypatch, capsys):
    late = Finding("problem", "not finished after 9 s", "look there")
    monkeypatch.setattr(doctor.platform, "node", lambda: "h1")
    monkeypatch.setenv("PMI_RANK", "0")
    assert fail(late, []) == 1
    assert capsys.readouterr().out.splitlines()[0] == f"problem  ranks: rank 0 on h1: {late.text} -> look there"
    monkeypatch.setenv("PMI_RANK", "1")
    assert fail(late, []) == 1
    assert capsys.readouterr() == ("", f"rank 1 on h1: {late.text}\n")
