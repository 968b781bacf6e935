"""Collectives on many small arrays fused into one."""

import numpy as np
import pytest
import torch

from collectives.arrays.views import dtype_of
from mpi_tests.helpers.cuda_arrays import each_mode
from mpi_tests.helpers.reference import HALVES, algorithms_of, expected, inputs, same

SHAPES = ((3,), (2, 2), (), (0, 4), (1, 5, 1))
LENGTHS = [int(np.prod(shape)) for shape in SHAPES]


def cut(x):
    """Split a flat array into arrays of those shapes."""
    parts = np.split(x, np.cumsum(LENGTHS)[:-1])
    return [part.reshape(shape).copy() for part, shape in zip(parts, SHAPES, strict=True)]


@pytest.mark.parametrize("collective", ["all_reduce", "broadcast", "reduce", "scan", "exscan"])
def test_the_results_land_in_the_arrays(comm, collective):
    xs = inputs(comm.size, sum(LENGTHS))
    for algorithm in algorithms_of(collective, comm.size):
        mine = cut(xs[comm.rank])
        actual = getattr(comm, collective)(comm.fuse(mine), algorithm=algorithm)
        for part, own, want in zip(actual, mine, cut(expected(collective, xs, comm.rank)), strict=True):
            assert part is own
            same(part, want, algorithm)


@pytest.mark.parametrize("root", [0, -1])
def test_who_only_gives_and_who_only_gets(comm, root):
    xs, root = inputs(comm.size, sum(LENGTHS)), root % comm.size
    for collective, changed in (("reduce", comm.rank == root), ("broadcast", comm.rank != root)):
        mine = cut(xs[comm.rank])
        for x in mine:
            x.flags.writeable = changed
        getattr(comm, collective)(comm.fuse(mine), root=root)
        for x, want in zip(mine, cut(expected(collective, xs, comm.rank, root=root)), strict=True):
            same(x, want, collective)


def test_a_plan_works_on_what_the_arrays_hold(comm):
    mine = cut(np.zeros(sum(LENGTHS), np.float32))
    for algorithm in algorithms_of("all_reduce", comm.size):
        plan = comm.plan("all_reduce", comm.fuse(mine), op="avg", algorithm=algorithm)
        for run in range(4):
            for index, x in enumerate(mine):
                x[...] = index + run + comm.rank
            actual = plan() if run % 2 else plan.start().wait()
            mean = (comm.size - 1) / 2
            assert [x.tolist() for x in actual] == [np.full(s, i + run + mean).tolist() for i, s in enumerate(SHAPES)]
        plan.free()


@pytest.mark.parametrize("dtype", [*HALVES, "int8", "complex64"])
def test_dtypes(comm, dtype):
    xs = inputs(comm.size, sum(LENGTHS), dtype)
    actual = comm.all_reduce(comm.fuse(cut(xs[comm.rank])), blocking=False).wait()
    for part, want in zip(actual, cut(expected("all_reduce", xs, comm.rank)), strict=True):
        same(part, want)


def test_with_what_is_asked_of_the_sum(comm):
    xs = list(np.random.default_rng(comm.size).standard_normal((comm.size, sum(LENGTHS))).astype(np.float32))
    for options in ({"reproducible": True}, {"wire_dtype": "bfloat16", "algorithm": "ring"}):
        actual = comm.all_reduce(comm.fuse(cut(xs[comm.rank])), **options)
        for part, want in zip(actual, cut(comm.all_reduce(xs[comm.rank].copy(), **options)), strict=True):
            same(part, want, options)


@pytest.mark.sizes(1, 2, 3)
def test_tensors(comm):
    layer = torch.nn.Linear(3, 2)
    tensors = [*layer.parameters(), torch.zeros(2, 2)]
    with torch.no_grad():
        for index, tensor in enumerate(tensors):
            tensor.fill_(comm.rank + index)
    actual = comm.all_reduce(comm.fuse(tensors))
    total = sum(range(comm.size))
    for index, (tensor, own) in enumerate(zip(actual, tensors, strict=True)):
        assert tensor is own
        assert bool((tensor == total + index * comm.size).all())
    half = torch.full((3,), comm.rank + 1.0, dtype=torch.bfloat16)
    mixed = comm.broadcast(comm.fuse([half, np.zeros(2, dtype_of("bfloat16"))]), root=comm.size - 1)
    assert half.tolist() == [comm.size] * 3
    assert mixed[0] is half


@pytest.mark.sizes(1, 3)
@each_mode
def test_on_a_device(new_comm, cuda, mpi_reads):
    cuda.use(mpi_reads=mpi_reads)
    xs = inputs(new_comm.size, sum(LENGTHS))
    actual = new_comm.all_reduce(new_comm.fuse([cuda.put(x) for x in cut(xs[new_comm.rank])]))
    for part, want in zip(actual, cut(expected("all_reduce", xs, new_comm.rank)), strict=True):
        same(cuda.get(part), want)


def test_the_buffer_of_a_plan_is_symmetric_memory(comm):
    plan = comm.plan("all_reduce", comm.fuse([np.zeros(1 << 16), np.zeros(5)]))
    assert all(comm.context.windows.window_of(part) for part, _ in plan.before)


@pytest.mark.sizes(2, 3)
def test_without_the_check_ranks_may_have_called_more_or_less(mpi_comm):
    from collectives import Communicator, InputError

    comm = Communicator(mpi_comm, check=False)
    if comm.rank == 1:
        with pytest.raises(InputError, match="list is not an array"):
            comm.all_reduce([1.0])
    (x,) = comm.all_reduce(comm.fuse([np.ones(2)]))
    assert x.tolist() == [comm.size] * 2
    comm.free()


@pytest.mark.sizes(1, 2)
def test_arrays_on_two_devices_of_a_kind(comm, cuda):
    from collectives import InputError

    arrays = [cuda.use(index).put(np.ones(3)) for index in range(2)]
    with pytest.raises(InputError, match=r"cannot fuse arrays of different devices \(cuda:0, cuda:1\)"):
        comm.all_reduce(comm.fuse(arrays))
