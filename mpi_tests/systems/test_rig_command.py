"""The guide's command for the rig: its eight ranks, no forks, need both cores to end within a minute."""

import shlex
import sys

import pytest

from mpi_tests.helpers.documents import command_with
from mpi_tests.helpers.launch import watched
from mpi_tests.rig import Rig, UnavailableError, job_environment


def test_the_command_of_the_guide():
    try:
        with Rig(hosts=1):
            pass
    except UnavailableError as error:
        pytest.skip(str(error))
    program, *words = shlex.split(command_with("python -m mpi_tests.rig run"))
    assert program == "python"
    result = watched([sys.executable, *words], job_environment(), 60)
    lines = sorted(result.stdout.splitlines())
    assert lines == [f"rank {rank} of 8 has [36. 36. 36. 36.]" for rank in range(8)], result.stderr
