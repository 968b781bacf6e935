"""`python -m training.forked`: ranks that a server has forked are those of `python -m training`, and leave nothing."""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from mpi_tests.helpers.forked import FORKED
from mpi_tests.helpers.launch import ROOT, end, environment, find_mpirun, watched
from mpi_tests.helpers.trained import config, flags, left_in
from training import forked

pytestmark = [
    pytest.mark.shares_cores,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="forks ranks on Linux only"),
]

SETTINGS = {"max_iters": 5, "eval_interval": 5}
ENDLESS = ["--max_iters", "100000", "--eval_interval", "100000"]


def processes(*words):
    """Return the processes whose command line has these words one after the other."""
    mark, pids = b"\0".join(word.encode() for word in words) + b"\0", []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if mark in path.read_bytes():
                pids.append(int(path.parent.name))
        except OSError:
            continue
    return pids


def children(pid):
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def state(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0]
    except FileNotFoundError:
        return ""


def has_ended(pid):
    return state(pid) in ("", "Z")


@pytest.fixture
def variables(monkeypatch):
    """Yield the environment of jobs with a server of their own, which is ended."""
    monkeypatch.setenv("PLAIN_RANKS", "1")  # these tests say themselves which ranks are forks
    monkeypatch.setenv("PYTHON_TEST", str(os.getpid()))
    own = environment() | {"PYTHON_TEST": str(os.getpid())}
    yield own
    for pid in servers():
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def servers():
    """Return the processes of this test's servers, and of their forks."""
    mark, pids = f"PYTHON_TEST={os.getpid()}\0".encode(), []
    for pid in processes("-m", forked.SERVER):
        with suppress(OSError):  # another test's fork has exited
            pids += [pid] if mark in Path(f"/proc/{pid}/environ").read_bytes() else []
    return pids


def words_of(folder, *more, module="training.forked"):
    run = flags(config(2, out_dir=str(folder), **SETTINGS))
    return [find_mpirun(), "-n", "2", sys.executable, "-m", module, *run, *more]


def test_forks_compute_what_other_ranks_do(tmp_path, variables):
    ends = []
    for name, module in (("plain", "training"), ("first", "training.forked"), ("second", "training.forked")):
        result = watched(words_of(tmp_path / name, module=module), variables, 120)
        assert result.returncode == 0, result.stderr
        assert result.stderr == ""
        ends.append([line for line in result.stdout.splitlines() if not line.startswith("iter ")])
    assert len(servers()) == 1
    plain, *others = [losses_in(tmp_path / name) for name in ("plain", "first", "second")]
    for losses, lines in zip(others, ends[1:], strict=True):
        assert len(lines) == len(ends[0])
        np.testing.assert_array_equal(losses, plain)


def losses_in(folder):
    return [record["loss"] for record in left_in(folder).records if "loss" in record]


def test_bad_input_ends_with_its_status(tmp_path, variables):
    result = watched(words_of(tmp_path, "--tp", "3"), variables, 120)
    assert result.returncode == 2
    assert "error: pp=1 x sp=1 x tp=3" in result.stderr


ENDS = """
import atexit, sys, threading, time
import collectives
comm = collectives.world()
def late():
    time.sleep(0.3)
    print("thread", flush=True)
atexit.register(print, "exit of", *sys.argv[1:])
threading.Thread(target=late).start()
sys.stdout.write("main ")
file = open({file!r}, "w")
file.write("kept")
{last}
"""


def test_a_script_ends_as_it_does_alone(tmp_path, variables):
    script, file = tmp_path / "script.py", tmp_path / "left_open"
    for last, status in (("", 0), ("sys.exit(3)", 3), ("sys.exit('seven')", 1), ("comm.mpi.Abort(5)", 5)):
        script.write_text(ENDS.format(file=str(file), last=last))
        for start in ([], FORKED):
            result = watched([find_mpirun(), "-n", "1", sys.executable, *start, script, "a", "script"], variables, 60)
            assert result.returncode == status, result.stderr
            assert result.stdout == ("" if status == 5 else "main thread\nexit of a script\n")
            assert ("seven" in result.stderr) == ("seven" in last)
            assert file.read_text() == ("" if status == 5 else "kept")


