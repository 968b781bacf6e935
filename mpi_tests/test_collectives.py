import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from mpi_tests.reference import (
    COLLECTIVES,
    COMPLEX,
    DTYPES,
    FLOATS,
    HALVES,
    REDUCTIONS,
    algorithms_of,
    expected,
    inputs,
    ops_of,
    reduced,
)

LATE_S = 0.05


def same(got, want, where=""):
    np.testing.assert_array_equal(got, want, err_msg=str(where), strict=True)


def counts_of(collective, size):
    if collective == "all_to_all":
        return [n * size for n in (0, 1, 2, 125)]
    return sorted({0, 1, size - 1, size, 2 * size + 1, 1000})


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_every_count(comm, collective):
    for count in counts_of(collective, comm.size):
        xs = inputs(comm.size, count)
        for algorithm in algorithms_of(collective):
            got = getattr(comm, collective)(xs[comm.rank].copy(), algorithm=algorithm)
            same(got, expected(collective, xs, comm.rank), (algorithm, count))


@pytest.mark.parametrize("collective", REDUCTIONS)
def test_every_dtype_and_op(comm, collective):
    count = 2 * comm.size + 1
    for dtype in DTYPES:
        for op in ops_of(dtype):
            xs = inputs(comm.size, count, dtype, op)
            want = expected(collective, xs, comm.rank, op)
            for algorithm in algorithms_of(collective):
                if algorithm == "mpi" and dtype in HALVES:
                    continue
                got = getattr(comm, collective)(xs[comm.rank].copy(), op=op, algorithm=algorithm)
                if op == "avg" and dtype in COMPLEX:  # whose quotient NumPy does not round correctly
                    np.testing.assert_allclose(got, want, rtol=1e-6, strict=True)
                else:
                    same(got, want, (dtype, op, algorithm))


@pytest.mark.parametrize("collective", ["all_gather", "all_to_all", "broadcast"])
def test_every_dtype_moves(comm, collective):
    for dtype in DTYPES:
        xs = inputs(comm.size, 3 * comm.size, dtype)
        for algorithm in algorithms_of(collective):
            got = getattr(comm, collective)(xs[comm.rank].copy(), algorithm=algorithm)
            same(got, expected(collective, xs, comm.rank), (dtype, algorithm))


@pytest.mark.parametrize("collective", ["broadcast", "reduce"])
def test_every_root(comm, collective):
    for root in range(comm.size):
        for count in (1, 2 * comm.size + 1):
            xs = inputs(comm.size, count)
            for algorithm in algorithms_of(collective):
                got = getattr(comm, collective)(xs[comm.rank].copy(), root=root, algorithm=algorithm)
                same(got, expected(collective, xs, comm.rank, root=root), (root, count, algorithm))


@pytest.mark.parametrize("segment_bytes", [8, 40])
def test_many_segments(mpi_comm, segment_bytes):
    from collectives import Communicator

    comm = Communicator(mpi_comm, segment_bytes=segment_bytes)
    for collective in COLLECTIVES:
        for dtype in ("float32", "complex128"):
            xs = inputs(comm.size, 7 * comm.size + 3 * (collective != "all_to_all"), dtype)
            for algorithm in algorithms_of(collective):
                got = getattr(comm, collective)(xs[comm.rank].copy(), algorithm=algorithm)
                same(got, expected(collective, xs, comm.rank), (collective, dtype, algorithm))
    comm.free()


def test_long_messages(mpi_comm):
    """Sends that are still read by their receivers when a fold could already write."""
    from collectives import Communicator

    for segment_bytes in (1 << 16, 1 << 20):
        comm = Communicator(mpi_comm, segment_bytes=segment_bytes)
        for collective in COLLECTIVES:
            xs = inputs(comm.size, 300_000 // comm.size * comm.size)
            for algorithm in algorithms_of(collective):
                got = getattr(comm, collective)(xs[comm.rank].copy(), algorithm=algorithm)
                same(got, expected(collective, xs, comm.rank), (collective, algorithm, segment_bytes))
        comm.free()


# --- in place, out, and what stays as it is ---


@pytest.mark.parametrize("collective", ["all_reduce", "broadcast", "reduce"])
def test_in_place(comm, collective):
    xs = inputs(comm.size, 6)
    for shape in ((6,), (2, 3), (1, 6, 1)):
        for algorithm in algorithms_of(collective):
            x = xs[comm.rank].reshape(shape).copy()
            got = getattr(comm, collective)(x, algorithm=algorithm)
            assert got is x
            same(x, expected(collective, xs, comm.rank).reshape(shape), (shape, algorithm))


def test_a_scalar(comm):
    x = np.array(comm.rank + 1.0)
    assert comm.all_reduce(x) is x
    assert x == comm.size * (comm.size + 1) / 2


@pytest.mark.parametrize("collective", ["all_reduce", "reduce", "reduce_scatter", "all_gather", "all_to_all"])
def test_out_is_written_and_x_is_not(comm, collective):
    xs = inputs(comm.size, 2 * comm.size)
    want = expected(collective, xs, comm.rank)
    for algorithm in algorithms_of(collective):
        x, out = xs[comm.rank].copy(), np.full_like(want, 99)
        x.flags.writeable = False
        got = getattr(comm, collective)(x, out=out, algorithm=algorithm)
        same(x, xs[comm.rank], algorithm)
        if collective == "reduce" and comm.rank != 0:
            assert got is x
            same(out, np.full_like(out, 99))
        else:
            assert got is out
            same(out, want, algorithm)


def test_x_stays_where_the_result_is_new_or_elsewhere(comm):
    xs = inputs(comm.size, 2 * comm.size)
    for collective in ("reduce_scatter", "all_gather", "all_to_all", "broadcast", "reduce"):
        if collective in ("broadcast", "reduce") and (comm.rank == 0) != (collective == "broadcast"):
            continue
    for collective in ("reduce_scatter", "all_gather", "all_to_all"):
        for algorithm in algorithms_of(collective):
            x = xs[comm.rank].copy()
            getattr(comm, collective)(x, algorithm=algorithm)
            same(x, xs[comm.rank], (collective, algorithm))
    for algorithm in algorithms_of("broadcast"):
        x = xs[comm.rank].copy()
        x.flags.writeable = comm.rank != 0
        same(comm.broadcast(x, algorithm=algorithm), xs[0], algorithm)
    for algorithm in algorithms_of("reduce"):
        x = xs[comm.rank].copy()
        x.flags.writeable = comm.rank == 0
        same(comm.reduce(x, algorithm=algorithm), expected("reduce", xs, comm.rank), algorithm)
