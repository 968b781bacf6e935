"""torch.distributed over the collectives: each call does what torch's documentation specifies."""

import functools
import re
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from mpi_tests.helpers.torch_world import of, world

pytestmark = [
    pytest.mark.sizes(1, 2, 4),
    pytest.mark.filterwarnings("ignore:`torch.distributed:FutureWarning"),  # names that 2.13 changed
    pytest.mark.filterwarnings("ignore:DTensor random operators:UserWarning"),  # of 2.6
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning"),  # of 2.9's checkpoints
]
SIZES = (0, 1, 5, 1 << 17)  # the last is too long to be copied
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@pytest.fixture(scope="module")
def size(mpi_comm):
    """Yield the size of the default group, shared by all tests of this file, as its creation is slow."""
    with world(mpi_comm):
        yield mpi_comm.size


@pytest.mark.parametrize("count", SIZES)
def test_all_reduce(size, count):
    x = of(dist.get_rank(), count)
    dist.all_reduce(x)
    assert torch.equal(x, sum(of(rank, count) for rank in range(size)))


@pytest.mark.sizes(2, 4)
def test_tensors_that_lie_elsewhere_each_time(size):
    rank = dist.get_rank()
    xs = [of(rank, 1 << 17) for _ in range(3)]
    for turn in range(9):
        mine = xs[(turn * (rank + 1)) % 3]  # ranks cycle through their tensors at different paces
        mine.copy_(of(rank, 1 << 17))
        dist.all_reduce(mine)
        assert torch.equal(mine, sum(of(r, 1 << 17) for r in range(size)))


@pytest.mark.sizes(2, 4)
def test_ranks_that_sum_different_tensors_of_those_bound(size):
    """Each rank has bound both tensors, and passes its last one again, which differs between ranks."""
    rank = dist.get_rank()
    tensors = [torch.empty(1 << 17), torch.empty(1 << 17)]
    for number in [0] * 4 + [1] * 4 + [rank % 2] * 3 + [0] * 3:
        tensors[number].fill_(rank + 1.0)
        dist.all_reduce(tensors[number])
        assert (tensors[number] == size * (size + 1) / 2).all()


@pytest.mark.parametrize("dtype", INTEGERS + FLOATS, ids=str)
def test_dtypes_and_ops(size, dtype):
    every = torch.stack([of(rank, 6, dtype) for rank in range(size)])
    expected = {
        dist.ReduceOp.SUM: every.sum(0).to(dtype),
        dist.ReduceOp.PRODUCT: every.prod(0).to(dtype),
        dist.ReduceOp.MIN: every.amin(0),
        dist.ReduceOp.MAX: every.amax(0),
        dist.ReduceOp.AVG: every.sum(0).div(size, rounding_mode=None if dtype.is_floating_point else "trunc").to(dtype),
    }
    for op, reduced in expected.items():
        x = every[dist.get_rank()].clone()
        dist.all_reduce(x, op)
        assert torch.equal(x, reduced), op


BITS = {"BAND": torch.bitwise_and, "BOR": torch.bitwise_or, "BXOR": torch.bitwise_xor}


@pytest.mark.parametrize("op", BITS)
def test_bits(size, op):
    def values_of(rank):
        return torch.arange(6) * (rank + 1) % 7 + 8

    for dtype in (*INTEGERS, torch.bool):
        x = values_of(dist.get_rank()).to(dtype)
        dist.all_reduce(x, getattr(dist.ReduceOp, op))
        assert torch.equal(x, functools.reduce(BITS[op], (values_of(rank).to(dtype) for rank in range(size))))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_sums_of_products(size, dtype):
    """Each rank has its own factor, a number or a tensor."""
    rank = dist.get_rank()
    expected = sum(of(r, 6).double() * (r + 0.5) for r in range(size)).to(dtype)
    for factor in (rank + 0.5, torch.tensor([rank + 0.5])):
        op = dist._make_nccl_premul_sum(factor)
        x = of(rank, 6, dtype)
        dist.all_reduce(x, op)
        assert torch.equal(x, expected)
        x = of(rank, 6, dtype)
        dist.reduce(x, size - 1, op)
        assert torch.equal(x, expected if rank == size - 1 else of(rank, 6, dtype))
        values_of, out = of(rank, 6, dtype).repeat(size), torch.zeros(6, dtype=dtype)
        dist.reduce_scatter_tensor(out, values_of, op)
        assert torch.equal(out, expected)
        assert torch.equal(values_of, of(rank, 6, dtype).repeat(size))


