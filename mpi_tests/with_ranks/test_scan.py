"""Inclusive and exclusive scans with every algorithm, compared with NumPy."""

import numpy as np
import pytest

from collectives import InputError
from mpi_tests.helpers.reference import DTYPES, SCANS, algorithms_of, expected, inputs, mpi_reduces, ops_of, same


def with_identity_aside(collective, comm, want, out):
    """Return the expected `out`; on rank 0 of an exclusive scan, it keeps its initial value."""
    return np.full_like(out, 9) if collective == "exscan" and comm.rank == 0 else want


@pytest.mark.parametrize("collective", SCANS)
def test_every_count_in_place_and_apart(comm, collective):
    for count in sorted({0, 1, comm.size - 1, 2 * comm.size + 1, 1000, 70_000}):
        xs = inputs(comm.size, count)
        want = expected(collective, xs, comm.rank)
        for algorithm in algorithms_of(collective, comm.size):
            x, where = xs[comm.rank].copy(), (collective, algorithm, count)
            assert getattr(comm, collective)(x, algorithm=algorithm) is x, where
            same(x, want, where)
            x, out = xs[comm.rank].copy(), np.full(count, 9, "float32")
            getattr(comm, collective)(x, out=out, algorithm=algorithm)
            same(x, xs[comm.rank], where)
            same(out, with_identity_aside(collective, comm, want, out), where)


@pytest.mark.sizes(3)
@pytest.mark.parametrize("collective", SCANS)
def test_every_dtype_and_op(comm, collective):
    for dtype in DTYPES:
        for op in (op for op in ops_of(dtype) if op != "avg"):
            xs = inputs(comm.size, 2 * comm.size + 1, dtype, op)
            for algorithm in algorithms_of(collective, comm.size):
                if algorithm == "mpi" and not mpi_reduces(dtype, op):
                    continue
                actual = getattr(comm, collective)(xs[comm.rank].copy(), op=op, algorithm=algorithm)
                same(actual, expected(collective, xs, comm.rank, op), (dtype, op, algorithm))


@pytest.mark.parametrize("collective", SCANS)
def test_plans_and_started_calls(comm, collective):
    for count in (5, 3000):
        xs = inputs(comm.size, count)
        want = expected(collective, xs, comm.rank)
        for algorithm in algorithms_of(collective, comm.size):
            x, out = xs[comm.rank].copy(), np.empty(count, "float32")
            plan = comm.plan(collective, x, out=out, algorithm=algorithm)
            for turn in (1, 2, 3):
                x[:] = turn * xs[comm.rank]
                out[:] = 9
                plan()
                same(out, with_identity_aside(collective, comm, turn * want, out), (algorithm, turn))
            plan.free()
            x = xs[comm.rank].copy()
            work = getattr(comm, collective)(x, algorithm=algorithm, blocking=False)
            work.wait()
            same(x, want, algorithm)


@pytest.mark.parametrize("collective", SCANS)
def test_in_the_order_of_the_ranks(comm, collective):
    """Float sums with rounding are equal bit for bit."""
    count = 2 * comm.size + 1
    xs = np.random.default_rng(count).standard_normal((comm.size, count)).astype(np.float32)
    below = xs[: comm.rank + (collective == "scan")]
    for algorithm in ("linear", "auto"):
        actual = getattr(comm, collective)(xs[comm.rank].copy(), algorithm=algorithm, reproducible=True)
        same(actual, sum(below[1:], below[0]) if len(below) else xs[comm.rank], algorithm)


@pytest.mark.sizes(2, 3)
def test_lengths_that_differ_are_refused_on_all_ranks(comm):
    with pytest.raises(InputError, match="scan"):
        comm.scan(np.ones(3 + (comm.rank == 1)))
    with pytest.raises(InputError, match="op 'avg' needs all ranks"):
        comm.exscan(np.ones(3), op="avg")
