"""The effect on MPI of importing the torch backend, or Horovod's interface."""

import subprocess
import sys

import pytest

from mpi_tests.helpers.launch import environment

FACES = ("collectives.torch_backend", "collectives.horovod.torch")
PROGRAM = """
import os, sys
import {face}
assert "mpi4py.MPI" not in sys.modules
print(os.environ["OMPI_MCA_mpi_yield_when_idle"])
"""
FIRST_MPI4PY_THEN_A_GROUP = """
import torch, torch.distributed as dist
import collectives.torch_backend, collectives.horovod.torch as hvd
from mpi4py import MPI
print(MPI.COMM_WORLD.allreduce(7))
dist.init_process_group("collectives", init_method="mpi://")
hvd.init()
print(dist.get_world_size(), hvd.size(), MPI.COMM_WORLD.size)
dist.destroy_process_group()
"""


def output(program, **env):
    result = subprocess.run([sys.executable, "-c", program], env=environment() | env, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.parametrize("face", FACES)
def test_it_sets_what_mpi_reads_and_does_not_start_it(face):
    """Processes that import a rank's program, such as data loaders, are not ranks."""
    assert output(PROGRAM.format(face=face), COLLECTIVES_CORES="1", OMPI_COMM_WORLD_LOCAL_SIZE="8") == "1\n"


def test_a_program_s_own_import_of_mpi4py_starts_mpi():
    """So do Lightning's MPIEnvironment and DeepSpeed, before the first group."""
    assert output(FIRST_MPI4PY_THEN_A_GROUP).split() == ["7", "1", "1", "1"]
