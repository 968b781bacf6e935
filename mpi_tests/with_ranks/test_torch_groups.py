"""Groups of torch.distributed over the collectives, with their store and time limits; and programs against gloo."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from mpi_tests.helpers.torch_programs import PROGRAMS, lacking
from mpi_tests.helpers.torch_world import of, world

pytestmark = [
    pytest.mark.sizes(1, 2, 4),
    pytest.mark.filterwarnings("ignore:`torch.distributed:FutureWarning"),  # names that 2.13 changed
    pytest.mark.filterwarnings("ignore:DTensor random operators:UserWarning"),  # of 2.6
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning"),  # said by 2.9's own checkpoints
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


@pytest.fixture
def bind_device(size, monkeypatch):
    """What init_process_group does with a device_id, where the CPU is an accelerator to torch."""
    if not hasattr(dist.ProcessGroup, "split_group"):
        pytest.skip(f"torch {torch.__version__} splits NCCL's groups only")
    for module in torch.accelerator, torch.cuda:
        monkeypatch.setattr(module, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cpu"))
    return lambda: dist.group.WORLD.eager_connect_single_device(torch.device("cpu", 0))


def alike(group, other):
    """Whether groups have the same ranks and sums, and the first one's ranks are in torch's order."""
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
    split, made = dist.split_group, []

    def noted(**arguments):
        made.append(split(**arguments))
        return made[-1]

    monkeypatch.setattr(dist.device_mesh, "split_group", noted)
    bind_device()
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    assert [mesh[name].get_group().group_name for name in "ab"] == [group.group_name for group in made]
    rank = dist.get_rank()
    x = torch.tensor([rank])
    dist.all_reduce(x, group=mesh["b"].get_group())
    assert x == (1 if rank < 2 else 5)


def test_store(mpi_comm):
    from collectives.torch_backend import MPIStore

    store = MPIStore(mpi_comm)
    prefixed = dist.PrefixStore("mine", store)
    prefixed.set(f"of {mpi_comm.rank}", str(mpi_comm.rank))
    assert prefixed.multi_get([f"of {r}" for r in range(mpi_comm.size)]) == [b"%d" % r for r in range(mpi_comm.size)]
    prefixed.add("sum", mpi_comm.rank)
    prefixed.add("came", 1)
    while prefixed.add("came", 0) < mpi_comm.size:
        pass
    assert prefixed.add("sum", 0) == sum(range(mpi_comm.size))
    assert not store.check(["sum"])
    assert store.check(["mine/sum"])
    with pytest.raises(dist.DistStoreError, match=r"no never after 0.1 s"):
        store.wait(["never"], timedelta(seconds=0.1))
    store.close()


@pytest.mark.sizes(2)
def test_time_limit(mpi_comm):
    with world(mpi_comm):
        group = dist.new_group(timeout=timedelta(seconds=0.3))
        if dist.get_rank() == 0:
            with pytest.raises(dist.DistBackendError, match=r"all_reduce.* was not over within its timeout of 0.3 s"):
                dist.all_reduce(torch.ones(3), group=group)
            with pytest.raises(dist.DistBackendError, match=r"was not over within its timeout of 0.3 s"):
                dist.barrier(group=group)
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
