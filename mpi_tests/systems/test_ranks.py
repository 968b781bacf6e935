"""Sample tests, run on three ranks with the plug-in `ranks.py`."""

import os
import re
import subprocess
import sys
import time
from textwrap import dedent

import pytest

from mpi_tests.helpers import launch as launcher
from mpi_tests.helpers.launch import ROOT, launch
from mpi_tests.helpers.ranks import poll

pytestmark = [pytest.mark.mpi_skip, pytest.mark.shares_cores]  # they start ranks of their own

CONFTEST = """
import pytest
pytest_plugins = ["mpi_tests.helpers.ranks"]

def pytest_sessionfinish(session, exitstatus):
    ranks = session.config.pluginmanager.get_plugin("ranks")
    (session.path / f"exit-{ranks.world.rank}").write_text(str(int(exitstatus)))

@pytest.fixture(scope="session")
def comm(mpi_comm):
    assert mpi_comm.rank < mpi_comm.size < 4
    return mpi_comm
"""


@pytest.fixture
def run(tmp_path):
    """Return a function that writes `source` to a test file and runs it on three ranks."""
    (tmp_path / "pytest.ini").touch()
    (tmp_path / "conftest.py").write_text(CONFTEST)

    def run(source, *options, env=None):
        (tmp_path / "test_sample.py").write_text(dedent(source))
        return launch(3, *pytest_command(tmp_path), "--with-mpi", *options, env=env)

    return run


def pytest_command(folder):
    flags = ["-c", folder / "pytest.ini", "--rootdir", folder, "-p", "no:cacheprovider", "--color=no"]
    return [sys.executable, "-W", "error", "-m", "pytest", *flags, folder]


def exit_codes(folder):
    return [int((folder / f"exit-{rank}").read_text()) for rank in range(3)]


def test_sizes_run_smallest_first_and_only_on_their_ranks(run, tmp_path):
    result = run(
        """
        import pytest
        from mpi4py import MPI

        @pytest.mark.sizes(3, 1)
        def test_sizes(comm, tmp_path_factory):
            assert comm.size in (1, 3)

        def test_all(comm, request):
            (request.path.parent / f"{comm.size}-{MPI.COMM_WORLD.rank}").touch()

        def test_alone(): pass
        """,
        "--only-mpi",
        "-v",
    )
    ran = re.findall(r"::(\S+) PASSED", result.stdout)
    assert ran == [f"test_{t}-ranks]" for t in ("sizes[1", "all[1", "all[2", "sizes[3", "all[3")]
    members = sorted(path.name for path in tmp_path.glob("?-?"))
    assert members == ["1-0", "2-0", "2-1", "3-0", "3-1", "3-2"]
    assert result.stdout.count("5 passed, 1 deselected in") == 1
    assert (result.returncode, exit_codes(tmp_path)) == (0, [0, 0, 0])
    assert result.stderr == ""


def test_what_one_rank_reports_holds_for_all(run, tmp_path):
    result = run(
        """
        import pytest
        pytestmark = pytest.mark.sizes(3)

        def test_call(comm):
            assert comm.rank == 0, f"wrong on {comm.rank}"

        @pytest.fixture
        def broken(comm):
            assert comm.rank != 2

        def test_setup(broken, comm):
            comm.Barrier()  # would hang, without rank 2

        @pytest.fixture
        def broken_late(comm):
            yield
            assert comm.rank != 1

        def test_teardown(broken_late): pass

        def test_mixed_skip(comm):
            if comm.rank: pytest.skip("not me")

        @pytest.mark.sizes(1, 4)
        def test_skip(comm): pytest.skip("not us")

        @pytest.mark.sizes(1)
        @pytest.mark.xfail(strict=True)
        def test_xfail(comm): assert comm.size > 1

        def test_barrier(comm): comm.Barrier()
        """,
        "-ra",
    )
    assert "2 failed, 2 passed, 2 skipped, 1 xfailed, 2 errors in" in result.stdout
    assert "AssertionError: wrong on 1" in result.stdout
    assert "wrong on 2" not in result.stdout
    assert "failed on ranks [1, 2]; this is rank 1" in result.stdout
    assert "failed on ranks [2]; this is rank 2" in result.stdout
    assert "skipped on ranks [1, 2]; this is rank 1, and others passed" in result.stdout
    assert "Test requires 4 MPI processes" in result.stdout
    assert result.returncode == 1
    assert exit_codes(tmp_path) == [1, 1, 1]


def test_hang_ends_and_shows_where_each_rank_is(run):
    result = run(
        """
        import time
        import pytest

        @pytest.mark.sizes(3)
        def test_hang(comm):
            if comm.rank == 0:
                comm.recv(source=1)
            if comm.rank == 1:
                time.sleep(60)
        """,
        "--rank-timeout=3",
    )
    outputs = {rank: last_output(result, rank) for rank in range(3)}
    assert all("test_sample.py::test_hang[3-ranks]: not finished after 3 s" in p for p in outputs.values())
    assert "comm.recv(source=1)" in outputs[0]
    assert "time.sleep(60)" in outputs[1]
    assert "in agree" in outputs[2]
    assert result.returncode != 0


