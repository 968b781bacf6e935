"""Reproducible sums: algorithms that sum in rank order give the same bits for every length and segment size."""

import numpy as np
import pytest

from collectives import algorithms
from collectives.arrays.ops import COMPLEX, HALVES
from collectives.arrays.views import dtype_of
from mpi_tests.helpers.cuda_arrays import each_mode
from mpi_tests.helpers.reference import DTYPES, REDUCTIONS, UFUNCS, ops_of

TEN_TO_THE = {"float16": 4, "float64": 200}  # exponent of the largest magnitude; 30 for other dtypes


def in_order(collective, *, by_messages=False):
    rows = [r for r in algorithms.rows(collective) if r.in_order and not (by_messages and r.access)]
    return [*(row.name for row in rows), "auto"]


def wild(size, count, dtype):
    """Return numbers of all magnitudes with zeros of both signs, so that sums depend on the order."""
    rng, element, shape = np.random.default_rng([size, count]), dtype_of(dtype), (size, count)
    if element.kind == "b":
        return list(rng.random(shape) < 0.5)
    if element.kind in "iu":
        return list(np.frombuffer(rng.bytes(size * count * element.itemsize), element).reshape(shape))
    most = TEN_TO_THE.get(dtype, 30) / size
    real, imag = (rng.standard_normal(shape) * 10.0 ** rng.uniform(-most, most, shape) for _ in range(2))
    xs = np.where(rng.random(shape) < 0.1, rng.choice([0.0, -0.0], shape), real)
    return list((xs + 1j * imag if element in COMPLEX else xs).astype(element))


def reduce(op, left, right):
    if op == "prod" and left.dtype in COMPLEX:  # NumPy's own may or may not fuse multiply and add
        real = left.real * right.real - left.imag * right.imag
        imag = left.real * right.imag + left.imag * right.real
        return np.stack([real, imag], -1).reshape(-1).view(left.dtype)
    return UFUNCS[op](left, right)


def left_to_right(xs, op):
    """Compute ((x0 + x1) + x2) + ..., rounded once at the end."""
    wide = [x.astype(np.float32) if x.dtype in HALVES else x for x in xs]
    total = wide[0]
    with np.errstate(all="ignore"):
        for x in wide[1:]:
            total = reduce(op, total, x)
        if op == "avg" and total.dtype.kind in "iu":
            return np.array([abs(x) // len(xs) * (1 if x > 0 else -1) for x in total.tolist()], total.dtype)
        if op == "avg":
            parts = total.view(total.real.dtype)
            total = (parts / parts.dtype.type(len(xs))).view(total.dtype)
        return total.astype(xs[0].dtype)


def part_of(want, collective, comm, root=0):
    if collective == "reduce_scatter":
        return np.array_split(want, comm.size)[comm.rank]
    return want if collective == "all_reduce" or comm.rank == root else None


def check_bits(comm, collective, x, want, algorithm, where=(), **arguments):
    actual = getattr(comm, collective)(x.copy(), algorithm=algorithm, reproducible=True, **arguments)
    want = part_of(want, collective, comm, arguments.get("root", 0))
    assert want is None or actual.tobytes() == want.tobytes(), (collective, algorithm, x.dtype, arguments, *where)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.sizes(3, proof=(1, 2, 5, 8))
def test_every_dtype_and_op(comm, dtype):
    for op in ops_of(dtype):
        xs = wild(comm.size, 4 * comm.size + 3, dtype)
        want = left_to_right(xs, op)
        for collective in REDUCTIONS if dtype in ("float32", "bfloat16") else ["all_reduce"]:
            for algorithm in in_order(collective):
                check_bits(comm, collective, xs[comm.rank], want, algorithm, op=op)


def test_every_length(comm):
    """An element's result depends neither on its neighbours nor on its chunk."""
    xs = wild(comm.size, 1000, "float32")
    want = left_to_right(xs, "sum")
    for length in (1, comm.size - 1, comm.size + 1, 100, 1000):
        for collective in REDUCTIONS:
            for algorithm in in_order(collective):
                check_bits(comm, collective, xs[comm.rank][:length], want[:length], algorithm)


@pytest.mark.parametrize("segment_bytes", [8, 40])
@pytest.mark.sizes(2, 3, 5)
def test_every_segment(mpi_comm, segment_bytes):
    from collectives import Communicator

    comm = Communicator(mpi_comm, segment_bytes=segment_bytes)
    for dtype in ("float32", "bfloat16"):
        xs = wild(comm.size, 201, dtype)
        for collective in REDUCTIONS:
            check_bits(comm, collective, xs[comm.rank], left_to_right(xs, "avg"), "chain", op="avg")
    comm.free()


def test_long_arrays_and_symmetric_ones(comm):
    count = 600_000 // comm.size
    xs = wild(comm.size, count, "float32")
    want = left_to_right(xs, "sum").tobytes()
    x = comm.empty(count)
    for algorithm in in_order("all_reduce"):
        for mine in (x, np.empty_like(x)):
            mine[:] = xs[comm.rank]
            plan = comm.plan("all_reduce", mine, algorithm=algorithm, reproducible=True)
            assert plan().tobytes() == want, algorithm
            plan.free()


def test_every_root_and_uneven_counts(comm):
    xs = wild(comm.size, 2 * comm.size + 1, "float32")
    want = left_to_right(xs, "sum")
    for algorithm in in_order("reduce"):
        for root in range(comm.size):
            check_bits(comm, "reduce", xs[comm.rank], want, algorithm, root=root)
    counts = [0] * (comm.size - 1) + [2 * comm.size + 1]
    for algorithm in in_order("reduce_scatter"):
        actual = comm.reduce_scatter(xs[comm.rank], counts=counts, algorithm=algorithm, reproducible=True)
        assert actual.tobytes() == (want if comm.rank == comm.size - 1 else want[:0]).tobytes(), algorithm


@pytest.mark.sizes(4, 8)
def test_several_nodes(mpi_comm, monkeypatch):
    from collectives import Communicator, InputError

    monkeypatch.setenv("COLLECTIVES_FAKE_NODES", f"2x{mpi_comm.size // 2}")
    comm = Communicator(mpi_comm)
    xs = wild(comm.size, 301, "bfloat16")
    for collective in REDUCTIONS:
        for algorithm in in_order(collective, by_messages=True):
            check_bits(comm, collective, xs[comm.rank], left_to_right(xs, "sum"), algorithm)
        assert comm.plan(collective, np.ones(1 << 16), reproducible=True).name == f"{collective} chain"
    with pytest.raises(InputError, match=r"needs ranks of one node, but there are 2 nodes: use auto, chain$"):
        comm.all_reduce(np.ones(3), algorithm="two_shot", reproducible=True)
    comm.free()


@pytest.mark.sizes(3)
@each_mode
def test_on_a_device(new_comm, cuda, mpi_reads):
    cuda.use(mpi_reads=mpi_reads)
    comm, xs = new_comm, wild(new_comm.size, 50, "float32")
    actual = comm.all_reduce(cuda.put(xs[comm.rank]), reproducible=True)
    assert cuda.get(actual).tobytes() == left_to_right(xs, "sum").tobytes()


@pytest.mark.sizes(5)
def test_orders_differ_without_it(comm):
    """Without reproducible=True, orders differ; otherwise the other tests would prove nothing."""
    xs = wild(comm.size, 100, "float32")
    actual = comm.all_reduce(xs[comm.rank].copy(), algorithm="ring")
    assert actual.tobytes() != left_to_right(xs, "sum").tobytes()