def sparse(rank, size):
    """Return a sparse tensor with different indices on each rank, some of them twice, and none on the last rank."""
    indices = [] if rank == size - 1 and size > 1 else [[i % 4, rank] for i in range(rank + 5)]
    values = torch.arange(3.0 * len(indices)).view(-1, 3) + rank
    return torch.sparse_coo_tensor(
        torch.tensor(indices, dtype=torch.long).view(-1, 2).t(), values, (4, size, 3), check_invariants=True
    )


def test_sparse(size):
    rank = dist.get_rank()
    expected = sum(sparse(r, size).to_dense() for r in range(size))
    x = sparse(rank, size)
    dist.all_reduce(x)
    assert torch.equal(x.to_dense(), expected)
    y = sparse(rank, size)
    dist.all_reduce(y, async_op=True).wait()
    assert torch.equal(y.to_dense(), expected)


def test_bool_and_complex(size):
    x = torch.tensor([True, dist.get_rank() == 0, False])
    dist.all_reduce(x)
    assert x.tolist() == [True, True, False]
    z = torch.full((3,), 1j * dist.get_rank() + 1)
    dist.all_reduce(z)
    assert torch.equal(z, torch.full((3,), size + 1j * sum(range(size))))


def test_non_contiguous(size):
    whole = torch.zeros(300, 400)
    x = whole.t()[::2]
    x.fill_(dist.get_rank())
    dist.all_reduce(x)
    assert (x == sum(range(size))).all()
    assert whole.sum() == x.sum()  # the gaps are unchanged
    y = torch.full((6, 6), float(dist.get_rank())).t()[::2]
    dist.broadcast(y, size - 1)
    assert (y == size - 1).all()


@pytest.mark.parametrize("count", SIZES)
def test_rooted(size, count):
    rank = dist.get_rank()
    for root in range(size):
        x = of(rank, count)
        dist.broadcast(x, root)
        assert torch.equal(x, of(root, count))
        x = of(rank, count)
        dist.reduce(x, root)
        if rank == root:
            assert torch.equal(x, sum(of(r, count) for r in range(size)))
        outs = [torch.zeros(count) for _ in range(size)] if rank == root else None
        dist.gather(of(rank, count), outs, root)
        assert outs is None or all(torch.equal(out, of(r, count)) for r, out in enumerate(outs))
        out = torch.zeros(count)
        dist.scatter(out, [of(r, count) for r in range(size)] if rank == root else None, root)
        assert torch.equal(out, of(rank, count))


@pytest.mark.parametrize("count", SIZES)
def test_all_gather_and_reduce_scatter(size, count):
    rank = dist.get_rank()
    every = torch.stack([of(r, count) for r in range(size)])
    outs = [torch.zeros(count) for _ in range(size)]
    dist.all_gather(outs, of(rank, count))
    assert torch.equal(torch.stack(outs), every)
    out = torch.zeros(size, count)
    dist.all_gather_into_tensor(out, of(rank, count))
    assert torch.equal(out, every)
    summed = torch.stack([of(rank + r, count) for r in range(size)]).sum(0)
    out = torch.zeros(count)
    dist.reduce_scatter(out, [of(rank + r, count) for r in range(size)])
    assert torch.equal(out, summed)
    out = torch.zeros(count)
    dist.reduce_scatter_tensor(out, torch.cat([of(rank + r, count) for r in range(size)]))
    assert torch.equal(out, summed)


