import sys

import numpy as np
import pytest
import torch

from collectives.arrays.views import dtype_of, flat, to_torch
from mpi_tests.helpers.reference import expected, inputs, reduced

pytestmark = pytest.mark.sizes(1, 2, 3)

DTYPES = ("float32", "float64", "bfloat16", "int64")


def tensors(size, count, dtype):
    return [torch.from_numpy(x).to(getattr(torch, dtype)) for x in inputs(size, count, "int64")]


@pytest.mark.parametrize("dtype", DTYPES)
def test_in_place(comm, dtype):
    xs = tensors(comm.size, 6, dtype)
    for algorithm in ("ring", "recursive_doubling"):
        for shape in ((6,), (2, 3)):
            x = xs[comm.rank].reshape(shape).clone()
            assert comm.all_reduce(x, algorithm=algorithm) is x
            assert torch.equal(x, sum(xs).reshape(shape))
    x = xs[comm.rank].clone()
    assert comm.broadcast(x, root=comm.size - 1) is x
    assert torch.equal(x, xs[-1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_results_are_tensors(comm, dtype):
    xs = tensors(comm.size, 2 * comm.size, dtype)
    arrays = [x.double().numpy() for x in xs]
    for collective in ("reduce_scatter", "all_gather", "all_to_all"):
        actual = getattr(comm, collective)(xs[comm.rank])
        assert actual.dtype == xs[0].dtype
        assert np.array_equal(actual.double().numpy(), expected(collective, arrays, comm.rank))


def test_out(comm):
    xs = tensors(comm.size, 4, "float32")
    x, out = xs[comm.rank].clone().reshape(2, 2), torch.zeros(4)
    assert comm.all_reduce(x, out=out) is out
    assert torch.equal(out, sum(xs))
    assert torch.equal(x.flatten(), xs[comm.rank])
    array = np.zeros(4, np.float32)  # the libraries may be mixed
    assert comm.all_reduce(x, out=array) is array
    assert np.array_equal(array, sum(xs).numpy())


def test_parameters(comm):
    torch.manual_seed(comm.rank)
    layer = torch.nn.Linear(3, 2)
    for parameter in layer.parameters():
        assert comm.broadcast(parameter) is parameter
        gathered = comm.all_gather(parameter, axis=0)
        assert not gathered.requires_grad
        assert all(torch.equal(gathered[: len(parameter)], part) for part in gathered.chunk(comm.size))
    layer(torch.full((1, 3), comm.rank + 1.0)).sum().backward()
    comm.all_reduce(layer.weight.grad, op="avg")
    assert torch.equal(layer.weight.grad, torch.full((2, 3), (comm.size + 1) / 2))


def test_a_plan_follows_the_tensor(comm):
    x = torch.zeros(5, dtype=torch.bfloat16)
    plan = comm.plan("all_reduce", x)
    for run in range(3):
        x.fill_(comm.rank + run)
        assert plan() is x
        assert (x == sum(range(run, run + comm.size))).all()


@pytest.mark.sizes(2)
def test_send_and_recv(comm):
    x = torch.arange(6, dtype=torch.bfloat16).reshape(2, 3)
    if comm.rank == 0:
        comm.send(x, 1)
    else:
        actual = torch.zeros_like(x)
        assert comm.recv(actual, 0) is actual
        assert torch.equal(actual, x)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: torch.zeros(1).expand(6),
            r"x has several elements in one place \(strides \(0,\)\): pass a copy of it",
        ),
        (lambda: torch.zeros(6).to_sparse(), "layout torch.sparse_coo: pass tensor.to_dense()"),
        (lambda: torch.zeros(6, device="meta"), "tensor on device meta: use the CPU or CUDA"),
        (lambda: torch.zeros(6, dtype=torch.complex64).conj(), "resolve_conj"),
        (lambda: torch.zeros(6, dtype=torch.float8_e4m3fn), "Float8_e4m3fn"),
        (lambda: torch.float32, "dtype is not an array"),
    ],
)
def test_tensors_that_are_refused(comm, make, message):
    from collectives import InputError

    x = make() if comm.rank == 0 else torch.zeros(6)
    with pytest.raises(InputError, match=message):
        comm.all_reduce(x)
    assert comm.all_reduce(torch.ones(1)) == comm.size


@pytest.mark.sizes(1)
def test_cuda_tensors_need_cupy(comm, monkeypatch):
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(ValueError, match="tensor on device cpu needs CuPy: pip install"):
        comm.all_reduce(torch.ones(3))


@pytest.mark.sizes(1)
def test_views_share_memory(comm):
    for dtype in DTYPES:
        x = torch.zeros(2, 3, dtype=getattr(torch, dtype))
        flat(x)[1][4] = 5
        assert x[1, 1] == 5
        array = np.zeros(6, dtype_of(dtype))
        tensor = to_torch(array)
        assert tensor.dtype == x.dtype
        tensor[2] = 3
        assert array[2] == 3
    assert reduced([np.ones(1)], "sum") == 1
