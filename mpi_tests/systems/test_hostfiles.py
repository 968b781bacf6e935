"""Hostfiles in the format of the installed mpirun, on the rig's hosts; test_documents.py runs those of one machine."""

import pytest

from mpi_tests.helpers.hostfiles import FOLDER, entries
from mpi_tests.rig import BURST_BYTES, HOSTFILE, is_hydra

pytestmark = pytest.mark.shares_cores

SUM = """
import numpy as np
import collectives

comm = collectives.world()
x = comm.all_reduce(np.arange(1000.0) + comm.rank, algorithm="hierarchical")
assert np.array_equal(x, comm.size * np.arange(1000.0) + sum(range(comm.size))), x
if comm.rank == 0:
    print(comm.size, comm.topology.nodes)
"""
PING_PONG = """
import time
import numpy as np
from mpi4py import MPI

comm = MPI.COMM_WORLD
pair = comm.Split(comm.rank in (0, comm.size - 1))
for nbytes in (1 << 16, 1 << 24):
    x, seconds = np.zeros(nbytes, np.uint8), []
    for _ in range(3):
        begin = time.perf_counter()
        if comm.rank == 0:
            pair.Send(x, 1)
            pair.Recv(x, 1)
        elif comm.rank == comm.size - 1:
            pair.Recv(x, 0)
            pair.Send(x, 0)
        seconds.append((time.perf_counter() - begin) / 2)
    if comm.rank == 0:
        print(nbytes, min(seconds))
"""


@pytest.fixture
def script(tmp_path):
    def write(body):
        (tmp_path / "script.py").write_text(body)
        return tmp_path / "script.py"

    return write


def suited(name):
    """Return the path of the hostfile for the installed mpirun."""
    return FOLDER / f"{name}{'.mpich' if is_hydra() else ''}.txt"


def test_ranks_on_four_hosts(rig, script):
    result = rig.launch("python", script(SUM), hostfile=suited("rig"))
    assert result.stdout == "8 ((0, 1), (2, 3), (4, 5), (6, 7))\n", result.stderr
    assert entries(suited("rig")) == HOSTFILE.read_text().splitlines()


def test_links_are_as_slow_as_they_should_be(rig, script):
    """No message longer than a burst exceeds the rate; on a busy machine it may be slower."""
    lines = rig.launch("python", script(PING_PONG)).stdout.splitlines()
    assert [int(line.split()[0]) for line in lines] == [1 << 16, 1 << 24]
    for line in lines:
        nbytes, seconds = map(float, line.split())
        assert seconds > 0.95 * (nbytes - BURST_BYTES) / 125e6
