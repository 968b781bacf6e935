import numpy as np
import pytest

from collectives import algorithms
from collectives.algorithms import Algorithm, chain
from collectives.algorithms.groups import Topology
from collectives.arrays.views import dtype_of
from collectives.schedule import proof, spec
from collectives.schedule.moves import Send
from collectives.schedule.spec import Chunks, Collective
from mpi_tests.helpers.reference import (
    COLLECTIVES,
    COMPLEX,
    DTYPES,
    FLOATS,
    MOVES,
    REDUCTIONS,
    ROOTED,
    algorithms_of,
    expected,
    inputs,
    mpi_reduces,
    ops_of,
    reduced,
    same,
)

PROOF = range(1, 9)  # sizes
HIERARCHICAL = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast")


def check_algorithms(comm, collective, xs, **arguments):
    for algorithm in algorithms_of(collective, comm.size):
        actual = getattr(comm, collective)(xs[comm.rank].copy(), algorithm=algorithm, **arguments)
        same(actual, expected(collective, xs, comm.rank, **arguments), (algorithm, collective, xs[0].dtype, len(xs[0])))


def counts_of(collective, size):
    if collective == "all_to_all":
        return [n * size for n in (0, 1, 2, 125)]
    return sorted({0, 1, size - 1, size, 2 * size + 1, 1000})


def awkward(size, count, dtype):
    """Return every rank's input, of all magnitudes, with signed zeros, NaNs and infinities at some places."""
    rng = np.random.default_rng(count)
    xs = rng.standard_normal((size, count)) * 10.0 ** rng.integers(-3, 3, (size, count))
    special = rng.choice([0.0, -0.0, np.nan, -np.nan, np.inf, -np.inf], (size, count))
    return list(np.where(rng.random((size, count)) < 0.2, special, xs).astype(dtype_of(dtype)))


@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.sizes(1, 2, 3, proof=PROOF)
def test_every_count(comm, collective):
    for count in counts_of(collective, comm.size):
        check_algorithms(comm, collective, inputs(comm.size, count))


@pytest.mark.sizes(3, proof=PROOF)
@pytest.mark.parametrize("collective", REDUCTIONS)
def test_every_dtype_and_op(comm, collective):
    """Each runs with two randomly drawn algorithms, as all algorithms use the same reductions."""
    count, draws = 2 * comm.size + 1, np.random.default_rng(0)
    for dtype in DTYPES:
        for op in ops_of(dtype):
            xs = inputs(comm.size, count, dtype, op)
            want = expected(collective, xs, comm.rank, op)
            for algorithm in draws.permutation(algorithms_of(collective, comm.size))[:2].tolist():
                if algorithm == "mpi" and not mpi_reduces(dtype, op):
                    continue
                actual = getattr(comm, collective)(xs[comm.rank].copy(), op=op, algorithm=algorithm)
                if op == "avg" and dtype in COMPLEX:  # NumPy does not round complex quotients correctly
                    np.testing.assert_allclose(actual, want, rtol=1e-6, strict=True)
                else:
                    same(actual, want, (dtype, op, algorithm))


@pytest.mark.sizes(3, proof=PROOF)
@pytest.mark.parametrize("collective", MOVES)
def test_every_dtype_moves(comm, collective):
    for dtype in DTYPES:
        check_algorithms(comm, collective, inputs(comm.size, 3 * comm.size, dtype))


@pytest.mark.parametrize("collective", ROOTED)
def test_every_root(comm, collective):
    for root in range(comm.size):
        for count in (1, 2 * comm.size + 1):
            check_algorithms(comm, collective, inputs(comm.size, count), root=root)


@pytest.mark.sizes(2, 3, proof=PROOF)
@pytest.mark.parametrize("segment_bytes", [8, 40])
def test_many_segments(mpi_comm, segment_bytes):
    from collectives import Communicator

    comm = Communicator(mpi_comm, segment_bytes=segment_bytes)
    for collective in COLLECTIVES:
        for dtype in ("float32", "complex128"):
            count = 7 * comm.size + 3 * (collective != "all_to_all")
            check_algorithms(comm, collective, inputs(comm.size, count, dtype))
    comm.free()


