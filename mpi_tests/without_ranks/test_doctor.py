"""The doctor's examinations where things are missing or broken."""

import json
import os
import re
import sys
import threading
import time
from pathlib import Path

import pytest

from collectives import environment as settings
from collectives.doctor import child, cuda, host, jobwide, launch, memory, network, software
from collectives.doctor.__main__ import written
from collectives.doctor.child import Ended
from collectives.doctor.finding import Finding, Setting, examine, note, ok, problem
from collectives.doctor.report import Report, merge, summary
from mpi_tests.helpers.doctor import found, said, script, verdicts
from mpi_tests.helpers.launch import ROOT

# --- examinations are isolated ---


def test_an_examination_that_raises_is_a_finding_beside_those_it_had():
    def good(setting):
        yield ok("fine")

    def bad_one(setting):
        yield ok("so far")
        raise OSError("gone\nfor good")

    def quits(setting):
        sys.exit("no more")
        yield

    first, second, failed, gone = examine("host", [good, bad_one, quits], Setting(), 30)
    assert first == Finding("ok", "fine", "", "good", "host")
    assert (second.text, failed.verdict, failed.topic) == ("so far", "note", "bad one")
    assert failed.text == "could not be examined (OSError: gone)"
    assert gone.text == "could not be examined (SystemExit: no more)"
    assert failed.remedy
    assert gone.remedy


def test_an_examination_that_hangs_is_a_finding_and_stops_no_other():
    over = threading.Event()

    def hangs(setting):
        yield ok("before")
        over.wait(60)

    def good(setting):
        yield ok("fine")

    before, late, fine = examine("job", [hangs, good], Setting(), 0.2)
    over.set()
    assert (before.text, fine.text) == ("before", "fine")
    assert (late.topic, late.verdict, late.text) == ("hangs", "note", "not examined after 0.2 s")


def test_a_finding_is_one_line():
    def wordy(setting):
        yield note("a\nb", "c\n\n d")

    (finding,) = found(wordy)
    (line,) = merge([Report(findings=[finding])])
    assert str(line) == "note     wordy: a b -> c d"


# --- children ---


def test_a_child_that_ends_well():
    ended = script("import sys; print('{\"a\": 1}'); print('not JSON'); print(2); print('why', file=sys.stderr)")
    assert (ended.how, ended.messages(), ended.errors) == ("", [{"a": 1}], "why\n")
    assert child.run(["cat"], 20, given="in").output == "in"


@pytest.mark.parametrize(
    ("last", "how"),
    [
        ("os.kill(os.getpid(), signal.SIGSEGV)", "ended by signal 11 (Segmentation fault)"),
        ("os._exit(3)", "ended with status 3"),
        ("raise KeyError(4)", "ended with status 1"),
    ],
)
def test_a_child_that_fails_has_still_said_what_it_said(last, how):
    ended = script(f'import os, signal\nprint(\'{{"so": "far"}}\', flush=True)\n{last}')
    assert (ended.how, ended.messages()) == (how, [{"so": "far"}])
    assert str(ended) == (f"{how} (KeyError: 4)" if "Key" in last else how)


@pytest.mark.parametrize("stubborn", [False, True])
def test_a_child_that_hangs_is_ended(tmp_path, monkeypatch, stubborn):
    monkeypatch.setattr(child, "TERMINATION_S", 0.5)
    deaf = "signal.signal(signal.SIGTERM, signal.SIG_IGN)" * stubborn
    body = f"import os, signal, time\n{deaf}\nprint(os.getpid(), flush=True)\ntime.sleep(60)"
    ended = script(body, limit_s=1.5)
    assert ended.how == "not over after 1.5 s"
    with pytest.raises(ProcessLookupError):
        os.kill(int(ended.output), 0)


def test_a_grandchild_that_stays_keeps_nobody_waiting():
    body = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(5)']); print(1)"
    began = time.monotonic()
    assert script(body).output == "1\n"
    assert time.monotonic() - began < 5


def test_a_child_that_cannot_be_started():
    ended = child.run(["/no/such/program"], 1)
    assert ended.how == "could not be started: [Errno 2] No such file or directory: '/no/such/program'"