def test_uneven_lists(size):
    rank = dist.get_rank()
    outs = [torch.zeros(r + 1) for r in range(size)]
    dist.all_gather(outs, of(rank, rank + 1))
    assert all(torch.equal(out, of(r, r + 1)) for r, out in enumerate(outs))
    out = torch.zeros(rank + 1)
    dist.reduce_scatter(out, [of(rank, r + 1) for r in range(size)])
    assert torch.equal(out, sum(of(r, rank + 1) for r in range(size)))


def test_all_to_all(size):
    rank = dist.get_rank()
    out = torch.zeros(size, 2)
    dist.all_to_all_single(out, torch.tensor([[rank, to] for to in range(size)], dtype=torch.float32))
    assert out.tolist() == [[r, rank] for r in range(size)]
    outs = [torch.zeros(rank + r) for r in range(size)]
    dist.all_to_all(outs, [torch.full((rank + to,), float(rank)) for to in range(size)])
    assert all((out == r).all() for r, out in enumerate(outs))
    out = torch.zeros(sum(rank + r for r in range(size)), 3)
    sends, receives = [rank + to for to in range(size)], [rank + r for r in range(size)]
    dist.all_to_all_single(out, torch.full((sum(sends), 3), float(rank)), receives, sends)
    assert all((part == r).all() for r, part in enumerate(out.split(receives)))


