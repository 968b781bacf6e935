"""Symmetric memory and the direct algorithms."""

import gc
import os
import time
from types import SimpleNamespace

import numpy as np
import pytest

from collectives import algorithms
from mpi_tests.helpers.plans import check_progress
from mpi_tests.helpers.reference import COLLECTIVES, REDUCTIONS, ROOTED, expected, inputs, ops_of, same

DIRECT = [(row.collective, row.name) for row in algorithms.REGISTRY if row.access and row.collective != "barrier"]
each_direct = pytest.mark.parametrize(("collective", "algorithm"), DIRECT)
ARRAYS = {"symmetric": lambda comm, x: comm.empty(len(x), x.dtype), "ordinary": lambda comm, x: np.empty_like(x)}


def check_runs(comm, collective, algorithm, count, memory, runs=4, pause=lambda: None, **arguments):
    """Run one plan on new inputs each time."""
    first = inputs(comm.size, count)
    around = ARRAYS[memory](comm, np.zeros(len(first[0]) + 32, first[0].dtype))
    around[count:] = 99
    x = around[:count]
    plan = comm.plan(collective, x, algorithm=algorithm, **arguments)
    for run in range(runs):
        xs = [values + run for values in first]
        pause()
        x[:] = xs[comm.rank]
        pause()
        actual = plan()
        same(actual, expected(collective, xs, comm.rank, **arguments), (collective, algorithm, count, memory, run))
        assert (around[count:] == 99).all(), (collective, algorithm, count, memory, run)
    plan.free()


def count_of(collective, size):
    return 60 * size if collective == "all_to_all" else 60 * size + 7


@each_direct
@pytest.mark.parametrize("memory", ARRAYS)
@pytest.mark.sizes(1, 2, 3, proof=range(4, 9))
def test_runs_on_new_inputs(comm, collective, algorithm, memory):
    for count in (0, comm.size, count_of(collective, comm.size)):
        check_runs(comm, collective, algorithm, count, memory)