def test_a_child_of_a_rank_is_in_a_job_of_its_own(monkeypatch):
    for name in ("OMPI_COMM_WORLD_SIZE", "PMIX_RANK", "PMI_FD", "SLURM_JOB_ID"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("OMPI_MCA_pml", "^ucx")
    fresh = child.fresh_environment()
    assert settings.launched_size() == 1
    assert fresh["OMPI_MCA_pml"] == "^ucx"
    assert not [name for name in fresh if name in ("OMPI_COMM_WORLD_SIZE", "PMIX_RANK", "PMI_FD", "SLURM_JOB_ID")]


# --- mpirun and mpi4py ---

OPEN_MPI, HYDRA = "mpirun (Open MPI) 5.0.11\n\nReport bugs", "HYDRA build details:\n    Version:       5.0.2\n"
INTEL = "Intel(R) MPI Library for Linux* OS, Version 2021.18.1 Build 2025"


@pytest.mark.parametrize(
    ("version", "library", "verdict", "words"),
    [
        (OPEN_MPI, "Open MPI v5.0.11", "ok", "is of Open MPI 5.0.11, mpi4py uses Open MPI v5.0.11"),
        (OPEN_MPI, "Open MPI v5.0.1", "note", "mpi4py uses Open MPI v5.0.1"),
        (OPEN_MPI, "MPICH 5.0.2", "problem", "is of Open MPI 5.0.11, mpi4py uses MPICH 5.0.2"),
        (HYDRA, "MPICH 5.0.2", "ok", "is of MPICH 5.0.2"),
        (HYDRA, "MVAPICH 5.0.2", "ok", "mpi4py uses MVAPICH 5.0.2"),
        (HYDRA, "Open MPI v5.0.2", "problem", "is of MPICH 5.0.2"),
        (INTEL, "Intel(R) MPI Library 2021.18.1", "ok", "is of Intel 2021.18.1"),
        ("srun 22.05", "Open MPI v5.0.11", "note", "is of an unknown kind"),
    ],
)
def test_whether_mpirun_and_mpi4py_are_of_one_mpi(version, library, verdict, words):
    finding = launch.same_mpi("mpirun", Ended("", version, ""), said({"library": library}))
    assert finding.verdict == verdict
    assert words in finding.text


def test_an_mpirun_or_an_mpi4py_that_does_not_work():
    loads, works = said({"library": "Open MPI v5.0.11"}), Ended("", OPEN_MPI, "")
    broken = Ended("ended with status 1", "", "Traceback (most recent call last):\n  File\nImportError: libmpi.so.40\n")
    finding = launch.same_mpi("mpirun", works, broken)
    assert "mpi4py does not load: ended with status 1 (ImportError: libmpi.so.40)" in finding.text
    assert finding.verdict == "problem"
    finding = launch.same_mpi("mpirun", Ended("ended by signal 11 (x)", "", ""), loads)
    assert (finding.verdict, finding.text) == ("problem", "mpirun does not work: ended by signal 11 (x)")


def test_no_mpirun(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    (finding,) = found(launch.mpirun)
    assert (finding.verdict, finding.text) == ("problem", "there is none on the PATH")
    (finding,) = found(launch.trial(Ended("", "", ""), None))
    assert finding.verdict == "problem"


@pytest.mark.parametrize(
    ("ended", "text", "remedy"),
    [
        (
            Ended("ended with status 1", "", "prterun has detected an attempt to run as root.\n\nWe\n"),
            "mpirun -n 2 does not work: ended with status 1 (prterun has detected an attempt to run as root.)",
            "hostfiles/mpi.env",
        ),
        (
            Ended("ended with status 1", "", "---\nThere are not enough slots available\n"),
            "mpirun -n 2 does not work: ended with status 1 (There are not enough slots available)",
            "--oversubscribe",
        ),
        (Ended("not over after 30 s", "", ""), "mpirun -n 2 does not work: not over after 30 s", "network interface"),
        (said({"failed": "each is alone"}, how="x"), "mpirun -n 2 does not work: each is alone", "install mpi4py"),
        (said({"report": 0}), "mpirun -n 2 does not work: its ranks have not found each other", "mpirun -n 2 hostname"),
    ],
)
def test_a_trial_that_fails(ended, text, remedy):
    (finding,) = found(launch.trial(ended, "mpirun"))
    assert (finding.verdict, finding.topic, finding.text) == ("problem", "launching", text)
    assert remedy in finding.remedy


@pytest.mark.parametrize(
    ("told", "words"),
    [
        ({"OMPI_COMM_WORLD_SIZE": "2", "SLURM_STEP_NUM_TASKS": "1"}, "Open MPI's mpirun"),
        ({"PMI_SIZE": "2", "MPI_LOCALNRANKS": "2"}, "Hydra's mpirun (MPICH or Intel MPI)"),
        ({"SLURM_STEP_NUM_TASKS": "2"}, "Slurm's srun"),
        ({}, "no launcher"),
    ],
)
def test_who_started_it(told, words):
    assert launch.launched(told) == words


def test_what_a_scheduler_allots(monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    monkeypatch.setenv("SLURM_NTASKS", "8")
    assert "in job 12 of Slurm, which allots 8 tasks" in found(launch.launcher)[0].text
    assert list(jobwide.allotted(8)) == []
    (finding,) = jobwide.allotted(2)
    assert finding.text == "Slurm allots 8 tasks (SLURM_NTASKS) to 2 ranks"


# --- the host ---


def root_with(tmp_path: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


@pytest.mark.parametrize(
    ("free_mib", "verdict", "words"),
    [
        (1, "problem", "has 1 MiB free of 64 MiB, 4 ranks need 32 MiB to begin with"),
        (60, "note", "and arrays from comm.empty may have 7 MiB a rank"),
        (4096, "ok", "and arrays from comm.empty may have 1016 MiB a rank"),
    ],
)
def test_shared_memory(tmp_path, monkeypatch, free_mib, verdict, words):
    (tmp_path / "dev/shm").mkdir(parents=True)
    monkeypatch.setattr(memory, "space", lambda folder: (64 << 20, free_mib << 20))
    (finding,) = found(memory.shared_memory, root=tmp_path, local_ranks=4)
    assert finding.verdict == verdict
    assert words in finding.text.replace("0.992 GiB", "1016 MiB")
    assert verdict == "ok" or "-o remount,size=" in finding.remedy


def test_no_shared_memory(tmp_path):
    (finding,) = found(memory.shared_memory, root=tmp_path)
    assert finding.verdict == "problem"
    assert finding.text == f"there is no {tmp_path}/dev/shm, 1 rank needs 8 MiB to begin with"
    assert "mount -t tmpfs -o size=16m" in finding.remedy


def test_space_is_that_of_the_file_system():
    size, free = memory.space(Path("/"))
    there = os.statvfs("/")
    assert size == there.f_blocks * there.f_frsize
    assert 0 <= free <= size


@pytest.mark.parametrize(("scope", "words"), [("1\n", "sysctl kernel.yama.ptrace_scope=0"), ("0\n", "SYS_PTRACE")])
def test_why_a_rank_may_not_read_another(tmp_path, scope, words):
    root_with(tmp_path, {"proc/sys/kernel/yama/ptrace_scope": scope})
    assert words in memory.tracing(Setting(root=tmp_path))
    assert "SYS_PTRACE" in memory.tracing(Setting(root=tmp_path / "without proc"))


def test_a_container_that_may_use_a_part_of_the_cores(tmp_path, monkeypatch):
    monkeypatch.setattr(settings, "cores", lambda: 8)
    root_with(tmp_path, {"sys/fs/cgroup/cpu.max": "250000 100000\n"})
    (finding,) = found(host.cores, root=tmp_path)
    assert (finding.verdict, finding.text) == ("note", "8, of which this container may use the time of 2.5")
    assert found(host.cores, root=tmp_path / "none") == [Finding("ok", "8", "", "cores", "job")]


def test_a_clock_that_is_slow_to_read(tmp_path):
    root_with(tmp_path, {host.CLOCKS: "hpet\n"})
    (finding,) = found(host.clock, root=tmp_path)
    assert finding.verdict == "note"
    assert finding.text.startswith("hpet, resolution ")
    assert verdicts(found(host.clock, root=tmp_path / "none")) == ["ok"]


def test_interfaces(tmp_path, monkeypatch):
    net = {"sys/class/net/eth0/speed": "25000\n", "sys/class/net/veth1/speed": "-1\n", "sys/class/net/lo/mtu": "1"}
    fabric = {"sys/class/infiniband/mlx5_0/ports/1/rate": "400 Gb/sec (4X NDR)\n"}
    root_with(tmp_path, net | fabric | {"sys/class/net/down0/mtu": "1"})
    monkeypatch.setattr(network, "address", {"eth0": "10.0.0.1", "veth1": "10.0.1.1"}.get)
    (finding,) = found(network.network, root=tmp_path)
    assert finding.text == (
        "eth0 10.0.0.1 (25 Gbit/s), veth1 10.0.1.1 (speed unknown), mlx5_0 port 1 (400 Gb/sec (4X NDR))"
    )
    (finding,) = found(network.network, root=tmp_path / "none")
    assert finding.verdict == "note"


def test_addresses_are_those_of_the_system():
    assert network.address("lo") == "127.0.0.1"
    assert network.address("no-such-if") == ""


@pytest.mark.parametrize(
    ("ended", "verdict"),
    [(Ended("ended with status 1", "", "gaierror"), "note"), (Ended("", "127.0.1.1\n", ""), "note")],
)
def test_a_host_name_that_leads_nowhere(monkeypatch, ended, verdict):
    monkeypatch.setattr(child, "run", lambda *args: ended)
    monkeypatch.setattr(network, "interfaces", lambda setting: [network.Interface("eth0", "10.0.0.1", None)])
    (finding,) = found(network.host_name)
    assert finding.verdict == verdict
    assert "/etc/hosts" in finding.remedy


# --- software ---


def test_packages_that_are_missing_or_too_many(monkeypatch):
    monkeypatch.setattr(software, "installed", lambda: {"numpy": "2", "cupy_cuda12x": "14", "cupy_cuda13x": "14"})
    texts = {finding.text for finding in found(software.versions) if finding.verdict == "problem"}
    assert texts == {
        "mpi4py is not installed",
        "ml_dtypes is not installed",
        "numba is not installed",
        "cupy_cuda12x and cupy_cuda13x overwrite each other",
    }


@pytest.mark.parametrize(
    ("ended", "verdict", "words"),
    [
        (
            Ended("ended with status 1", "", "RuntimeError: cannot cache function 'run': no locator"),
            "problem",
            "folder",
        ),
        (Ended("ended with status 1", "", "ImportError: llvmlite"), "problem", "ImportError: llvmlite"),
        (Ended("not over after 30 s", "", ""), "note", "has not compiled within 30 s"),
        (said({"cache": "/proc/no such folder"}), "note", "cannot write to /proc/no such folder"),
        (said({"cache": "/"}), "ok" if os.access("/", os.W_OK) else "note", "/"),
    ],
)
def test_numba(monkeypatch, ended, verdict, words):
    monkeypatch.setattr(child, "run", lambda *args: ended)
    (finding,) = found(software.numba)
    assert finding.verdict == verdict
    assert words in finding.text


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("COLLECTIVES_CHECK", "maybe", "COLLECTIVES_CHECK='maybe'"),
        ("COLLECTIVES_TIMEOUT_S", "-1", "COLLECTIVES_TIMEOUT_S='-1'"),
        ("COLLECTIVES_FAKE_NODES", "2", "COLLECTIVES_FAKE_NODES='2'"),
        ("COLLECTIVES_CUDA_AWARE", "yes", "COLLECTIVES_CUDA_AWARE='yes'"),
        ("COLLECTIVES_CORES", "0", "COLLECTIVES_CORES='0' must be a whole number from 1 to 65536"),
        ("COLLECTIVES_TIMEOUT", "5", "COLLECTIVES_TIMEOUT is no setting"),
    ],
)
def test_settings_that_cannot_be(monkeypatch, name, value, text):
    monkeypatch.setenv(name, value)
    (finding,) = found(software.settings)
    assert (finding.verdict, finding.text) == ("problem", text)
    assert finding.remedy
    if name == "COLLECTIVES_TIMEOUT":
        assert finding.remedy == "did you mean COLLECTIVES_TIMEOUT_S?"
    else:
        monkeypatch.setenv(name, "")
        assert verdicts(found(software.settings)) == ["ok"]


def test_every_setting_is_known():
    files = [path for folder in ("collectives", "models", "parallelism") for path in (ROOT / folder).rglob("*.py")]
    text = "".join(path.read_text() for path in [*files, ROOT / "train.py"])
    assert set(re.findall(r"COLLECTIVES_[A-Z]\w*", text)) == set(settings.SETTINGS)


def test_the_tuning_file(tmp_path, monkeypatch):
    assert verdicts(found(software.tuning)) == ["ok"]
    path = tmp_path / "tuning.json"
    monkeypatch.setenv("COLLECTIVES_TUNING", str(path))
    (finding,) = found(software.tuning)
    assert finding.verdict == "problem"
    assert "No such file" in finding.text
    path.write_text("{")
    (finding,) = found(software.tuning)
    assert "not JSON" in finding.text
    assert "make it anew" in finding.remedy


@pytest.mark.parametrize(
    ("value", "verdict"), [(None, "note"), ("all", "problem"), ("0", "problem"), ("2", "ok"), ("2,1", "ok")]
)
def test_threads(monkeypatch, value, verdict):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if value is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", value)
    assert verdicts(found(software.threads)) == [verdict]


# --- CUDA ---

GPU = {"device": 0, "name": "Fake GPU", "memory": 1 << 34, "mode": 0}


@pytest.mark.parametrize(
    ("ended", "hardware", "expected"),
    [
        (said(GPU, {"adds": True}), True, [("ok", "device 0: Fake GPU, 16 GiB")]),
        (said(GPU | {"mode": 3}, {"adds": True}), True, [("note", "its compute mode is exclusive to a process")]),
        (said(GPU, {"adds": False}), True, [("ok", "Fake GPU"), ("problem", "CuPy does not work on a device: wrong")]),
        (said(GPU, how="ended by signal 11 (x)"), True, [("ok", "Fake GPU"), ("problem", "ended by signal 11 (x)")]),
        (said({"driver": 0}), True, [("note", "no device is visible")]),
        (said(how="x", errors="cudaErrorInsufficientDriver"), False, [("ok", "cudaErrorInsufficientDriver")]),
        (said(how="x", errors="cudaErrorInsufficientDriver"), True, [("problem", "cudaErrorInsufficientDriver")]),
    ],
)
def test_devices(ended, hardware, expected):
    findings = list(cuda.devices(ended, hardware))
    assert verdicts(findings) == [verdict for verdict, _ in expected]
    assert all(words in finding.text for finding, (_, words) in zip(findings, expected, strict=True))


CHILDREN = {
    "right": ('print(\'{"ping": 4, "right": true}\')', "came back"),
    "wrong": ('print(\'{"ping": 4, "right": false}\')', "wrong numbers came back"),
    "silent": ("", "none came back"),
    "crash": ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "ended by signal 11"),
    "late crash": ('import os; print(\'{"ping": 4, "right": true}\', flush=True); os._exit(139)', "status 139"),
    "hang": ('import time; print(\'{"ping": 4, "right": true}\', flush=True); time.sleep(60)', "not over after 2 s"),
}


@pytest.mark.parametrize("kind", CHILDREN)
def test_what_a_ping_of_device_memory_shows(kind):
    body, words = CHILDREN[kind]
    ended = script(body, limit_s=2)
    plain, asked = cuda.aware(ended, asked=False), cuda.aware(ended, asked=True)
    assert words in plain.text
    assert words in asked.text
    if kind == "right":
        assert (plain.verdict, asked.verdict) == ("note", "ok")
        assert plain.remedy == "COLLECTIVES_CUDA_AWARE=1 gives it device memory"
    else:
        assert "go by way of pinned host memory" in plain.text
        assert (plain.verdict, asked.verdict, asked.remedy) == ("note", "problem", "unset COLLECTIVES_CUDA_AWARE")


@pytest.mark.parametrize("file", ["dev/nvidia0", "proc/driver/nvidia/gpus/0000:01:00.0"])
def test_a_device_without_cupy(tmp_path, monkeypatch, file):
    monkeypatch.setattr(cuda, "find_spec", lambda name: None)
    assert verdicts(found(cuda.cuda, root=tmp_path)) == ["ok"]
    (finding,) = found(cuda.cuda, root=root_with(tmp_path, {file: ""}))
    assert (finding.verdict, finding.text) == ("note", "there is an NVIDIA device, but no CuPy")


# --- reports of ranks ---


def reports(*cores: list[int], threads: int = 1, num_cores: int = 4) -> list[Report]:
    return [Report(rank, "h1", mine, num_cores, threads) for rank, mine in enumerate(cores)]


@pytest.mark.parametrize(
    ("of_host", "verdict", "text"),
    [
        (reports([0], [1]), "ok", "2 ranks on cores 0-1"),
        (reports([0], [0]), "problem", "2 ranks on core 0 of 4 there are"),
        (reports([0, 1, 2, 3], [0, 1, 2, 3]), "ok", "2 ranks on cores 0-3"),
        (reports(*[[0, 1]] * 3, num_cores=2), "note", "3 ranks on cores 0-1"),
        (reports([0, 1], [2, 3], threads=4), "note", "2 ranks on cores 0-3, computing with 8 threads"),
        (reports([5]), "ok", "1 rank on core 5"),
    ],
)
def test_crowding(of_host, verdict, text):
    (finding,) = found(jobwide.crowding_of(of_host))
    assert (finding.topic, finding.verdict, finding.text) == ("crowding", verdict, text)


def test_equal_findings_are_merged_and_others_listed():
    def of(rank, host, *findings):
        return Report(rank, host, findings=[*findings])

    shared = Finding("ok", "same", "", "mpi", "rank")
    odd = Finding("problem", "other", "mend it", "mpi", "rank")
    later = Finding("ok", "later", "", "zeal", "rank")
    disk = [Finding("ok", f"{size} GiB", "", "disk", "host") for size in (1, 2)]
    lines = merge(
        [
            of(0, "h1", disk[0], shared, later),
            of(1, "h1", shared, later),
            of(2, "h2", disk[0], shared, later),
            of(3, "h2", odd, later),
            of(4, "h3", disk[1], shared, later),
        ]
    )
    assert [str(line) for line in lines] == [
        "ok       disk (h1, h2): 1 GiB",
        "ok       disk (h3): 2 GiB",
        "ok       mpi (ranks 0-2,4): same",
        "problem  mpi (rank 3 on h2): other -> mend it",
        "ok       zeal (ranks 0-4): later",
    ]
    assert summary(lines) == "1 problem, 0 notes, 4 ok"
    assert lines[3].to_json()["ranks"] == [3]
    again = Report.from_json(json.loads(json.dumps(of(3, "h2", odd).to_json())))
    assert again == of(3, "h2", odd)


def test_what_goes_wrong_between_ranks():
    at = [{"at": "starts MPI"}, {"at": "waits for the others' reports"}]
    (finding,) = jobwide.together(said(*at, how="not over after 9 s"), [Report(0), Report(2)], 4)
    assert finding.verdict == "problem"
    assert finding.text == ("rank 0 waits for the others' reports: not over after 9 s (ranks 1,3 did not report)")
    (finding,) = jobwide.together(said({"failed": "no MPI", "remedy": "get one"}, how="x"), [Report(0)], 1)
    assert finding[:3] == ("problem", "rank 0 no MPI", "get one")
    (finding,) = jobwide.together(said(*at), [Report(0, "h1"), Report(1, "h1"), Report(2, "h2")], 3)
    assert finding[:2] == ("ok", "3 exchange messages: ranks 0-1 on h1, rank 2 on h2")


def test_hosts_whose_clocks_or_packages_differ():
    (finding,) = jobwide.apart([("h1", 100.2), ("h2", 103.5), ("h1", 100.0), ("h2", 107.0)])
    assert (finding.verdict, finding.text) == ("note", "h2 is 3.5 s ahead of h1")
    assert verdicts(jobwide.apart([("h1", 100.0), ("h2", 100.9)])) == ["ok"]
    assert list(jobwide.apart([("h1", 1.0), ("h1", 9.0)])) == []
    numpy = [ok(f"numpy {number}")._replace(topic="versions") for number in (1, 2)]
    one, other = Report(0, "h1", findings=numpy[:1]), Report(1, "h2", findings=numpy[1:])
    assert verdicts(jobwide.differing([one, other])) == ["note"]
    assert list(jobwide.differing([one, one])) == []


def test_pretended_nodes():
    assert jobwide.pretended(2, 4, 8).verdict == "note"
    assert jobwide.pretended(2, 4, 6).verdict == "problem"


def test_a_document_that_cannot_be_written(tmp_path):
    path = tmp_path / "none" / "doctor.json"
    (line,) = written(path, merge([Report(findings=[problem("a", "b")])]))
    reason = f"--json {path} can't be written (No such file or directory)"
    assert str(line) == f"problem  json: {reason} -> pass another path"
