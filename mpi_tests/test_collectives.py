import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from collectives.arrays import dtype_of
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


def awkward(size, count, dtype):
    """Every rank's input, of all magnitudes, and with signed zeros, NaN and infinities at some places."""
    rng = np.random.default_rng(count)
    xs = rng.standard_normal((size, count)) * 10.0 ** rng.integers(-3, 3, (size, count))
    special = rng.choice([0.0, -0.0, np.nan, -np.nan, np.inf, -np.inf], (size, count))
    return list(np.where(rng.random((size, count)) < 0.2, special, xs).astype(dtype_of(dtype)))


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


@pytest.mark.parametrize("collective", ["reduce_scatter", "all_gather", "all_to_all", "broadcast", "reduce"])
def test_x_stays_as_it_is(comm, collective):
    """But for a broadcast's receivers and a reduction's root."""
    xs = inputs(comm.size, 2 * comm.size)
    changed = {"broadcast": comm.rank != 0, "reduce": comm.rank == 0}.get(collective, False)
    for algorithm in algorithms_of(collective):
        x = xs[comm.rank].copy()
        x.flags.writeable = changed
        got = getattr(comm, collective)(x, algorithm=algorithm)
        same(got, expected(collective, xs, comm.rank), algorithm)
        assert changed or np.array_equal(x, xs[comm.rank])


def test_reduce_scatter_and_all_gather_in_place(comm):
    xs = inputs(comm.size, 2 * comm.size + 1)
    parts = np.array_split(np.arange(2 * comm.size + 1), comm.size)
    begin, counts = parts[comm.rank][0], [len(part) for part in parts]
    for algorithm in algorithms_of("reduce_scatter"):
        x = xs[comm.rank].copy()
        own = x[begin : begin + counts[comm.rank]]
        assert comm.reduce_scatter(x, out=own, algorithm=algorithm) is own
        same(own, expected("reduce_scatter", xs, comm.rank), algorithm)
    for algorithm in algorithms_of("all_gather"):
        out = np.full(2 * comm.size + 1, 99, np.float32)
        own = out[begin : begin + counts[comm.rank]]
        own[:] = xs[0][parts[comm.rank]]
        assert comm.all_gather(own, out=out, counts=counts, algorithm=algorithm) is out
        same(out, xs[0], algorithm)


def test_uneven_counts(comm):
    for shift in range(4):
        counts = [(3 * rank + shift) % 4 for rank in range(comm.size)]
        ends = np.cumsum(counts)
        own = slice(ends[comm.rank] - counts[comm.rank], ends[comm.rank])
        xs = inputs(comm.size, sum(counts))
        for algorithm in algorithms_of("reduce_scatter"):
            got = comm.reduce_scatter(xs[comm.rank], counts=counts, algorithm=algorithm)
            same(got, reduced(xs, "sum")[own], (counts, algorithm))
        for algorithm in algorithms_of("all_gather"):
            same(comm.all_gather(xs[0][own], counts=counts, algorithm=algorithm), xs[0], (counts, algorithm))


def test_uneven_all_to_all(comm):
    for shift in range(4):
        counts = (2 * np.arange(comm.size)[:, None] + 3 * np.arange(comm.size) + shift) % 4  # [source, dest]
        xs = [inputs(comm.size, row.sum())[rank] for rank, row in enumerate(counts)]
        chunks = [np.split(x, np.cumsum(row)[:-1])[comm.rank] for x, row in zip(xs, counts, strict=True)]
        sends, receives = counts[comm.rank].tolist(), counts[:, comm.rank].tolist()
        for algorithm in algorithms_of("all_to_all"):
            for given in ({}, {"recv_counts": receives}):
                got = comm.all_to_all(xs[comm.rank], send_counts=sends, algorithm=algorithm, **given)
                same(got, np.concatenate(chunks), (shift, algorithm))


