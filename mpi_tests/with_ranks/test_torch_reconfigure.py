"""Groups of torch.distributed that go on with other ranks, by torch's `reconfigure`."""

from datetime import timedelta
from itertools import count
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from mpi4py import MPI
from torch._C import _distributed_c10d

from mpi_tests.helpers.torch_world import world

pytestmark = pytest.mark.sizes(3)
UUIDS = count(1)
ALL = (0, 1, 2)
STEPS = {  # each has the groups into which ranks go; those in none of them wait
    "the same ranks": [[ALL], [ALL]],
    "another order": [[(2, 0, 1)]],
    "without the last": [[(0, 1)]],
    "without the one between": [[(0, 2)]],
    "apart, together and apart": [[(0,), (1,), (2,)], [ALL], [(0,), (1,), (2,)]],
    "late ones": [[(0,)], [ALL]],
    "two groups become one": [[(0,), (2, 1)], [ALL]],
}


@pytest.fixture
def handles(mpi_comm):
    """Return each rank's handle, in a default group of these ranks."""
    with world(mpi_comm):
        yield mpi_comm.allgather(dist.group.WORLD.get_reconfigure_handle())


def reconfigure(uuid, handles, limit_s=30.0):
    """Call torch's function, which it has from 2.14 on, or the method that this calls."""
    limit = timedelta(seconds=limit_s)
    if hasattr(dist, "_reconfigure"):
        dist._reconfigure(uuid, handles, timeout=limit).wait()
    else:
        dist.group.WORLD.reconfigure(SimpleNamespace(uuid=uuid, handles=handles, timeout=limit)).wait()


def check(rank, members):
    """Assert that the default group is that of these ranks, by every kind of call."""
    index, size = members.index(rank), len(members)
    assert (dist.get_rank(), dist.get_world_size()) == (index, size)
    x = torch.full((4,), rank + 1.0)
    dist.all_reduce(x)
    assert x.tolist() == [sum(member + 1.0 for member in members)] * 4
    x = torch.full((4,), float(rank))
    dist.broadcast(x, 0)
    assert x.tolist() == [members[0]] * 4
    gathered = [torch.empty(1) for _ in members]
    work = dist.all_gather(gathered, torch.tensor([float(rank)]), async_op=True)
    work.wait()
    assert [int(each) for each in gathered] == [*members]
    if size > 1:
        sent = dist.isend(torch.tensor([rank]), (index + 1) % size)
        dist.recv(x := torch.tensor([-1]), (index - 1) % size)
        sent.wait()
        assert x == members[index - 1]
    dist.group.WORLD.monitored_barrier()


@pytest.mark.parametrize("steps", STEPS.values(), ids=STEPS)
def test_ranks_leave_join_and_change_numbers(mpi_comm, handles, steps):
    assert dist.group.WORLD.supports_reconfigure
    rank, first = mpi_comm.rank, next(UUIDS) * 100
    check(rank, ALL)
    for number, groups in enumerate(steps):
        for index, members in enumerate(groups):
            if rank in members:
                reconfigure(first + 10 * number + index, [handles[member] for member in members])
                check(rank, members)
        mpi_comm.Barrier()


def test_handles_of_a_set_are_in_the_order_of_mpi(mpi_comm, handles):
    options = SimpleNamespace(uuid=7, handles=set(handles))
    dist.group.WORLD.reconfigure(options).wait()
    check(mpi_comm.rank, ALL)


def test_ddp_divides_by_the_ranks_that_are_left(mpi_comm, handles):
    rank = mpi_comm.rank
    if rank == 1:
        return
    reconfigure(8, [handles[2], handles[0]])
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1, bias=False))
    model(torch.tensor([[rank + 1.0]])).sum().backward()
    assert next(model.parameters()).grad.item() == (1 + 3) / 2


