import os

import pytest

from mpi_tests.rig import Rig, UnavailableError

pytest_plugins = ["mpi_tests.helpers.ranks", "mpi_tests.helpers.progress", "mpi_tests.helpers.cuda_arrays"]
collect_ignore = ["helpers/cuda_on_host/site"]  # whose import has CuPy work on the stand-in
os.environ["COLLECTIVES_LINKS"] = "0"  # what is kept of this machine's links would decide what `auto` takes


@pytest.fixture(scope="module")
def rig():
    """4 hosts of 2 slots, at 1 Gbit/s."""
    try:
        made = Rig().__enter__()
    except UnavailableError as error:
        pytest.skip(str(error))
    yield made
    made.__exit__()