@pytest.mark.sizes(2, 3, proof=PROOF)
def test_long_messages(mpi_comm):
    """Receivers still read the sent chunks when a reduction could already overwrite them."""
    from collectives import Communicator

    comm = Communicator(mpi_comm, segment_bytes=1 << 17)
    for collective in COLLECTIVES:
        check_algorithms(comm, collective, inputs(comm.size, 100_000 // comm.size * comm.size))
    comm.free()


@pytest.mark.parametrize("collective", ["all_reduce", "broadcast", "reduce"])
def test_in_place(comm, collective):
    xs = inputs(comm.size, 6)
    for shape in ((6,), (2, 3), (1, 6, 1)):
        for algorithm in algorithms_of(collective, comm.size):
            x = xs[comm.rank].reshape(shape).copy()
            actual = getattr(comm, collective)(x, algorithm=algorithm)
            assert actual is x
            same(x, expected(collective, xs, comm.rank).reshape(shape), (shape, algorithm))


TOPOLOGIES = {
    "uneven nodes": lambda size: Topology.from_ids([rank < (size - 1) // 2 for rank in range(size)]),
    "interleaved nodes": lambda size: Topology.from_ids([5 * rank % 3 for rank in range(size)]),
}


@pytest.mark.sizes(5, proof=PROOF[2:])
@pytest.mark.parametrize("segment_bytes", [8, 1 << 20])
@pytest.mark.parametrize("topology", TOPOLOGIES.values(), ids=TOPOLOGIES)
def test_hierarchies(mpi_comm, topology, segment_bytes):
    from collectives import Communicator

    comm = Communicator(mpi_comm, segment_bytes=segment_bytes)
    comm.context.topology = comm.dispatcher.chooser.topology = topology(comm.size)
    for collective in HIERARCHICAL:
        for count in counts_of(collective, comm.size):
            xs, root = inputs(comm.size, count), {"root": count % comm.size} if collective in ROOTED else {}
            actual = getattr(comm, collective)(xs[comm.rank].copy(), algorithm="hierarchical", **root)
            same(actual, expected(collective, xs, comm.rank, **root), (collective, count))
    check_uneven_counts(comm, ["hierarchical"])
    comm.free()


@pytest.mark.sizes(4, 8)
def test_a_hierarchy_talks_within_nodes_and_to_counterparts(mpi_comm, monkeypatch):
    from collectives import Communicator

    local_size = mpi_comm.size // 2
    monkeypatch.setenv("COLLECTIVES_FAKE_NODES", f"2x{local_size}")
    comm = Communicator(mpi_comm)
    plan = comm.plan("all_reduce", np.ones(100), algorithm="hierarchical/ring/ring")
    peers = {m.to for bound in plan.rounds for m in bound.moves if isinstance(m, Send)}
    right = comm.rank // local_size * local_size + (comm.rank + 1) % local_size
    assert peers == {right, (comm.rank + local_size) % comm.size}
    assert np.all(plan() == comm.size)
    comm.free()


def test_a_scalar(comm):
    x = np.array(comm.rank + 1.0)
    assert comm.all_reduce(x) is x
    assert x == comm.size * (comm.size + 1) / 2


@pytest.mark.parametrize("collective", [*REDUCTIONS, "all_gather", "all_to_all", "gather", "scatter"])
def test_out_is_written_and_x_is_not(comm, collective):
    xs = inputs(comm.size, 2 * comm.size)
    want = expected(collective, xs, comm.rank)
    for algorithm in algorithms_of(collective, comm.size):
        x, out = xs[comm.rank].copy(), np.full_like(xs[0] if want is None else want, 99)
        x.flags.writeable = False
        actual = getattr(comm, collective)(x, out=out, algorithm=algorithm)
        same(x, xs[comm.rank], algorithm)
        if collective in ("reduce", "gather") and comm.rank != 0:
            assert actual is (x if collective == "reduce" else None)
            same(out, np.full_like(out, 99))
        else:
            assert actual is out
            same(out, want, algorithm)


@pytest.mark.parametrize("collective", ["reduce_scatter", "reduce", *MOVES])
def test_x_stays_as_it_is(comm, collective):
    """Exceptions are the receivers of a broadcast and the root of a reduction."""
    xs = inputs(comm.size, 2 * comm.size)
    changed = {"broadcast": comm.rank != 0, "reduce": comm.rank == 0}.get(collective, False)
    for algorithm in algorithms_of(collective, comm.size):
        x = xs[comm.rank].copy()
        x.flags.writeable = changed
        actual = getattr(comm, collective)(x, algorithm=algorithm)
        same(actual, expected(collective, xs, comm.rank), algorithm)
        assert changed or np.array_equal(x, xs[comm.rank])


def test_reduce_scatter_and_all_gather_in_place(comm):
    xs = inputs(comm.size, 2 * comm.size + 1)
    parts = np.array_split(np.arange(2 * comm.size + 1), comm.size)
    begin, counts = parts[comm.rank][0], [len(part) for part in parts]
    for algorithm in algorithms_of("reduce_scatter", comm.size):
        x = xs[comm.rank].copy()
        own = x[begin : begin + counts[comm.rank]]
        assert comm.reduce_scatter(x, out=own, algorithm=algorithm) is own
        same(own, expected("reduce_scatter", xs, comm.rank), algorithm)
    for algorithm in algorithms_of("all_gather", comm.size):
        out = np.full(2 * comm.size + 1, 99, np.float32)
        own = out[begin : begin + counts[comm.rank]]
        own[:] = xs[0][parts[comm.rank]]
        assert comm.all_gather(own, out=out, counts=counts, algorithm=algorithm) is out
        same(out, xs[0], algorithm)


def test_uneven_counts(comm):
    check_uneven_counts(comm)


def check_uneven_counts(comm, algorithms=None):
    for shift in range(4):
        counts = [(3 * rank + shift) % 4 for rank in range(comm.size)]
        ends = np.cumsum(counts)
        own = slice(ends[comm.rank] - counts[comm.rank], ends[comm.rank])
        xs = inputs(comm.size, sum(counts))
        for algorithm in algorithms or algorithms_of("reduce_scatter", comm.size):
            actual = comm.reduce_scatter(xs[comm.rank], counts=counts, algorithm=algorithm)
            same(actual, reduced(xs, "sum")[own], (counts, algorithm))
        for algorithm in algorithms or algorithms_of("all_gather", comm.size):
            same(comm.all_gather(xs[0][own], counts=counts, algorithm=algorithm), xs[0], (counts, algorithm))


def test_uneven_gather_and_scatter(comm):
    for shift in range(4):
        counts = [(3 * rank + shift) % 4 for rank in range(comm.size)]
        ends = np.cumsum(counts)
        own = slice(ends[comm.rank] - counts[comm.rank], ends[comm.rank])
        whole, root = inputs(comm.size, sum(counts))[0], shift % comm.size
        for algorithm in algorithms_of("gather", comm.size):
            actual = comm.gather(whole[own], root=root, counts=counts, algorithm=algorithm)
            same(actual, whole if comm.rank == root else None, (counts, algorithm))
        for algorithm in algorithms_of("scatter", comm.size):
            x = whole if comm.rank == root else np.zeros_like(whole)
            same(comm.scatter(x, root=root, counts=counts, algorithm=algorithm), whole[own], (counts, algorithm))


def test_gather_and_scatter_in_place(comm):
    whole = inputs(comm.size, 2 * comm.size)[0]
    own, root = slice(2 * comm.rank, 2 * comm.rank + 2), comm.size - 1
    for algorithm in algorithms_of("gather", comm.size):
        out = np.zeros_like(whole) if comm.rank == root else np.zeros(0)  # not used
        x = out[own] if comm.rank == root else np.empty(2, whole.dtype)
        x[:] = whole[own]
        assert comm.gather(x, root=root, out=out, algorithm=algorithm) is (out if comm.rank == root else None)
        assert comm.rank != root or np.array_equal(out, whole), algorithm
    for algorithm in algorithms_of("scatter", comm.size):
        x = whole.copy() if comm.rank == root else None
        out = np.empty(2, whole.dtype) if x is None else x[own]
        assert comm.scatter(x, root=root, out=out, algorithm=algorithm) is out
        same(out, whole[own], algorithm)
        assert x is None or np.array_equal(x, whole)


def test_uneven_all_to_all(comm):
    for shift in range(4):
        counts = (2 * np.arange(comm.size)[:, None] + 3 * np.arange(comm.size) + shift) % 4  # [source, dest]
        xs = [inputs(comm.size, row.sum())[rank] for rank, row in enumerate(counts)]
        chunks = [np.split(x, np.cumsum(row)[:-1])[comm.rank] for x, row in zip(xs, counts, strict=True)]
        sends, receives = counts[comm.rank].tolist(), counts[:, comm.rank].tolist()
        for algorithm in algorithms_of("all_to_all", comm.size, equal=False):
            for keywords in ({}, {"recv_counts": receives}):
                actual = comm.all_to_all(xs[comm.rank], send_counts=sends, algorithm=algorithm, **keywords)
                same(actual, np.concatenate(chunks), (shift, algorithm))


@pytest.mark.sizes(1, 2, 3, proof=PROOF)
@pytest.mark.parametrize("dtype", FLOATS)
def test_all_ranks_get_the_same_bits_each_time(comm, dtype):
    for count in (2 * comm.size + 1, 300):
        xs = awkward(comm.size, count, dtype)
        for op in ops_of(dtype):
            with np.errstate(all="ignore"):
                want = reduced(xs, op)
            for algorithm in algorithms_of("all_reduce", comm.size):
                if algorithm == "mpi":  # MPI guarantees less
                    continue
                x = comm.all_reduce(xs[comm.rank].copy(), op=op, algorithm=algorithm)
                again = comm.all_reduce(xs[comm.rank].copy(), op=op, algorithm=algorithm)
                assert x.tobytes() == again.tobytes(), (op, algorithm)
                assert len(set(comm.mpi.allgather(x.tobytes()))) == 1, (op, algorithm)
                if op in ("min", "max"):
                    same(x.astype(np.float64), want.astype(np.float64), (op, algorithm))
                elif op != "prod":  # for products, infinity times 0 depends on the order
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


def test_overflow_and_invalid_sums_are_results(comm):
    x = np.array([6e4, np.inf if comm.rank % 2 else -np.inf], np.float16)
    comm.all_reduce(x)
    assert x[0] == (6e4 if comm.size == 1 else np.inf)
    assert np.isnan(x[1]) == (comm.size > 1)


def test_a_collective_is_a_row_and_a_schedule(comm, monkeypatch):
    """A prefix sum under another name: its row determines the arguments, the memory and MPI's call."""

    def upward(at):
        return range(at.rank + 1)

    scan = Collective("prefix", Chunks.ALL, Chunks.ALL, upward, ("op", "out"), "Scan", in_place=True)

    def climb(rank, size):
        return ((*chain.climb(rank, size, step, size),) for step in range(2 * (size - 1)))

    monkeypatch.setitem(spec.COLLECTIVES, "prefix", scan)
    rows = (*algorithms.REGISTRY, Algorithm("prefix", "chain", climb, in_order=True))
    monkeypatch.setattr(algorithms, "REGISTRY", rows)
    proof.check("prefix", climb, comm.size, in_order=True)
    for count in (0, 1, 2 * comm.size + 1):
        for dtype, op in (("float32", "sum"), ("int64", "max"), ("float16", "prod")):
            xs = inputs(comm.size, count, dtype, op)
            want = reduced(xs[: comm.rank + 1], op)
            for algorithm in ("auto", "chain", "mpi")[: 2 if dtype == "float16" else 3]:
                x = xs[comm.rank].copy()
                out = comm.plan("prefix", x, op=op, algorithm=algorithm, out=np.empty_like(x))()
                same(x, xs[comm.rank], "x is left alone")
                same(out, want, (algorithm, op, count))
                same(comm.plan("prefix", x, op=op, algorithm=algorithm)(), want, (algorithm, op, count))