def test_failure_ends_a_test_in_which_the_others_wait(run):
    result = run(
        """
        import pytest

        @pytest.mark.sizes(3)
        def test_deadlock(comm):
            assert comm.rank != 1, "left alone"
            comm.Barrier()
        """,
        "--rank-grace=1",
    )
    assert "AssertionError: left alone" in last_output(result, 1)
    assert all("rank 1 failed 1 s ago" in last_output(result, rank) for rank in (0, 2))
    assert all("comm.Barrier()" in last_output(result, rank) for rank in (0, 2))
    assert result.returncode != 0


def test_hang_that_holds_the_interpreter_ends(run):
    result = run(
        """
        import ctypes

        def test_hang():
            ctypes.PyDLL(None).sleep(60)
        """,
        "--rank-timeout=3",
    )
    assert "in test_hang" in result.stderr
    assert result.returncode != 0


def test_ranks_that_collect_different_tests_are_refused(run, tmp_path):
    result = run(
        """
        from mpi4py import MPI

        def test_same(): pass

        if MPI.COMM_WORLD.rank == 1:
            raise RuntimeError("bad import")
        """
    )
    assert "rank 1 collected an error in test_sample.py where rank 0 collected" in result.stdout
    assert "RuntimeError: bad import" in result.stdout
    assert exit_codes(tmp_path) == [4, 4, 4]


def test_internal_error_on_a_silent_rank_is_shown(run, tmp_path):
    hook = """
def pytest_runtest_logfinish(nodeid):
    from mpi4py import MPI
    assert MPI.COMM_WORLD.rank != 2, "broken hook"
"""
    (tmp_path / "conftest.py").write_text(CONFTEST + hook)
    result = run("def test_one(): pass\ndef test_two(): pass")
    assert "AssertionError: broken hook" in last_output(result, 2)
    assert result.returncode != 0


def test_mpi_without_threads_is_refused(run):
    result = run("def test_one(): pass", env={"MPI4PY_RC_THREAD_LEVEL": "single"})
    assert "needs MPI_THREAD_MULTIPLE" in result.stderr
    assert result.returncode == 4


def test_run_without_ranks_needs_no_mpi(tmp_path):
    (tmp_path / "pytest.ini").touch()
    (tmp_path / "conftest.py").write_text('pytest_plugins = ["mpi_tests.helpers.ranks"]')
    sample = """
        import sys

        def test_with(mpi_comm): assert False
        def test_without(): assert "mpi4py" not in sys.modules
    """
    (tmp_path / "test_sample.py").write_text(dedent(sample))
    result = subprocess.run(pytest_command(tmp_path), cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert "1 passed, 4 skipped in" in result.stdout


def test_launch_ends_what_takes_too_long():
    with pytest.raises(AssertionError, match="not finished after 3 s") as error:
        launch(2, "sh", "-c", "echo process $$; exec sleep 60", timeout=3)
    processes = re.findall(r"process (\d+)", str(error.value))
    assert len(processes) == 2
    poll(lambda: not any(map(exists, processes)), deadline=time.monotonic() + 10)


def test_launch_ends_a_launcher_that_does_not_end_itself(monkeypatch):
    monkeypatch.setattr(launcher, "TERMINATION_S", 1)
    with pytest.raises(AssertionError, match="not finished after 3 s"):
        # Under MPICH, STOP reaches mpirun's child and not mpirun; without CONT, the child would remain.
        launch(1, "sh", "-c", "kill -STOP $PPID; sleep 5; kill -CONT $PPID", timeout=3)


def exists(process):
    try:
        os.kill(int(process), 0)
    except ProcessLookupError:
        return False
    return True


def last_output(result, rank):
    """Return the last output of `rank` before it ended the job."""
    return re.split(r"==== rank \d of 3: ", result.stderr.split(f"==== rank {rank} of 3: ")[1])[0]


def test_an_mpirun_with_the_number_of_a_killed_one(tmp_path):
    """Open MPI's fails with what troubleshooting.md quotes, unless the killed one's folder has been deleted."""
    stale = 'mkdir -p "$TMPDIR/ompi.$$" && touch "$TMPDIR/ompi.$$/pmix.$(hostname).tool"'
    run = f'{stale} && exec "{launcher.find_mpirun()}" -n 1 true'
    result = launcher.watched(["bash", "-c", run], launcher.environment() | {"TMPDIR": str(tmp_path)}, timeout=60)
    if "HYDRA" in subprocess.run([launcher.find_mpirun(), "--version"], capture_output=True, text=True).stdout:
        pytest.skip("MPICH's mpirun has no such folder")
    message = "The PMIx server's listener thread failed to start"
    assert message in result.stderr
    assert message in (ROOT / "docs" / "troubleshooting.md").read_text()
    (tmp_path / f"ompi.{os.getpid()}").mkdir()
    launcher.remove_sessions_of_killed_mpiruns(tmp_path)
    assert [path.name for path in tmp_path.glob("ompi.*")] == [f"ompi.{os.getpid()}"]
