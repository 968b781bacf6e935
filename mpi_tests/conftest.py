import os

import pytest

pytest_plugins = ["mpi_tests.ranks"]
os.environ["COLLECTIVES_LINKS"] = "0"  # what is kept of this machine's links would decide what `auto` takes


@pytest.fixture
def comm(mpi_comm):
    """The library's communicator of the test's ranks."""
    from collectives import Communicator  # here, because a run without ranks does without MPI

    made = Communicator(mpi_comm)
    yield made
    made.free()
