"""Rounding of sums of 16-bit floats, and of float32 sent as bfloat16."""

import numpy as np
import pytest

from collectives import algorithms
from collectives.arrays.ops import BFLOAT16
from collectives.arrays.views import dtype_of
from mpi_tests.helpers.cuda_arrays import each_mode
from mpi_tests.helpers.reference import HALVES, REDUCTIONS, algorithms_of, expected, inputs, same

MANTISSA_BITS = {"float16": 10, "bfloat16": 7}

each_half = pytest.mark.parametrize("dtype", HALVES)
each_reduction = pytest.mark.parametrize("collective", REDUCTIONS)


def by_messages(collective, size):
    return [row.name for row in algorithms.rows(collective, size) if not row.access]


def by_hand(collective, size):
    return [name for name in algorithms_of(collective, size) if name != "mpi"]


def exact_in_float32(size, count, dtype):
    """Return numbers whose float32 sums are exact in any order, but whose 16-bit sums round at nearly every hop."""
    rng = np.random.default_rng([size, count])
    shape = size, count
    return list((rng.integers(-255, 256, shape) * 2.0 ** rng.integers(0, 5, shape)).astype(dtype_of(dtype)))


def ulp(x, dtype):
    """Return the distance between neighbouring numbers of a 16-bit type around `x`."""
    return 2.0 ** (np.floor(np.log2(np.maximum(abs(x), 1e-4))) - MANTISSA_BITS[dtype])


@each_half
@each_reduction
def test_16_bit_sums_are_rounded_once(comm, collective, dtype):
    for count in (1, 2 * comm.size + 1, 1000):
        xs = exact_in_float32(comm.size, count, dtype)
        want = expected(collective, xs, comm.rank)
        for algorithm in by_hand(collective, comm.size):
            actual = getattr(comm, collective)(xs[comm.rank].copy(), algorithm=algorithm)
            same(actual, want, (algorithm, count))


@each_half
def test_16_bit_averages_and_products(comm, dtype):
    rng = np.random.default_rng(3)
    xs = list((rng.standard_normal((comm.size, 1000)) + 1).astype(dtype_of(dtype)))
    wide = [x.astype(np.float64) for x in xs]
    for op, exact, magnitude in (
        ("avg", np.mean(wide, 0), np.mean(np.abs(wide), 0)),
        ("sum", np.sum(wide, 0), np.sum(np.abs(wide), 0)),
        ("prod", np.prod(wide, 0), np.prod(np.abs(wide), 0)),
    ):
        for algorithm in by_hand("all_reduce", comm.size):
            actual = comm.all_reduce(xs[comm.rank].copy(), op=op, algorithm=algorithm).astype(np.float64)
            assert np.all(abs(actual - exact) <= ulp(exact, dtype) + comm.size * 2.0**-24 * magnitude), (op, algorithm)


@each_half
@pytest.mark.sizes(3, proof=(1, 4))
@each_mode
def test_16_bit_sums_on_a_device(mpi_comm, cuda, dtype, mpi_reads):
    from collectives import Communicator

    comm = Communicator(mpi_comm, segment_bytes=16)
    cuda.use(mpi_reads=mpi_reads)
    for collective in REDUCTIONS:
        xs = exact_in_float32(comm.size, 29, dtype)
        for algorithm in by_messages(collective, comm.size):
            actual = getattr(comm, collective)(cuda.put(xs[comm.rank]), algorithm=algorithm)
            same(cuda.get(actual), expected(collective, xs, comm.rank), (collective, algorithm))
    comm.free()


@pytest.mark.sizes(2, 4)
def test_only_sums_and_products_travel_as_float32(comm):
    """A maximum needs no more bits than its operands."""
    x = np.ones(8, np.float16)
    dtypes = {op: comm.plan("all_reduce", x, op=op, algorithm="ring").after for op in ("sum", "max")}
    assert [source.dtype for _, source in dtypes["sum"]] == [np.float32]
    assert dtypes["max"] == []


def is_bfloat16(x):
    return np.array_equal(x, x.astype(BFLOAT16).astype(x.dtype))


def uniform(size, count, seed=0):
    return list(np.random.default_rng([seed, size]).standard_normal((size, count)).astype(np.float32))