@pytest.mark.parametrize("victim", ["fork", "stub", "server"])
def test_none_outlives_the_others(tmp_path, variables, victim):
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    command = words_of(tmp_path, *ENDLESS)
    with subprocess.Popen(command, cwd=ROOT, env=variables, start_new_session=True, **pipes) as process:
        try:
            lines = [process.stdout.readline() for _ in range(12)]
            forks = [pid for server in servers() for pid in children(server)]
            assert len(forks) == 2, lines
            (server,) = {*servers()} - {*forks}
            stubs = [pid for pid in children(process.pid) if pid in processes("-m", "training.forked")]
            os.kill({"fork": forks[0], "stub": stubs[0], "server": server}[victim], signal.SIGKILL)
            output = process.communicate(timeout=60)[0]
        finally:
            if process.poll() is None:
                end(process)
    assert process.returncode, output
    deadline = time.monotonic() + 10
    while left := [pid for pid in (*forks, *stubs) if Path(f"/proc/{pid}").exists()]:
        assert time.monotonic() < deadline, left
        time.sleep(0.05)


def test_a_server_outlives_a_rank_whose_two_processes_end_at_once(tmp_path, variables):
    """The server learns of all ends in one go, of one rank's fork first, and of the other's last."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(
        words_of(tmp_path, *ENDLESS), cwd=ROOT, env=variables, start_new_session=True, **pipes
    ) as process:
        for line in process.stdout:
            if line.startswith("iter 2/"):
                break
        forks = [pid for server in servers() for pid in children(server)]
        (server,) = {*servers()} - {*forks}
        stubs = [pid for pid in children(process.pid) if pid in processes("-m", "training.forked")]
        os.kill(server, signal.SIGSTOP)
        while state(server) != "T":  # until then, it may learn of the first end alone
            time.sleep(0.01)
        for pid in (forks[0], *stubs, *forks[1:]):
            os.kill(pid, signal.SIGKILL)
            while not has_ended(pid):
                time.sleep(0.01)
        process.communicate(timeout=60)
        os.kill(server, signal.SIGCONT)
    result = watched(words_of(tmp_path / "next"), variables, 60)
    assert result.returncode == 0, result.stderr
    assert {*servers()} == {server}


def test_signals_reach_the_forks(tmp_path, variables):
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    command = words_of(tmp_path / "out", *ENDLESS, "--checkpoint_dir", str(tmp_path / "saved"))
    with subprocess.Popen(command, cwd=ROOT, env=variables, start_new_session=True, **pipes) as process:
        try:
            for line in process.stdout:
                if line.startswith("iter 3/"):
                    stub = next(pid for pid in children(process.pid) if pid in processes("-m", "training.forked"))
                    os.kill(stub, signal.SIGUSR1)
                    break
            output = process.communicate(timeout=60)[0]
        finally:
            if process.poll() is None:
                end(process)
    assert process.returncode == 0, output
    assert "SIGUSR1: the run ends with a checkpoint of step " in output


def test_a_server_has_imported_what_a_run_needs_and_not_started_mpi(tmp_path):
    script = """
import sys
from training import fork_server
fork_server.import_all()
from mpi4py import MPI
assert not MPI.Is_initialized()
before = {*sys.modules}
from training.loop import main
main()
print(*({*sys.modules} - before), sep="\\n")
"""
    command = [sys.executable, "-c", script, *flags(config(1, out_dir=str(tmp_path), **SETTINGS))]
    result = watched(command, environment(), 120)
    assert result.returncode == 0, result.stderr
    large = [name for name in result.stdout.splitlines() if name.startswith(("collectives.", "numba", "mpi4py"))]
    assert not large


def test_a_rank_whose_server_ends_trains_itself(tmp_path, variables):
    """As a server does that cannot import what it is to import, or that has been idle."""
    (tmp_path / "ending.py").write_text("""
import socket, sys
listener = socket.socket(socket.AF_UNIX)
listener.bind("\\0" + sys.argv[1])
listener.listen()
listener.accept()
""")
    script = "from training import forked; forked.SERVER = 'ending'; forked.main()"
    command = [sys.executable, "-c", script, *flags(config(1, out_dir=str(tmp_path / "out"), **SETTINGS))]
    result = watched(command, variables | {"PYTHONPATH": f"{ROOT}:{tmp_path}"}, 120)
    assert result.returncode == 0, result.stderr
    assert len(losses_in(tmp_path / "out")) == 5


def test_a_server_ends_when_idle(variables):
    script = "import sys; from training import fork_server as f; f.IDLE_S = 0.1; f.import_all = lambda: None; f.main()"
    command = [sys.executable, "-c", script, f"idle-{os.getpid()}"]
    assert subprocess.run(command, cwd=ROOT, env=variables, timeout=60).returncode == 0


def test_other_code_and_variables_have_other_servers(monkeypatch, variables):
    name = forked.name_of_server()
    assert name == forked.name_of_server()
    assert name[0] == "\0"
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert name != forked.name_of_server()
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "7")
    changed = forked.name_of_server()
    monkeypatch.delenv("OMPI_COMM_WORLD_RANK")
    assert changed == forked.name_of_server()
