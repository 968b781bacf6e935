"""Measured links: cached for a list of hosts, and used by `auto` there."""

import json
import platform

import pytest

from collectives.runtime.choose import links
from collectives.runtime.choose.links import CachedLinks, LinkKey
from collectives.schedule.network import NETWORK
from mpi_tests.helpers.networks import NETWORK_HERE


@pytest.fixture
def shared_folder(monkeypatch, tmp_path, mpi_comm):
    monkeypatch.setenv("COLLECTIVES_LINKS", str(mpi_comm.bcast(tmp_path)))
    monkeypatch.setattr(links, "doubt", lambda network: "")  # the machine may be busy with other tests
    monkeypatch.setattr(links, "MOST_APART", float("inf"))


@pytest.mark.sizes(1, 4)
@pytest.mark.parametrize("nodes", [1, 2, 4])
def test_ranks_measure_the_same_and_auto_uses_it(mpi_comm, monkeypatch, shared_folder, nodes):
    from collectives import Communicator
    from collectives.bench.constants import measure

    if mpi_comm.size > 1:
        monkeypatch.setenv("COLLECTIVES_FAKE_NODES", f"{nodes}x{4 // nodes}")
    comm = Communicator(mpi_comm)
    assert "with default speeds" in comm.explain("all_reduce", 1 << 20)
    network = measure(comm, 2, 1)
    assert len(set(mpi_comm.allgather(network))) == 1
    assert (network.between == NETWORK.between) == (len(comm.topology.nodes) == 1)
    assert (network.nic is not None) == (mpi_comm.size == 4 and nodes == 2)
    has_pair = mpi_comm.size == 4 and nodes < 4
    assert (network.within != NETWORK.within) == (network.system != NETWORK.system) == has_pair
    assert (network.staged_s_per_byte != NETWORK.staged_s_per_byte) == has_pair
    assert min(*network.system, network.staged_s_per_byte) > 0
    mpi_comm.Barrier()  # rank 0 has saved it
    another = Communicator(mpi_comm)
    assert "with the speeds measured on these hosts" in another.explain("all_reduce", 1 << 20)
    part = another.split(0)
    assert "with the speeds measured on these hosts" in part.explain("all_reduce", 1 << 20)
    for each in (comm, part, another):
        each.free()


@pytest.mark.sizes(2)
def test_a_broken_file_and_one_of_other_hosts_count_as_none(mpi_comm, shared_folder):
    from mpi4py import MPI

    from collectives import Communicator
    from collectives.job.launch import library_name

    here = LinkKey(((platform.node(), 2),), library_name(MPI))
    for hosts in ([["elsewhere", 2]], None):
        if mpi_comm.rank == 0:
            links.save(CachedLinks(here, NETWORK_HERE))
            data = json.loads(here.file.read_text()) | {"hosts": hosts}
            here.file.write_text(json.dumps(data))
        mpi_comm.Barrier()
        comm = Communicator(mpi_comm)
        assert "with default speeds" in comm.explain("all_reduce", 1 << 20)
        comm.free()