@each_reduction
def test_float32_that_travels_as_bfloat16(comm, collective):
    for count in (0, 1, 2 * comm.size + 1, 1000):
        xs = uniform(comm.size, count)
        wide = [x.astype(np.float64) for x in xs]
        exact, magnitude = (expected(collective, each, comm.rank) for each in (wide, [abs(x) for x in wide]))
        for algorithm in [*by_messages(collective, comm.size), "auto"]:
            actual = getattr(comm, collective)(xs[comm.rank].copy(), algorithm=algorithm, wire_dtype="bfloat16")
            assert actual.dtype == np.float32
            if collective == "reduce" and comm.rank != 0:
                same(actual, xs[comm.rank], algorithm)
                continue
            assert np.all(abs(actual - exact) <= comm.size * 2.0**-8 * 1.05 * magnitude), (algorithm, count)
            assert is_bfloat16(actual), algorithm
            if collective == "all_reduce":
                assert len(set(comm.mpi.allgather(actual.tobytes()))) == 1, algorithm


def test_the_error_grows_with_the_roundings_on_the_way(comm):
    """In a tree, each addend is rounded log2 p times, and the result once more."""
    xs = uniform(comm.size, 10_000)
    exact, magnitude = np.sum(xs, 0, np.float64), np.sum(np.abs(xs), 0, np.float64)
    actual = comm.all_reduce(xs[comm.rank].copy(), algorithm="recursive_doubling", wire_dtype="bfloat16")
    power, extras = comm.size.bit_length() - 1, comm.size & (comm.size - 1) != 0
    assert np.all(abs(actual - exact) <= (power + 1 + extras) * 2.0**-8 * 1.02 * magnitude)


@pytest.mark.sizes(1, 2, 5)
@pytest.mark.parametrize("segment_bytes", [8, 40])
def test_wire_dtypes_in_segments_and_out(mpi_comm, segment_bytes):
    from collectives import Communicator

    comm = Communicator(mpi_comm, segment_bytes=segment_bytes)
    xs = inputs(comm.size, 7 * comm.size + 3)  # exact in bfloat16
    for collective in REDUCTIONS:
        for op in ("sum", "max"):
            want = expected(collective, xs, comm.rank, op)
            for algorithm in by_messages(collective, comm.size):
                x, out = xs[comm.rank].copy(), np.full_like(want, 99)
                x.flags.writeable = False
                options = {"op": op, "algorithm": algorithm, "out": out, "wire_dtype": BFLOAT16}
                same(getattr(comm, collective)(x, **options), want, (collective, op, algorithm))
    comm.free()


@pytest.mark.sizes(3, proof=(1, 4))
@each_mode
@pytest.mark.parametrize("segment_bytes", [16, 1 << 20])
def test_wire_dtypes_on_a_device(mpi_comm, cuda, mpi_reads, segment_bytes):
    from collectives import Communicator

    comm, host = Communicator(mpi_comm, segment_bytes=segment_bytes), Communicator(mpi_comm)
    cuda.use(mpi_reads=mpi_reads)
    xs = uniform(comm.size, 29)
    for collective in REDUCTIONS:
        for algorithm in by_messages(collective, comm.size):
            options = {"op": "avg", "algorithm": algorithm, "wire_dtype": "bfloat16"}
            actual = getattr(comm, collective)(cuda.put(xs[comm.rank]), **options)
            same(cuda.get(actual), getattr(host, collective)(xs[comm.rank].copy(), **options), (collective, algorithm))
    comm.free()
    host.free()


@pytest.mark.sizes(2, 3)
def test_half_the_bytes_travel(comm):
    x = np.ones(30 * comm.size, np.float32)
    plan = comm.plan("all_reduce", x, algorithm="ring", wire_dtype="bfloat16")
    sent = [lane.copies[0][0][0].nbytes for bound in plan.rounds for lane in bound.lanes if lane.sends]
    assert sent == [30 * 2] * 2 * (comm.size - 1)
    assert not any(bound.plain for bound in plan.rounds)


def test_both_roundings_and_order_are_kept(comm):
    """Reproducible sums have the same bits for an element of any chunk, although they are rounded at each hop."""
    xs = uniform(comm.size, 1000)
    want = xs[0]
    for x in xs[1:]:
        want = want.astype(BFLOAT16).astype(np.float32) + x
    want = want.astype(BFLOAT16).astype(np.float32)
    for length in (1, comm.size + 1, 1000):
        for collective in REDUCTIONS:
            x = xs[comm.rank][:length].copy()
            actual = getattr(comm, collective)(x, wire_dtype="bfloat16", reproducible=True)
            if collective == "reduce_scatter":
                same(actual, np.array_split(want[:length], comm.size)[comm.rank])
            elif collective == "all_reduce" or comm.rank == 0:
                same(actual, want[:length])
