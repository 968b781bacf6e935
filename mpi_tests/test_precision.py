"""How exactly 16-bit floats are summed up, and float32 that travels as bfloat16."""

import numpy as np
import pytest

from collectives import algorithms
from collectives.arrays import dtype_of
from mpi_tests.fake_device import FakeDevice
from mpi_tests.reference import HALVES, REDUCTIONS, algorithms_of, expected, same

MANTISSA_BITS = {"float16": 10, "bfloat16": 7}

each_half = pytest.mark.parametrize("dtype", HALVES)
each_reduction = pytest.mark.parametrize("collective", REDUCTIONS)


def by_messages(collective, size):
    return [row.name for row in algorithms.rows(collective, size) if not row.reach]


def by_hand(collective, size):
    return [name for name in algorithms_of(collective, size) if name != "mpi"]


def exact_in_float32(size, count, dtype):
    """Numbers that float32 adds up exactly in any order, but that 16 bits round at nearly every hop."""
    rng = np.random.default_rng([size, count])
    shape = size, count
    return list((rng.integers(-255, 256, shape) * 2.0 ** rng.integers(0, 5, shape)).astype(dtype_of(dtype)))


def ulp(x, dtype):
    """The distance between the numbers of a 16-bit type about `x`."""
    return 2.0 ** (np.floor(np.log2(np.maximum(abs(x), 1e-4))) - MANTISSA_BITS[dtype])


@each_half
@each_reduction
def test_16_bit_sums_are_rounded_once(comm, collective, dtype):
    for count in (1, 2 * comm.size + 1, 1000):
        xs = exact_in_float32(comm.size, count, dtype)
        want = expected(collective, xs, comm.rank)
        for algorithm in by_hand(collective, comm.size):
            got = getattr(comm, collective)(xs[comm.rank].copy(), algorithm=algorithm)
            same(got, want, (algorithm, count))


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
            got = comm.all_reduce(xs[comm.rank].copy(), op=op, algorithm=algorithm).astype(np.float64)
            assert np.all(abs(got - exact) <= ulp(exact, dtype) + comm.size * 2.0**-24 * magnitude), (op, algorithm)


@each_half
@pytest.mark.sizes(1, 3, 4)
@pytest.mark.parametrize("mpi_reads", [False, True], ids=["staged", "read-by-mpi"])
def test_16_bit_sums_on_a_device(mpi_comm, dtype, mpi_reads):
    from collectives import Communicator

    comm = Communicator(mpi_comm, segment_bytes=16)
    device = FakeDevice(mpi_reads)
    for collective in REDUCTIONS:
        xs = exact_in_float32(comm.size, 29, dtype)
        for algorithm in by_messages(collective, comm.size):
            got = getattr(comm, collective)(device.put(xs[comm.rank]), algorithm=algorithm)
            same(device.get(got), expected(collective, xs, comm.rank), (collective, algorithm))
    comm.free()


@pytest.mark.sizes(2, 4)
def test_only_sums_and_products_travel_as_float32(comm):
    """The largest of numbers needs no more bits than they have."""
    x = np.ones(8, np.float16)
    dtypes = {op: comm.plan("all_reduce", x, op=op, algorithm="ring").after for op in ("sum", "max")}
    assert [source.dtype for _, source in dtypes["sum"]] == [np.float32]
    assert dtypes["max"] == []