@pytest.mark.parametrize("dtype", FLOATS)
def test_all_ranks_get_the_same_bits_each_time(comm, dtype):
    for count in (2 * comm.size + 1, 1000):
        xs = awkward(comm.size, count, dtype)
        for op in ops_of(dtype):
            with np.errstate(all="ignore"):
                want = reduced(xs, op)
            for algorithm in algorithms_of("all_reduce"):
                if algorithm == "mpi":  # MPI promises less
                    continue
                x = comm.all_reduce(xs[comm.rank].copy(), op=op, algorithm=algorithm)
                again = comm.all_reduce(xs[comm.rank].copy(), op=op, algorithm=algorithm)
                assert x.tobytes() == again.tobytes(), (op, algorithm)
                assert len(set(comm.mpi.allgather(x.tobytes()))) == 1, (op, algorithm)
                if op in ("min", "max"):
                    same(x.astype(np.float64), want.astype(np.float64), (op, algorithm))
                elif op != "prod":  # where infinity times 0 depends on the order
                    assert np.array_equal(np.isnan(x), np.isnan(want)), (op, algorithm)


def test_the_order_of_every_sum_is_the_schedules(comm):
    count = 3 * comm.size
    xs = np.random.default_rng(0).standard_normal((comm.size, count)).astype(np.float32)
    chunks = xs.reshape(comm.size, comm.size, 3)
    orders = [[(c + 1 + i) % comm.size for i in range(comm.size)] for c in range(comm.size)]
    ring = [sum(chunks[order, c], np.float32(0)) for c, order in enumerate(orders)]
    same(comm.all_reduce(xs[comm.rank].copy(), algorithm="ring"), np.concatenate(ring))
    power = 1 << (comm.size.bit_length() - 1)
    tree = [xs[2 * i] + xs[2 * i + 1] for i in range(comm.size - power)] + list(xs[2 * (comm.size - power) :])
    while len(tree) > 1:
        tree = [low + high for low, high in zip(tree[::2], tree[1::2], strict=True)]
    same(comm.all_reduce(xs[comm.rank].copy(), algorithm="recursive_doubling"), tree[0])


@pytest.mark.parametrize("dtype", HALVES)
def test_16_bit_sums_round_once_a_hop(comm, dtype):
    half_ulp = {"float16": 2.0**-11, "bfloat16": 2.0**-8}[dtype]
    xs = np.random.default_rng(1).standard_normal((comm.size, 1000)).astype(dtype_of(dtype))
    exact, magnitude = xs.astype(np.float64).sum(0), abs(xs.astype(np.float64)).sum(0)
    for algorithm in algorithms_of("all_reduce")[:-1]:
        got = comm.all_reduce(xs[comm.rank].copy(), algorithm=algorithm).astype(np.float64)
        assert np.all(abs(got - exact) <= 1.01 * (comm.size - 1) * half_ulp * magnitude), algorithm


def test_overflow_and_invalid_sums_are_results(comm):
    x = np.array([6e4, np.inf if comm.rank % 2 else -np.inf], np.float16)
    comm.all_reduce(x)
    assert x[0] == (6e4 if comm.size == 1 else np.inf)
    assert np.isnan(x[1]) == (comm.size > 1)


def test_many_at_once_waited_for_in_any_order(comm):
    for turn in range(comm.size):
        xs = [inputs(comm.size, n * comm.size) for n in (1, 2, 3, 50)]
        works = [comm.all_reduce(x[comm.rank].copy(), blocking=False, algorithm="ring") for x in xs]
        works += [comm.all_to_all(xs[3][comm.rank], blocking=False)]
        works += [comm.broadcast(xs[2][comm.rank].copy(), blocking=False)]
        same(comm.all_reduce(xs[0][comm.rank].copy()), reduced(xs[0], "sum"))
        works += [comm.barrier(blocking=False)]
        wants = [reduced(x, "sum") for x in xs] + [expected("all_to_all", xs[3], comm.rank), xs[2][0]]
        for i in np.random.default_rng([turn, comm.rank]).permutation(len(works)):
            got = works[i].wait()
            assert works[i].done()
            if i < len(wants):
                same(got, wants[i], i)


def test_a_started_plan_moves_on_while_another_communicator_waits(comm):
    part = comm.split(0)
    x = np.full(5, comm.rank, np.int64)
    work = comm.all_reduce(x, algorithm="ring", blocking=False)
    if comm.rank % 2:
        work.wait()
        part.barrier()
    else:
        part.barrier()
        work.wait()
    assert x.tolist() == [sum(range(comm.size))] * 5
    part.free()