def test_coalesced(size):
    rank = dist.get_rank()
    group = dist.group.WORLD
    with dist._coalescing_manager(group, async_ops=True) as manager:
        xs = [of(rank, 3), of(rank, 5)]
        for x in xs:
            dist.all_reduce(x)
    manager.wait()
    assert all(torch.equal(x, sum(of(r, len(x)) for r in range(size))) for x in xs)
    with dist._coalescing_manager(group):
        outs = [torch.zeros(size * 3), torch.zeros(size * 5)]
        for out, x in zip(outs, [of(rank, 3), of(rank, 5)], strict=True):
            dist.all_gather_into_tensor(out, x)
    assert all(torch.equal(out, torch.cat([of(r, len(out) // size) for r in range(size)])) for out in outs)


def test_async(size):
    xs = [of(dist.get_rank(), count) for count in (3, 1 << 17, 3)]
    works = [dist.all_reduce(x, async_op=True) for x in xs]
    futures = [work.get_future() for work in works]
    dist.barrier()  # comes after them
    assert all(work.is_completed() for work in works)
    assert all(re.fullmatch(r"Pending\(ended\)|PlanWork\(\w+\(all_reduce.*\)\)", repr(work)) for work in works)
    for x, future in zip(xs, futures, strict=True):
        assert torch.equal(future.wait()[0], sum(of(r, len(x)) for r in range(size)))


@pytest.mark.sizes(2, 4)
def test_an_asynchronous_call_does_not_wait_for_the_others(size):
    rank = dist.get_rank()
    x, token = of(rank), torch.zeros(1)
    if rank == 0:
        work = dist.all_reduce(x, async_op=True)
        for other in range(1, size):
            dist.send(token, other)
    else:
        dist.recv(token, 0)
        work = dist.all_reduce(x, async_op=True)
    work.wait()
    assert torch.equal(x, sum(of(r) for r in range(size)))


def test_asynchronous_calls_that_have_been_made_before(size):
    """Short calls start in the caller's thread; their results may be awaited in any order."""
    for run in range(3):
        xs = [of(dist.get_rank() + number, 100) for number in range(4)]
        works = [dist.all_reduce(x, async_op=True) for x in xs]
        dist.barrier()  # comes after them
        futures = [work.get_future() for work in works[::2]]
        for number in (3, 0, 2, 1):
            assert works[number].wait()
            assert works[number].is_success()
            assert torch.equal(xs[number], sum(of(rank + number, 100) for rank in range(size))), run
        for future, x in zip(futures, xs[::2], strict=True):
            assert future.wait()[0] is x


@pytest.mark.sizes(2, 4)
def test_asynchronous_calls_of_which_ranks_have_made_others(size):
    for _ in range(2):
        for count in (3, 4):
            dist.all_reduce(torch.ones(count), async_op=True).wait()
    for _ in range(2):
        work = dist.all_reduce(torch.ones(3 + (dist.get_rank() > 0)), async_op=True)
        with pytest.raises(dist.DistBackendError, match=r"rank 0 calls all_reduce\(3 elements.*all_reduce\(4 elements"):
            work.wait()
    x = torch.ones(3)
    dist.all_reduce(x)
    assert (x == size).all()


@pytest.mark.sizes(2, 4)
def test_threads_that_share_a_group(size):
    """Whichever thread's call comes first, the other ranks' matching call is the same."""

    def reduce(number):
        xs = [torch.ones(8) for _ in range(50)]
        works = [dist.all_reduce(x, async_op=bool(number)) for x in xs]
        for work in works:
            assert work is None or work.wait()
        return torch.stack(xs)

    with ThreadPoolExecutor(3) as threads:
        for sums in threads.map(reduce, range(3)):
            assert (sums == size).all()


@pytest.mark.sizes(2, 4)
@pytest.mark.parametrize("count", SIZES)
def test_point_to_point(size, count):
    rank = dist.get_rank()
    after, before = (rank + 1) % size, (rank - 1) % size
    x = torch.zeros(count)
    works = dist.batch_isend_irecv([dist.P2POp(dist.isend, of(rank, count), after), dist.P2POp(dist.irecv, x, before)])
    with pytest.raises(NotImplementedError, match="a message has no future"):
        works[-1].get_future()
    for work in works:
        work.wait()
    assert torch.equal(x, of(before, count))
    if rank == 0:
        sources = {dist.recv(x, tag=7) for _ in range(size - 1)}
        assert sources == set(range(1, size))
    else:
        dist.send(of(rank, count), 0, tag=7)


@pytest.mark.sizes(2, 4)
def test_messages_of_tensors_with_gaps(size):
    x = torch.zeros(4, 4)
    if dist.get_rank() == 0:
        dist.send(torch.arange(16.0).view(4, 4).t(), 1)
    elif dist.get_rank() == 1:
        dist.recv(x.t(), 0)
        assert torch.equal(x, torch.arange(16.0).view(4, 4))


def test_objects(size):
    rank = dist.get_rank()
    every = [None] * size
    dist.all_gather_object(every, {"rank": rank, "long": "x" * rank})
    assert every == [{"rank": r, "long": "x" * r} for r in range(size)]
    objects = [["root", None]] if rank == 0 else [None]
    dist.broadcast_object_list(objects)
    assert objects == [["root", None]]


@pytest.mark.sizes(2, 4)
def test_ranks_that_disagree(size):
    rank = dist.get_rank()
    with pytest.raises(dist.DistBackendError, match=r"rank 0 calls all_reduce\(3 elements.*all_reduce\(4 elements"):
        dist.all_reduce(torch.zeros(3 + (rank > 0)))
    with pytest.raises(dist.DistBackendError, match=r"float32.*int32"):
        dist.all_reduce(torch.zeros(3, dtype=torch.int32 if rank else torch.float32))
    with pytest.raises(dist.DistBackendError, match=r"root=0.*root=1"):
        dist.broadcast(torch.zeros(3), min(rank, 1))
    with pytest.raises(dist.DistBackendError, match=r"barrier.*all_reduce"):
        dist.all_reduce(torch.zeros(3)) if rank else dist.barrier()
    with pytest.raises(dist.DistBackendError, match=r"op=bxor.*op=sum"):
        dist.all_reduce(torch.zeros(3, dtype=torch.int32), dist.ReduceOp.SUM if rank else dist.ReduceOp.BXOR)
    with pytest.raises(dist.DistBackendError, match=r"op=sum.*PREMUL_SUM.*op=sum"):
        dist.all_reduce(torch.zeros(3), dist.ReduceOp.SUM if rank else dist._make_nccl_premul_sum(2.0))
    x = torch.ones(3)
    with pytest.raises(
        dist.DistBackendError, match=r"all_gather\(.*sparse \(3,\) of torch.float32.*all_reduce\(3 elem"
    ):
        dist.all_reduce(x if rank else x.to_sparse())
    with pytest.raises(dist.DistBackendError, match=r"sparse \(3,\).*sparse \(4,\)"):
        dist.all_reduce(torch.ones(3 + (rank > 0)).to_sparse())
    dist.all_reduce(x)  # the group still works
    assert (x == size).all()


@pytest.mark.sizes(2)
@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("kind", ["dense", "sparse", "times a factor"])
def test_ranks_that_disagree_are_told_where(size, kind, is_async):
    x = torch.zeros(3 + dist.get_rank())
    op = dist._make_nccl_premul_sum(2.0) if kind == "times a factor" else dist.ReduceOp.SUM
    line = r"test_torch_backend.py:\d+\)"
    with pytest.raises(dist.DistBackendError, match=rf"\b3\b.*{line}.*\b4\b.*{line}"):
        all_reduced(x.to_sparse() if kind == "sparse" else x, op, is_async)


def all_reduced(x, op, is_async):
    work = dist.all_reduce(x, op, async_op=is_async)
    if work is not None:
        work.wait()


@pytest.mark.sizes(2, 4)
def test_monitored_barrier(size):
    group = dist.group.WORLD
    group.monitored_barrier()
    if dist.get_rank() == size - 1:
        dist.barrier()
        return
    with pytest.raises(dist.DistBackendError, match=f"Ranks {size - 1} failed to pass monitoredBarrier in 300 ms"):
        group.monitored_barrier(timedelta(seconds=0.3), wait_all_ranks=True)
    dist.barrier()


@pytest.mark.sizes(4)
def test_monitored_barrier_of_rank_0_alone(size):
    group = dist.group.WORLD
    if dist.get_rank() == 0:
        for name_all, late in ((False, "Rank 1"), (True, "Ranks 1, 2, 3")):
            with pytest.raises(
                dist.DistBackendError, match=rf"\[Rank 0\]: {late} failed to pass monitoredBarrier in 100 ms"
            ):
                group.monitored_barrier(timedelta(seconds=0.1), wait_all_ranks=name_all)
        with pytest.raises(dist.DistBackendError, match="Rank 0 timed out in monitoredBarrier after 0 ms"):
            group.monitored_barrier(timedelta(0))
    dist.barrier()


REFUSED = {
    "bits of floats": (lambda: dist.all_reduce(torch.ones(3), dist.ReduceOp.BOR), "op 'bor' of float32"),
    "product of integers and a factor": (
        lambda: dist.all_reduce(torch.ones(3, dtype=torch.int32), dist._make_nccl_premul_sum(0.5)),
        "op PREMUL_SUM of torch.int32: only floats are multiplied, so use SUM, or cast",
    ),
    "maximum of sparse": (
        lambda: dist.all_reduce(torch.ones(3).to_sparse(), dist.ReduceOp.MAX),
        "op MAX of a sparse tensor: use SUM, or pass tensor.to_dense()",
    ),
    "sparse rows": (lambda: dist.all_reduce(torch.eye(3).to_sparse_csr()), "layout torch.sparse_csr: pass tensor.to_"),
    "sparse elsewhere": (
        lambda: dist.broadcast(torch.eye(3).to_sparse(), 0),
        "layout torch.sparse_coo: pass tensor.to",
    ),
}


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize(("call", "message"), REFUSED.values(), ids=REFUSED)
def test_refused(size, call, message):
    with pytest.raises(dist.DistBackendError, match=message.replace("(", r"\(").replace(")", r"\)")):
        call()
    dist.barrier()
