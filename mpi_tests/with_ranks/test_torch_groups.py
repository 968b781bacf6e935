"""Groups of torch.distributed over the collectives, their store and time limits, and programs compared with gloo."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from mpi4py import MPI
from torch._C import _distributed_c10d

from collectives import torch_backend
from collectives.torch_backend.work import HELD
from mpi_tests.helpers.torch_programs import PROGRAMS, ddp, lacking
from mpi_tests.helpers.torch_world import of, world

pytestmark = [
    pytest.mark.sizes(1, 2, 4),
    pytest.mark.filterwarnings("ignore:`torch.distributed:FutureWarning"),  # names that 2.13 changed
    pytest.mark.filterwarnings("ignore:DTensor random operators:UserWarning"),  # of 2.6
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning"),  # of 2.9's checkpoints
]


@pytest.fixture
def size(mpi_comm):
    with world(mpi_comm):
        yield mpi_comm.size


@pytest.mark.sizes(4)
def test_groups_within(size):
    rank = dist.get_rank()
    evens, odds = dist.new_group([0, 2]), dist.new_group([1, 3])
    x = torch.tensor([rank])
    dist.all_reduce(x, group=odds if rank % 2 else evens)
    assert x == (4 if rank % 2 else 2)
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    x = torch.tensor([rank])
    dist.all_reduce(x, group=mesh["b"].get_group())
    assert x == (1 if rank < 2 else 5)
    dist.destroy_process_group(odds if rank % 2 else evens)


@pytest.mark.sizes(4)
def test_disjoint_groups_that_torch_gives_the_same_name(mpi_comm, monkeypatch):
    """Torch names groups by a counter of each rank: [0] and [1] have one name, [2] and [3] another."""
    original, others = torch_backend.communicator, mpi_comm.Split(mpi_comm.rank // 2)

    def together(world, store, rank, size, name):
        if size == 1:
            store.set("rank", str(mpi_comm.rank))
            others.Barrier()
            assert int(store.get("rank")) == mpi_comm.rank
        return original(world, store, rank, size, name)

    with world(mpi_comm):
        rank = dist.get_rank()
        half, _ = dist.new_subgroups_by_enumeration([[0, 2], [1, 3]])
        monkeypatch.setattr(torch_backend, "communicator", together)
        own, _ = dist.new_subgroups(1, group=half)
        assert dist.get_process_group_ranks(own) == [rank]
        x = torch.tensor([rank])
        dist.all_reduce(x, group=own)
        assert x == rank
    others.Free()


@pytest.mark.sizes(4)
def test_groups_of_fewer_ranks_on_nodes_that_are_played(mpi_comm, monkeypatch):
    monkeypatch.setenv("COLLECTIVES_FAKE_NODES", f"{-(-MPI.COMM_WORLD.size // 2)}x2")
    with world(mpi_comm):
        rank, x = dist.get_rank(), of(dist.get_rank())
        group = dist.new_group([0, 1])
        if rank < 2:
            dist.all_reduce(x, group=group)
            assert torch.equal(x, of(0) + of(1))
        dist.barrier()


@pytest.fixture
def bind_device(size, monkeypatch):
    """Return a function that binds a device_id like init_process_group, with the CPU as accelerator."""
    if not hasattr(dist.ProcessGroup, "split_group"):
        pytest.skip(f"torch {torch.__version__} splits only NCCL's groups")
    for module in torch.accelerator, torch.cuda:
        monkeypatch.setattr(module, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cpu"))
    return lambda: dist.group.WORLD.eager_connect_single_device(torch.device("cpu", 0))


def alike(group, other):
    """Return whether groups have equal ranks and sums, and the first one's ranks are in torch's order."""
    ranks = dist.get_process_group_ranks(group)
    assert ranks[group.rank()] == dist.get_rank()
    xs = [of(dist.get_rank()) for _ in range(2)]
    for x, among in zip(xs, (group, other), strict=True):
        dist.all_reduce(x, group=among)
    return torch.equal(*xs) and set(ranks) == set(dist.get_process_group_ranks(other))


@pytest.mark.sizes(4)
def test_split_group(size, bind_device):
    rank = dist.get_rank()
    halves = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])]
    bind_device()
    half = dist.split_group(split_ranks=[[2, 0], [1, 3]])
    assert alike(half, halves[rank % 2])
    alone = dist.split_group(half, [[1]])
    is_member = isinstance(alone, dist.ProcessGroup)
    assert is_member == (half.rank() == 1)
    assert not is_member or dist.get_process_group_ranks(alone) == [rank]
    dist.destroy_process_group(half)


@pytest.mark.sizes(4)
def test_a_mesh_splits_groups(size, bind_device, monkeypatch):
    split, groups = dist.split_group, []

    def recording_split(**arguments):
        groups.append(split(**arguments))
        return groups[-1]

    monkeypatch.setattr(dist.device_mesh, "split_group", recording_split)
    bind_device()
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    assert [mesh[name].get_group().group_name for name in "ab"] == [group.group_name for group in groups]
    rank = dist.get_rank()
    x = torch.tensor([rank])
    dist.all_reduce(x, group=mesh["b"].get_group())
    assert x == (1 if rank < 2 else 5)


def test_store(mpi_comm):
    """Every rank can read the other ranks' entries."""
    from collectives.torch_backend import create_store

    store = create_store(mpi_comm)
    store.set(f"of {mpi_comm.rank}", str(mpi_comm.rank))
    assert store.multi_get([f"of {r}" for r in range(mpi_comm.size)]) == [b"%d" % r for r in range(mpi_comm.size)]
    mpi_comm.Barrier()  # rank 0 serves it


