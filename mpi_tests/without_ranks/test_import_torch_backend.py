"""The effect on MPI of importing the torch backend."""

import subprocess
import sys

from mpi_tests.helpers.launch import environment

PROGRAM = """
import os
import collectives.torch_backend
from mpi4py import MPI
assert not MPI.Is_initialized()
print(os.environ["OMPI_MCA_mpi_yield_when_idle"])
"""


def test_it_sets_what_mpi_reads_and_does_not_start_it():
    """Processes that import a rank's program, such as data loaders, are not ranks."""
    oversubscribed = {"COLLECTIVES_CORES": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "8"}
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment() | oversubscribed, capture_output=True, text=True
    )
    assert (result.returncode, result.stdout) == (0, "1\n"), result.stderr
