"""Hierarchical algorithms that are direct within nodes, on simulated nodes, some with fewer ranks."""

import time

import numpy as np
import pytest

from collectives import Communicator, InputError, algorithms
from mpi_tests.helpers.plans import check_progress
from mpi_tests.helpers.reference import REDUCTIONS, expected, inputs, ops_of, same

ROWS = [(row.collective, row.name) for row in algorithms.REGISTRY if row.access == algorithms.Access.INTRA_NODE]
ARRAYS = {"symmetric": lambda comm, x: comm.empty(len(x), x.dtype), "ordinary": lambda comm, x: np.empty_like(x)}
NODES = {4: "2x2", 5: "2x3", 7: "3x3", 8: "4x2"}  # by size; with 5 and 7 ranks, the last node has fewer

each_row = pytest.mark.parametrize(("collective", "algorithm"), ROWS)
in_groups = pytest.mark.sizes(*NODES)


@pytest.fixture
def over_groups(mpi_comm, monkeypatch):
    """Yield a communicator whose ranks simulate nodes."""
    monkeypatch.setenv("COLLECTIVES_FAKE_NODES", NODES[mpi_comm.size])
    comm = Communicator(mpi_comm)
    yield comm
    comm.free()


@pytest.mark.sizes(4, 5, proof=(7, 8))
@pytest.mark.parametrize("memory", ARRAYS)
@each_row
def test_runs_on_new_inputs(over_groups, collective, algorithm, memory):
    comm = over_groups
    draws = np.random.default_rng(comm.rank)
    for count in (0, comm.size, 60 * comm.size, *([60 * comm.size + 7] * (collective != "all_to_all"))):
        first = inputs(comm.size, count)
        x = ARRAYS[memory](comm, first[comm.rank])
        plan = comm.plan(collective, x, algorithm=algorithm)
        for run in range(6):
            xs = [values + run for values in first]
            if draws.random() < 0.3:
                time.sleep(draws.random() * 2e-4)
            x[:] = xs[comm.rank]
            same(plan(), expected(collective, xs, comm.rank), (collective, count, memory, run))
        plan.free()


@in_groups
def test_every_root(over_groups):
    comm = over_groups
    for root in range(comm.size):
        x = comm.empty(comm.size + 1)
        x[:] = comm.rank
        assert (comm.broadcast(x, root=root, algorithm="hierarchical_direct") == root).all()


@pytest.mark.sizes(4, proof=(5, 7, 8))
@pytest.mark.parametrize(("collective", "algorithm"), [row for row in ROWS if row[0] in REDUCTIONS])
def test_every_dtype_and_op(over_groups, collective, algorithm):
    comm = over_groups
    for dtype in ("float16", "bfloat16", "float32", "float64", "int8", "uint16", "int64", "complex64", "bool"):
        for op in ops_of(dtype):
            xs = inputs(comm.size, 3 * comm.size + 1, dtype, op)
            want = expected(collective, xs, comm.rank, op)
            x = comm.empty(len(xs[0]), dtype)
            x[:] = xs[comm.rank]
            actual = getattr(comm, collective)(x, op=op, algorithm=algorithm)
            np.testing.assert_allclose(actual.astype(complex), want.astype(complex), rtol=1e-6)


@in_groups
def test_out_of_place_and_uneven_counts(over_groups):
    comm = over_groups
    counts = [3 * rank for rank in range(comm.size)]
    xs = [np.arange(n) + 10.0 * rank for rank, n in enumerate(counts)]
    for out in (comm.empty(sum(counts), "float64"), np.empty(sum(counts))):
        x = xs[comm.rank].copy()
        comm.all_gather(x, out=out, counts=counts, algorithm="hierarchical_direct")
        same(out, np.concatenate(xs))
        same(x, xs[comm.rank])
    whole = np.arange(float(sum(counts)))
    begin = sum(counts[: comm.rank])
    actual = comm.reduce_scatter(whole, counts=counts, algorithm="hierarchical_direct")
    same(actual, comm.size * np.arange(float(begin), begin + counts[comm.rank]))
    same(whole, np.arange(float(sum(counts))))


@in_groups
def test_in_place_on_some_ranks_only(over_groups):
    """A rank with an empty chunk, or with a separate out, uses the same algorithm as the others."""
    comm = over_groups
    for counts, elsewhere in (([0] + [3] * (comm.size - 1), ()), ([3] * comm.size, (1, 2))):
        begin, end = sum(counts[: comm.rank]), sum(counts[: comm.rank + 1])
        for _ in range(5):
            x = comm.empty(sum(counts), "int64")
            x[:] = np.arange(len(x)) + comm.rank
            want = (comm.size * np.arange(len(x)) + sum(range(comm.size)))[begin:end]
            out = np.zeros(end - begin, np.int64) if comm.rank in elsewhere else x[begin:end]
            same(comm.reduce_scatter(x, out=out, counts=counts, algorithm="hierarchical_direct"), want)


@in_groups
@pytest.mark.parametrize("algorithm", ["hierarchical_direct", "leaders"])
def test_plans_move_each_other_on(over_groups, algorithm):
    check_progress(over_groups, algorithm)


@pytest.mark.sizes(4)
def test_nodes_of_one_rank_have_nothing_inside(mpi_comm, monkeypatch):
    monkeypatch.setenv("COLLECTIVES_FAKE_NODES", "4x1")
    comm = Communicator(mpi_comm)
    with pytest.raises(InputError, match="'hierarchical_direct' needs a node of several ranks: use auto, ring"):
        comm.all_reduce(comm.empty(4), algorithm="hierarchical_direct")
    assert "hierarchical_direct" not in comm.explain("all_reduce", 1 << 20)
    comm.free()


@pytest.mark.sizes(4)
def test_auto_takes_it_between_nodes(mpi_comm, monkeypatch):
    monkeypatch.setenv("COLLECTIVES_FAKE_NODES", "2x2")
    comm = Communicator(mpi_comm)
    x = comm.empty(1 << 18)
    x[:] = comm.rank
    plan = comm.plan("all_reduce", x)
    assert plan.name.startswith("all_reduce hierarchical_direct/")
    assert (plan() == 6).all()
    plan.free()
    comm.free()
