"""Systems without Linux's extensions: collectives and training work, or one line names the missing feature."""

import subprocess
import sys

import pytest

from mpi_tests.helpers.launch import ROOT, environment, launch
from mpi_tests.helpers.trained import check_same, config, flags, left_in, plain_training

pytestmark = pytest.mark.shares_cores
BARE = ("python", "-m", "mpi_tests.helpers.bare_system")
PROGRAM = """
import numpy as np

import collectives
from collectives.job import system
from collectives.runtime.backends import kernels

comm = collectives.world()
assert not hasattr(kernels, "process_vm_readv")
assert system.available_memory_bytes() == system.total_memory_bytes()
for count in (3, 1000, 100_000):
    for x in (np.full(count, comm.rank + 1.0, "float32"), comm.empty(count, "float32")):
        x[:] = comm.rank + 1
        comm.all_reduce(x)
        assert (x == 3).all()
        assert (comm.all_gather(x[:2]) == 3).all()
        x[:] = comm.rank
        assert (comm.broadcast(x, root=1) == 1).all()
print(f"rank {comm.rank}: right")
"""


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """Return variables for a new kernel cache, as this machine's kernels call functions that the system lacks."""
    return {"NUMBA_CACHE_DIR": str(tmp_path_factory.mktemp("kernels"))}


@pytest.mark.proof
def test_collectives_on_a_system_without_what_linux_has(cache, tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    result = launch(2, *BARE, tmp_path / "program.py", env=cache, timeout=600)
    assert result.returncode == 0, result.stderr
    assert sorted(result.stdout.splitlines()) == ["rank 0: right", "rank 1: right"]


@pytest.mark.proof
def test_training_on_a_system_without_what_linux_has(cache, tmp_path):
    words = flags(config(2, out_dir=str(tmp_path)))
    result = launch(2, *BARE, "-m", "training", *words, env=cache, timeout=600)
    assert result.returncode == 0, result.stderr
    check_same(left_in(tmp_path), plain_training())


def test_the_doctor_on_a_system_without_what_linux_has(cache):
    result = launch(2, *BARE, "-m", "collectives.doctor", env=cache, timeout=600)
    assert "the system lets no rank read it (process_vm_readv)" in result.stdout, result.stderr


def test_windows_is_refused_in_one_line():
    program = "import os; os.name = 'nt'; import collectives"
    result = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env=environment(), capture_output=True, text=True
    )
    line = "ImportError: collectives needs POSIX (mpirun, signals, shared memory): on Windows, install it in WSL"
    assert result.stderr.splitlines()[-1] == line


def test_a_python_without_its_language_reference_is_refused():
    program = "import sys; sys.modules['pydoc_data.topics'] = None; from training.__main__ import main; main()"
    result = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env=environment(), capture_output=True, text=True
    )
    why = "this Python lacks its language reference (pydoc_data), the default data: pass --data with a text file"
    assert (result.returncode, result.stderr) == (2, f"error: {why}\n")