def test_a_group_that_was_aborted_goes_on(mpi_comm, handles):
    dist.group.WORLD.abort()
    with pytest.raises(dist.DistBackendError, match="the group has been aborted"):
        dist.all_reduce(torch.ones(1))
    if hasattr(_distributed_c10d, "ErrorType"):  # which older versions lack
        assert dist.group.WORLD.get_error() == _distributed_c10d.ErrorType.SUCCESS
    reconfigure(9, handles)
    check(mpi_comm.rank, ALL)


@pytest.mark.parametrize("length", [3, 1 << 16])
def test_calls_in_flight_end_first(mpi_comm, handles, length):
    """Short ones are in the caller's own thread, once they have been bound."""
    for _ in range(3):
        dist.all_reduce(torch.ones(length), async_op=True).wait()
    xs = [torch.full((length,), float(mpi_comm.rank)) for _ in range(4)]
    works = [dist.all_reduce(x, async_op=True) for x in xs]
    reconfigure(100 + length, handles)
    for x, work in zip(xs, works, strict=True):
        work.wait()
        assert x.eq(3).all()
    check(mpi_comm.rank, ALL)


def test_calls_that_others_did_not_make_fail_alone(mpi_comm, handles):
    for _ in range(3):
        dist.all_reduce(torch.ones(3), async_op=True).wait()
    dist.group.WORLD.set_timeout(timedelta(seconds=0.3))
    work = dist.all_reduce(torch.ones(3), async_op=True) if mpi_comm.rank == 0 else None
    reconfigure(17, handles)
    dist.group.WORLD.set_timeout(timedelta(seconds=60))
    if work:
        with pytest.raises(dist.DistBackendError, match="did not finish within its timeout"):
            work.wait()
    check(mpi_comm.rank, ALL)


LACKING = r"must have 'collectives:\d+' and others, each once"
REFUSED = {
    "no handle": (lambda handles, rank: ["gloo:0", *handles], r"'gloo:0' is not a handle of this job's \d+ ranks"),
    "one twice": (lambda handles, rank: handles + handles[:1], LACKING),
    "not its own": (lambda handles, rank: handles[:rank] + handles[rank + 1 :], LACKING),
}


@pytest.mark.parametrize(("change", "words"), REFUSED.values(), ids=REFUSED)
def test_handles_that_are_refused_change_nothing(mpi_comm, handles, change, words):
    with pytest.raises(dist.DistBackendError, match=words):
        reconfigure(11, change(handles, mpi_comm.rank))
    check(mpi_comm.rank, ALL)


def test_a_uuid_is_used_once(mpi_comm, handles):
    reconfigure(12, handles)
    with pytest.raises(dist.DistBackendError, match="uuid 12 was already used"):
        reconfigure(12, handles)
    check(mpi_comm.rank, ALL)


def test_ranks_that_do_not_come_are_named(mpi_comm, handles):
    """The group is then as it was; one that comes later does not wait for those that gave up."""
    late = MPI.Group.Translate_ranks(mpi_comm.group, [2], MPI.COMM_WORLD.group)[0]
    if mpi_comm.rank < 2:
        with pytest.raises(dist.DistBackendError, match=rf"MPI's ranks \[{late}\] are not here within 0\.3 s"):
            reconfigure(13, handles, 0.3)
    mpi_comm.Barrier()
    if mpi_comm.rank == 2:
        with pytest.raises(dist.DistBackendError, match=r"MPI's ranks \[\d+, \d+\] are not here within 0\.3 s"):
            reconfigure(13, handles, 0.3)
    check(mpi_comm.rank, ALL)
    reconfigure(14, handles)
    check(mpi_comm.rank, ALL)


def test_ranks_that_come_for_others_are_named(mpi_comm, handles):
    own = handles if mpi_comm.rank else handles[::-1]
    with pytest.raises(dist.DistBackendError, match=r"MPI's rank \d+ comes for other ranks than \["):
        reconfigure(15, own)
    reconfigure(16, handles)
    check(mpi_comm.rank, ALL)
