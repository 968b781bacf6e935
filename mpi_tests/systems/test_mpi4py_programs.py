"""Unmodified mpi4py programs under `python -m collectives.mpi4py`, and mpi4py's own tests."""

import re
import sys
from pathlib import Path

import pytest

from mpi_tests import mpi4py_programs, mpi4py_suite
from mpi_tests.helpers.launch import environment, find_mpirun, launch, watched

UNDER_OURS = ("python", "-m", "collectives.mpi4py")
PROGRAM = """
import sys
import numpy as np
from mpi4py import MPI

comm = MPI.COMM_WORLD
x, y = np.full(200_000, comm.rank + 1.0), np.empty(200_000)
for _ in range(3):
    comm.Allreduce(x, y)
part = comm.Split(comm.rank % 2)
part.Allreduce(MPI.IN_PLACE, [x, MPI.DOUBLE])
own = sum(rank + 1 for rank in range(comm.size) if rank % 2 == comm.rank % 2)
print(sys.argv[1:], (y == comm.size * (comm.size + 1) / 2).all(), (x == own).all(), comm.allgather(comm.rank))
part.Free()
"""


@pytest.fixture
def program(tmp_path):
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return path


@pytest.mark.parametrize("how", ["file", "-c"])
def test_a_program_that_knows_mpi4py_only(program, how):
    words = [program] if how == "file" else ["-c", PROGRAM]
    result = launch(3, *UNDER_OURS, *words, "a", "-b", env={"COLLECTIVES_MPI4PY": "report"})
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == ["['a', '-b'] True True [0, 1, 2]"] * 3
    assert re.search(r"^Allreduce +4 +0$", result.stderr, re.MULTILINE), result.stderr
    assert re.findall(r"^(\w+) +\d+ +\d+$", result.stderr, re.MULTILINE) == ["Allreduce"]  # none of our own


def test_what_a_program_raises_ends_the_job():
    result = launch(2, *UNDER_OURS, "-c", "from mpi4py import MPI; MPI.COMM_WORLD.Bcast(1 / MPI.COMM_WORLD.rank)")
    assert result.returncode == 1
    assert "ZeroDivisionError" in result.stderr


@pytest.mark.parametrize("without", [0, 1])
def test_a_rank_without_the_wrapper(program, without):
    """Such a rank ends the job, with one line from each rank that waits for it, or from the first to notice."""
    plain, ours = [sys.executable, program], [sys.executable, *UNDER_OURS[1:], program]
    parts = [plain, ours] if without == 0 else [ours, plain]
    words = [find_mpirun(), "-n", 1, *parts[0], ":", "-n", 2 - without, *parts[1]]
    result = watched(words, environment() | {"COLLECTIVES_TIMEOUT_S": "3"}, 60)
    assert result.returncode != 0
    assert f"error: rank {without} does not use the wrapper" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(("words", "line"), [((), "usage: "), (("-m",), "usage: ")])
def test_nothing_to_run(words, line):
    result = launch(2, *UNDER_OURS, *words)
    assert result.returncode == 2
    assert result.stderr.startswith(line)


def test_a_setting_that_cannot_be():
    result = launch(2, *UNDER_OURS, "-c", "print('ran')", env={"COLLECTIVES_MPI4PY": "fast"})
    assert result.returncode != 0
    assert "error: COLLECTIVES_MPI4PY='fast': write report, or unset it" in result.stderr
    assert not result.stdout


@pytest.mark.skipif(not Path(sys.prefix, "bin", "pip").exists(), reason="needs pip, for mpi4py's tests")
@pytest.mark.proof
def test_mpi4pys_own_tests_of_collectives():
    assert mpi4py_suite.compare(3, "collectives") == []


@pytest.mark.skipif(not Path(sys.prefix, "bin", "pip").exists(), reason="needs pip, for mpi4py's programs")
@pytest.mark.parametrize("name", ["compute-pi", "mandelbrot"])
def test_programs_that_others_wrote(name):
    """pylops-mpi's program, which needs further downloads, runs in `make test-all`."""
    assert mpi4py_programs.compare(name, 3)