@each_direct
@pytest.mark.parametrize("num_segments", [2, 3])
@pytest.mark.sizes(1, 2, 3, proof=range(4, 9))
def test_segments_follow_each_other(comm, collective, algorithm, num_segments, monkeypatch):
    from collectives.algorithms import algorithm as algorithm_rows
    from collectives.runtime.backends import shared_memory

    for name in ("PIPELINED_BYTES", "STAGED_BYTES"):
        monkeypatch.setattr(algorithm_rows, name, -(-60 * 4 // num_segments))
    monkeypatch.setattr(shared_memory, "PIECE_BYTES", 64)
    for memory in ARRAYS:
        check_runs(comm, collective, algorithm, count_of(collective, comm.size), memory)


@pytest.mark.sizes(2, 3, 5)
@each_direct
def test_ranks_that_come_when_they_like(comm, collective, algorithm):
    draws = np.random.default_rng(comm.rank)

    def pause():
        if draws.random() < 0.3:
            time.sleep(draws.random() * 2e-4)

    check_runs(comm, collective, algorithm, count_of(collective, comm.size), "symmetric", runs=60, pause=pause)


@pytest.mark.parametrize("collective", ROOTED)
def test_every_root(comm, collective):
    for row in algorithms.rows(collective):
        for root in range(comm.size) if row.access else ():
            check_runs(comm, collective, row.name, comm.size + 1, "symmetric", root=root)


@pytest.mark.sizes(3, proof=range(1, 9))
@pytest.mark.parametrize("collective", REDUCTIONS)
def test_every_dtype_and_op(comm, collective):
    for dtype in ("float16", "bfloat16", "float32", "float64", "int8", "uint16", "int64", "complex64", "bool"):
        for op in ops_of(dtype):
            xs = inputs(comm.size, 3 * comm.size + 1, dtype, op)
            want = expected(collective, xs, comm.rank, op)
            for row in algorithms.rows(collective):
                if row.access:
                    x = comm.empty(len(xs[0]), dtype)
                    x[:] = xs[comm.rank]
                    actual = getattr(comm, collective)(x, op=op, algorithm=row.name)
                    np.testing.assert_allclose(
                        actual.astype(complex), want.astype(complex), rtol=1e-6, err_msg=row.name
                    )


def test_16_bit_floats_are_rounded_once(comm):
    xs = [np.full(40, 1 + 2.0**-7) if rank == 0 else np.full(40, 2.0**-9) for rank in range(comm.size)]
    for row in algorithms.rows("all_reduce"):
        if row.access:
            x = comm.empty(40, "bfloat16")
            x[:] = xs[comm.rank]
            same(comm.all_reduce(x, algorithm=row.name), sum(xs).astype(x.dtype), row.name)


def test_uneven_counts(comm):
    counts = [3 * rank for rank in range(comm.size)]
    xs = [np.arange(n) + 10.0 * rank for rank, n in enumerate(counts)]
    for name in ("direct", "staged"):
        x = comm.empty(counts[comm.rank], "float64")
        x[:] = xs[comm.rank]
        same(comm.all_gather(x, counts=counts, algorithm=name), np.concatenate(xs), name)
        whole = np.arange(float(sum(counts)))
        actual = comm.reduce_scatter(whole, counts=counts, algorithm=name)
        begin = sum(counts[: comm.rank])
        same(actual, comm.size * np.arange(float(begin), begin + counts[comm.rank]), name)
        sends = [comm.rank + dest for dest in range(comm.size)]
        actual = comm.all_to_all(np.full(sum(sends), float(comm.rank)), send_counts=sends, algorithm=name)
        same(actual, np.concatenate([np.full(source + comm.rank, float(source)) for source in range(comm.size)]), name)


def test_in_place_and_out_of_place(comm):
    xs = inputs(comm.size, 100)
    want = expected("all_reduce", xs, comm.rank)
    for row in algorithms.rows("all_reduce"):
        if row.access:
            for memory in ARRAYS.values():
                x, out = memory(comm, xs[0]), memory(comm, xs[0])
                x[:] = xs[comm.rank]
                assert comm.all_reduce(x, out=out, algorithm=row.name) is out
                same(x, xs[comm.rank])
                same(out, want, row.name)
    out = comm.empty(2 * comm.size)
    own = out[2 * comm.rank : 2 * comm.rank + 2]
    own[:] = comm.rank
    comm.all_gather(own, out=out, algorithm="direct")
    same(out, np.repeat(np.arange(comm.size, dtype="float32"), 2))


@pytest.mark.sizes(2, 4)
def test_arrays_of_two_windows_are_symmetric(comm, monkeypatch):
    from collectives.arrays import memory

    monkeypatch.setattr(memory, "read_process", lambda pid, address: None)  # ordinary arrays become inaccessible
    x, out = comm.empty(1 << 16), comm.empty(1 << 18)[: 1 << 16]
    windows = [comm.context.windows.window_of(array) for array in (x, out)]
    assert windows[0] is not windows[1]
    x[:] = comm.rank
    plan = comm.plan("all_reduce", x, out=out, algorithm="two_shot")
    assert (plan() == comm.size * (comm.size - 1) // 2).all()


@pytest.mark.sizes(2, 4)
def test_one_node_is_no_hierarchy(comm):
    for collective in ("all_reduce", "broadcast", "all_gather"):
        assert "hierarchical_direct" not in comm.explain(collective, 1 << 20)


def test_started_plans_move_each_other_on(comm):
    check_progress(comm, "two_shot")


@pytest.mark.sizes(4, 5, 8)
def test_a_part_uses_the_memory_of_the_whole(comm):
    part = comm.split(comm.rank % 2)
    x = comm.empty(50)
    x[:] = comm.rank
    part.all_reduce(x[10:20], algorithm="two_shot")
    members = range(comm.rank % 2, comm.size, 2)
    assert x[9] == x[20] == comm.rank
    assert (x[10:20] == sum(members)).all()
    part.free()


def test_what_one_rank_writes_the_others_read(comm):
    x = comm.empty((4, 5), "int32")
    assert x.shape == (4, 5)
    x[:] = comm.rank
    comm.barrier()
    windows = comm.context.windows
    window = windows.window_of(x.reshape(-1))
    offset = x.ctypes.data - window.address
    for base in window.bases.values():
        value = np.frombuffer((np.ctypeslib.ctypes.c_int32 * 20).from_address(base + offset), np.int32)
        assert value.min() == value.max() < comm.size
    comm.barrier()


def test_memory_is_used_again_when_no_rank_uses_it(comm):
    x = comm.empty(1 << 16)
    address, view = x.ctypes.data, x[5:10]
    del x
    gc.collect()
    second = comm.empty(1 << 16)
    assert second.ctypes.data != address  # a view keeps the memory in use
    if comm.rank == 0:
        del view
    other = comm.empty(1 << 16)
    assert (other.ctypes.data != address) == (comm.size > 1)  # as does a view on another rank
    view = None
    comm.barrier()
    assert comm.empty(1 << 16).ctypes.data == address or comm.size == 1


def test_many_arrays(comm):
    arrays = [comm.empty(n) for n in (1, 3, 1000, 1 << 14, 1, 7, 1 << 18, 0)]
    for number, x in enumerate(arrays):
        x[:] = number
    for number, x in enumerate(arrays):
        assert (x == number).all()
        assert x.ctypes.data % 64 == 0


def test_too_little_shared_memory(comm, monkeypatch):
    from collectives import InputError

    full = SimpleNamespace(f_bavail=1, f_frsize=4096)
    if comm.rank == comm.size - 1:
        monkeypatch.setattr(os, "statvfs", lambda path: full)
    with pytest.raises(
        InputError, match=r"shared memory lacks \d+ MiB for this: enlarge /dev/shm, or use ordinary arrays"
    ):
        comm.empty(1 << 22)


@pytest.mark.sizes(2, 3)
def test_a_system_that_keeps_processes_apart(new_comm, monkeypatch):
    from collectives import InputError
    from collectives.arrays import memory

    monkeypatch.setattr(memory, "read_process", lambda pid, address: None)
    for collective in COLLECTIVES:
        xs = inputs(new_comm.size, 60 * new_comm.size)
        for count_is_large in (False, True):
            repeat = 3000 if count_is_large else 1
            x = np.tile(xs[new_comm.rank], repeat)
            plan = new_comm.plan(collective, x)
            same(plan(), expected(collective, [np.tile(values, repeat) for values in xs], new_comm.rank))
    with pytest.raises(
        InputError, match=r"'two_shot' needs arrays from comm\.empty, as the system lets no process read"
    ):
        new_comm.all_reduce(np.zeros(5), algorithm="two_shot")
    new_comm.all_reduce(new_comm.empty(5), algorithm="two_shot")


@pytest.mark.sizes(4)
def test_nodes_are_out_of_reach(mpi_comm, monkeypatch):
    from collectives import Communicator, InputError

    monkeypatch.setenv("COLLECTIVES_FAKE_NODES", "2x2")
    comm = Communicator(mpi_comm)
    for collective, algorithm in DIRECT:
        if algorithms.find(collective, algorithm).access == algorithms.Access.INTRA_NODE:
            continue
        with pytest.raises(InputError, match=f"'{algorithm}' needs ranks of one node, but there are 2 nodes: use auto"):
            comm.plan(collective, comm.empty(4), algorithm=algorithm)
    x = comm.empty(4)
    x[:] = comm.rank
    assert comm.all_reduce(x)[0] == 6
    node = comm.split(comm.topology.node_of[comm.rank])
    x[:] = 1
    assert node.all_reduce(x, algorithm="two_shot")[0] == 2
    node.free()
    comm.free()