def test_communicators_do_not_mix_up_their_messages(mpi_comm):
    from collectives import Communicator

    comms = [Communicator(mpi_comm) for _ in range(3)]
    xs = [np.full(4, 10.0**i * (mpi_comm.rank + 1)) for i in range(3)]
    works = [comm.all_reduce(x, blocking=False) for comm, x in zip(comms, xs, strict=True)]
    for work in works[:: -1 if mpi_comm.rank % 2 else 1]:
        while not work.done():
            for other in works:
                other.done()
    total = mpi_comm.size * (mpi_comm.size + 1) / 2
    assert [x.tolist() for x in xs] == [[10.0**i * total] * 4 for i in range(3)]
    for comm in comms:
        comm.free()


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_a_plan_works_on_what_the_arrays_hold_when_it_runs(comm, collective):
    for algorithm in algorithms_of(collective):
        x = np.zeros(2 * comm.size, np.float32)
        plan = comm.plan(collective, x, algorithm=algorithm)
        for run in range(5):
            xs = [a + run for a in inputs(comm.size, 2 * comm.size)]
            x[:] = xs[comm.rank]
            got = plan() if run % 2 else plan.start().wait()
            same(got, expected(collective, xs, comm.rank), (algorithm, run))
        plan.free()


def test_done_says_when(comm):
    x = np.ones(3)
    plan = comm.plan("all_reduce", x)
    for _ in range(3):
        x[:] = 1
        if comm.rank == 0:
            plan.start()
            assert plan.done() == (comm.size == 1)
        comm.mpi.Barrier()
        if comm.rank != 0:
            plan.start()
        while not plan.done():
            pass
        assert x.tolist() == [comm.size] * 3


def test_a_plan_runs_once_at_a_time(comm):
    plan = comm.plan("barrier")
    if comm.rank == 0:
        plan.start()
        if comm.size > 1:
            for refused in (plan.start, plan, plan.free):
                with pytest.raises(RuntimeError, match=r"barrier dissemination is under way.*: wait\(\) before"):
                    refused()
    comm.mpi.Barrier()
    if comm.rank != 0:
        plan.start()
    plan.wait()
    plan()
    plan.free()
    with pytest.raises(RuntimeError, match="barrier dissemination has been freed: make a new plan"):
        plan.start()


def test_auto_says_what_it_chose(comm):
    assert comm.plan("all_reduce", np.zeros(8)).name == "all_reduce recursive_doubling"
    assert comm.plan("all_reduce", np.zeros(1 << 16)).name == "all_reduce ring"
    assert comm.plan("barrier", algorithm="mpi").name == "barrier mpi"


def test_a_barrier_waits_for_the_last(comm):
    for algorithm in algorithms_of("barrier"):
        for late in {0, comm.size - 1}:
            if comm.rank == late:
                time.sleep(LATE_S)
            entered = time.monotonic()  # one clock for all processes of a machine
            comm.barrier(algorithm=algorithm)
            left = time.monotonic()
            assert left >= max(comm.mpi.allgather(entered)), (algorithm, late)


def test_split(comm):
    rank, size = comm.rank, comm.size
    halves = comm.split(rank % 2, key=-rank)
    members = [r for r in reversed(range(size)) if r % 2 == rank % 2]
    assert (halves.rank, halves.size) == (members.index(rank), len(members))
    assert halves.all_gather(np.array([rank])).tolist() == members
    rest = comm.split(None if rank == 0 else 7)
    if rank == 0:
        assert rest is None
    else:
        assert rest.all_gather(np.array([rank])).tolist() == list(range(1, size))
        rest.free()
    same(comm.all_reduce(np.ones(2)), np.full(2, float(size)))
    halves.free()