@pytest.mark.sizes(2)
@pytest.mark.parametrize("by_future", [False, True])
def test_asynchronous_calls_that_others_do_not_make(mpi_comm, by_future):
    """The call was bound before, so it starts at once; its wait raises a timeout."""
    with world(mpi_comm):
        group = dist.new_group(timeout=timedelta(seconds=0.3))
        x = torch.ones(3)
        for _ in range(2):
            dist.all_reduce(x, group=group)
        if dist.get_rank() == 0:
            work = dist.all_reduce(x, group=group, async_op=True)
            words = r"did not finish within its timeout of 0.3 s"
            with pytest.raises(RuntimeError if by_future else dist.DistBackendError, match=words):
                work.get_future().wait() if by_future else work.wait()
            with pytest.raises(dist.DistBackendError, match=words):
                dist.barrier(group=group)
        dist.barrier()


@pytest.mark.sizes(2)
def test_a_backward_pass_raises_what_its_call_does(mpi_comm):
    """DDP's C++ waits for the future, and would read its value."""
    with world(mpi_comm):
        group = dist.new_group(timeout=timedelta(seconds=0.3))
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1), process_group=group)
        if dist.get_rank() == 0:
            loss = model(torch.ones(1, 2)).sum()
            with pytest.raises(RuntimeError, match=r"did not finish within its timeout of 0.3 s"):
                loss.backward()
        dist.barrier()


@pytest.mark.sizes(2)
def test_time_limit(mpi_comm):
    with world(mpi_comm):
        group = dist.new_group(timeout=timedelta(seconds=0.3))
        if dist.get_rank() == 0:
            with pytest.raises(dist.DistBackendError, match=r"all_reduce.* did not finish within its timeout of 0.3 s"):
                dist.all_reduce(torch.ones(3), group=group)
            with pytest.raises(dist.DistBackendError, match=r"did not finish within its timeout of 0.3 s"):
                dist.barrier(group=group)
            if hasattr(_distributed_c10d, "ErrorType"):  # which older versions lack
                assert group.get_error() == _distributed_c10d.ErrorType.TIMEOUT
        dist.barrier()


@pytest.mark.sizes(4, proof=(2,))
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_programs_as_over_gloo(mpi_comm, program):
    if why := lacking(program):
        pytest.skip(f"torch {torch.__version__}: {why}")
    with world(mpi_comm):
        ours = program()
    with world(mpi_comm, "gloo"):
        theirs = program()
    assert ours == pytest.approx(theirs, rel=1e-5)


@pytest.mark.sizes(2)
def test_works_are_held_until_they_are_asked(mpi_comm, monkeypatch):
    """This emulates torch before 2.7, whose C++ cannot call methods of a Python work without a Python reference."""
    monkeypatch.setattr("collectives.torch_backend.group.CPP_HOLDS_WORKS", False)
    with world(mpi_comm):
        works = [dist.all_reduce(x := torch.ones(3), async_op=True) for _ in range(2)]
        assert set(works) == HELD
        works[0].wait()
        works[1].get_future().wait()
        with dist._coalescing_manager(device=torch.device("cpu"), async_ops=True) as both:
            dist.broadcast(x, 0)
            dist.broadcast(x, 1)
        both.wait()
        ddp()
        assert not HELD