def test_parts_work_side_by_side(comm):
    part = comm.split(comm.rank // 2)
    first = comm.rank // 2 * 2
    mine = sum(r + 1 for r in range(first, min(first + 2, comm.size)))
    every = comm.size * (comm.size + 1) / 2
    for _ in range(5):
        x, y = np.full(9, comm.rank + 1.0), np.full(9, comm.rank + 1.0)
        works = [comm.all_reduce(x, blocking=False), part.all_reduce(y, blocking=False)]
        for work in works[:: 1 if comm.rank % 3 else -1]:
            work.wait()
        assert (x == every).all()
        assert (y == mine).all()
    part.free()


@pytest.mark.sizes(2, 3, 8)
def test_send_and_recv(comm):
    """Round the ring, odd ranks receiving first."""
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    for count in (0, 1, 100_000):
        for dtype in ("bfloat16", "int64"):
            xs = inputs(comm.size, count, dtype)
            got = np.zeros(count, dtype_of(dtype))
            steps = [lambda x=xs[comm.rank]: comm.send(x, right, tag=3), lambda got=got: comm.recv(got, left, tag=3)]
            for step in steps[:: -1 if comm.rank % 2 else 1]:
                step()
            same(got, xs[left])


@pytest.mark.sizes(1, 2)
def test_tags_keep_messages_apart(comm):
    """A rank of size 1 sends to itself."""
    dest = comm.size - 1
    with ThreadPoolExecutor(2) as pool:
        if comm.rank == 0:
            sends = [pool.submit(comm.send, np.full(50_000, float(tag)), dest, tag=tag) for tag in (1, 2)]
        if comm.rank == dest:
            for tag in (2, 1):
                x = np.zeros((5, 10_000))
                assert comm.recv(x, 0, tag=tag) is x
                assert (x == tag).all()
        if comm.rank == 0:
            for send in sends:
                send.result()


@pytest.mark.sizes(2)
def test_recv_of_another_size_is_refused(comm):
    from collectives import CommunicationError

    for count, error, words in (
        (5, ValueError, "x has 20 bytes, but rank 0 sent 16: pass an array of that size"),
        (3, CommunicationError, "recv from rank 0 with tag 0: "),
    ):
        if comm.rank == 0:
            comm.send(np.zeros(4, np.float32), 1)
        else:
            with pytest.raises(error, match=words):
                comm.recv(np.zeros(count, np.float32), 0)
    with pytest.raises(ValueError, match="dest 2 is no rank of this communicator: use 0 to 1"):
        comm.send(np.zeros(1), 2)
    with pytest.raises(ValueError, match="source -1 is no rank of this communicator: use 0 to 1"):
        comm.recv(np.zeros(1), -1)


@pytest.mark.sizes(2)
def test_an_error_of_mpi_says_where(mpi_comm):
    from collectives import CommunicationError, Communicator

    comm = Communicator(mpi_comm, check=False)
    plan = comm.plan("broadcast", np.zeros(8 if comm.rank == 0 else 4))
    if comm.rank == 0:
        plan()
    else:
        with pytest.raises(CommunicationError, match=r"^broadcast binomial, round 0: receive \[0-1\] from rank 0: "):
            plan()
    assert comm.all_reduce(np.ones(1)) == 2
    comm.free()


def test_nodes(comm, monkeypatch):
    from collectives import Communicator, InputError

    assert comm.topology.nodes == (tuple(range(comm.size)),)
    monkeypatch.setenv("COLLECTIVES_FAKE_NODES", f"{comm.size}x1")
    each = Communicator(comm.mpi)
    assert each.topology.nodes == tuple((rank,) for rank in range(comm.size))
    each.free()
    monkeypatch.setenv("COLLECTIVES_FAKE_NODES", "3x3")
    with pytest.raises(InputError, match=f"=3x3 does not make the {comm.size} ranks"):
        Communicator(comm.mpi)
    monkeypatch.setenv("COLLECTIVES_FAKE_NODES", "two")
    with pytest.raises(InputError, match="write <nodes>x<ranks per node>, as in 2x4"):
        Communicator(comm.mpi)


@pytest.mark.sizes(4, 8)
def test_parts_know_their_nodes(comm, monkeypatch):
    from collectives import Communicator

    monkeypatch.setenv("COLLECTIVES_FAKE_NODES", f"2x{comm.size // 2}")
    nodes = Communicator(comm.mpi)
    assert nodes.topology.node_of == tuple(rank * 2 // comm.size for rank in range(comm.size))
    across = nodes.split(comm.rank % (comm.size // 2))
    within = nodes.split(comm.rank * 2 // comm.size)
    assert across.topology.nodes == ((0,), (1,))
    assert within.topology.nodes == (tuple(range(comm.size // 2)),)
    for made in (across, within, nodes):
        made.free()


def test_empty(comm):
    for shape, dtype in ((3, "float32"), ((2, 5), "bfloat16"), ((), "int64"), ((0, 4), "bool")):
        x = comm.empty(shape, dtype)
        assert x.shape == (np.empty(shape).shape)
        assert x.dtype == dtype_of(dtype)
        x[...] = 1
        assert comm.broadcast(x) is x
    with pytest.raises(ValueError, match="device 'tpu' is unknown: use 'cpu', 'cuda'"):
        comm.empty(3, device="tpu")
