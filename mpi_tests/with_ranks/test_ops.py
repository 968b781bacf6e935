"""Logical ops, minloc and maxloc, and user-defined ops, in every algorithm that supports them, compared with NumPy."""

from functools import reduce

import numpy as np
import pytest
from mpi4py import MPI

from collectives import InputError, Op, algorithms
from mpi_tests.helpers.reference import expected, inputs, same

pytestmark = pytest.mark.sizes(2, 3, proof=(1, 5, 8))
REDUCING = ("all_reduce", "reduce_scatter", "reduce", "scan", "exscan")
COUNTS = (1, 40, 3000)


def reference(collective, xs, rank, function):
    """Return a rank's expected result where `function` reduces two arrays."""
    ranks = {"scan": rank + 1, "exscan": rank}.get(collective, len(xs))
    if ranks == 0 or (collective == "reduce" and rank):
        return xs[rank]
    total = reduce(function, xs[:ranks])
    return np.array_split(total, len(xs))[rank] if collective == "reduce_scatter" else total


def by_messages(collective, size, in_order=False):
    rows = [row for row in algorithms.rows(collective, size) if not row.access]
    return ["auto", *(row.name for row in rows if row.in_order or not in_order)]


@pytest.mark.parametrize("collective", REDUCING)
@pytest.mark.parametrize("op", ["LAND", "LOR", "LXOR"])
def test_truths_by_mpis_names_and_ours(comm, collective, op):
    for dtype in ("int32", "uint8", "bool"):
        xs = [x % 3 if dtype != "bool" else x for x in inputs(comm.size, 50, dtype)]
        want = expected(collective, xs, comm.rank, op.lower())
        for algorithm in algorithms.names(collective, comm.size):
            for name in (op.lower(), getattr(MPI, op)):
                same(getattr(comm, collective)(xs[comm.rank].copy(), op=name, algorithm=algorithm), want, algorithm)


def test_truths_are_those_of_the_mpi_library(comm, mpi_comm):
    x = np.arange(6, dtype="int16") % 3 * (comm.rank + 1)
    for op in (MPI.LAND, MPI.LOR, MPI.LXOR):
        theirs, running = np.empty_like(x), np.empty_like(x)
        mpi_comm.Allreduce(x, theirs, op)
        mpi_comm.Scan(x, running, op)
        same(comm.all_reduce(x.copy(), op=op), theirs)
        same(comm.scan(x.copy(), op=op), running)


PAIRS = (
    np.dtype([("value", "f4"), ("index", "i4")]),
    np.dtype([("value", "f8"), ("index", "i4")], align=True),
    np.dtype([("value", "i8"), ("place", "u2")]),
)


def pairs(size, count, dtype):
    """Return every rank's pairs, with few different values, so that ties occur."""
    xs = [np.zeros(count, dtype) for _ in range(size)]
    for rank, x in enumerate(xs):
        rng = np.random.default_rng([rank, count])
        value, index = dtype.names
        x[value], x[index] = rng.integers(-2, 3, count), rng.integers(0, 5, count)
    return xs


def located(xs, op):
    """Return the element-wise minima or maxima of pairs by Python's own `min`."""
    sign = 1 if op == "minloc" else -1
    rows = zip(*(x.tolist() for x in xs), strict=True)
    return np.array([min(row, key=lambda pair: (sign * pair[0], pair[1])) for row in rows], xs[0].dtype)


@pytest.mark.parametrize("op", ["minloc", "maxloc"])
@pytest.mark.parametrize("dtype", PAIRS, ids=str)
def test_where_the_least_and_the_greatest_are(comm, op, dtype):
    for count in COUNTS:
        xs = pairs(comm.size, count, dtype)
        for collective in REDUCING:
            want = reference(collective, xs, comm.rank, lambda a, b: located([a, b], op))
            for algorithm in by_messages(collective, comm.size):
                for name in (op, getattr(MPI, op.upper())):
                    x = xs[comm.rank].copy()
                    same(getattr(comm, collective)(x, op=name, algorithm=algorithm), want, (collective, algorithm))


def test_places_are_those_of_the_mpi_library(comm, mpi_comm):
    x = pairs(comm.size, 50, PAIRS[0])[comm.rank]
    for op in (MPI.MINLOC, MPI.MAXLOC):
        theirs = np.empty_like(x)
        mpi_comm.Allreduce([x, MPI.FLOAT_INT], [theirs, MPI.FLOAT_INT], op)
        same(comm.all_reduce(x.copy(), op=op), theirs)


def test_a_nan_is_first(comm):
    x = np.zeros(2, PAIRS[0])
    x["index"] = comm.rank
    x["value"][0] = np.nan if comm.rank == comm.size - 1 else 1
    for op in ("minloc", "maxloc"):
        actual = comm.all_reduce(x.copy(), op=op)
        assert np.isnan(actual["value"][0])
        assert actual["index"].tolist() == [comm.size - 1, 0]


@pytest.mark.parametrize("collective", ["broadcast", "all_gather", "all_to_all", "scatter", "gather"])
def test_pairs_are_moved_as_they_are(comm, collective):
    xs = pairs(comm.size, 3 * comm.size, PAIRS[1])
    want = expected(collective, xs, comm.rank)
    for algorithm in [*algorithms.names(collective, comm.size), "auto"]:
        for make in (np.empty, comm.empty):
            x = make(len(xs[0]), PAIRS[1])
            x[:] = xs[comm.rank]
            same(getattr(comm, collective)(x, algorithm=algorithm), want, algorithm)


def farther(a, b):
    """Keep the element farther from 0; of two at the same distance, the first."""
    return np.where(abs(b) > abs(a), b, a)


def after(a, b):
    """Append the digits of b to those of a, an associative op that is not commutative."""
    return np.where(b == 0, a, np.where(a == 0, b, a * 10 ** (np.floor(np.log10(np.maximum(b, 1))) + 1) + b))


@pytest.mark.parametrize("collective", REDUCING)
@pytest.mark.parametrize("commutative", [True, False])
def test_an_op_of_ones_own_in_every_algorithm(comm, collective, commutative):
    op = Op(np.fmax, commutative) if commutative else Op(after, commutative)
    for count in COUNTS:
        xs = [np.full(count, rank + 1.0) * (np.arange(count) % 3 != rank % 3) for rank in range(comm.size)]
        want = reference(collective, xs, comm.rank, op.function)
        for algorithm in by_messages(collective, comm.size, in_order=not commutative):
            for _ in range(2):
                x = xs[comm.rank].copy()
                same(getattr(comm, collective)(x, op=op, algorithm=algorithm), want, (collective, algorithm))
            plan = comm.plan(collective, xs[comm.rank].copy(), op=op, algorithm=algorithm)
            same(plan(), want, (collective, algorithm))
            plan.free()


def test_an_op_of_numbas_and_of_16_bits(comm):
    numba = pytest.importorskip("numba")
    compiled = numba.njit(lambda a, b: a + b)
    x = np.full(5, comm.rank + 1, np.int64)
    assert comm.all_reduce(x.copy(), op=Op(compiled)).tolist() == [comm.size * (comm.size + 1) // 2] * 5
    half = np.full(5, 1 + 2.0**-10, np.float16)
    want = (comm.size * half.astype("f4")).astype("f2")
    same(comm.all_reduce(half.copy(), op=Op(np.add)), want)


@pytest.mark.parametrize("commute", [True, False])
def test_an_op_that_mpi_has_made(comm, mpi_comm, commute):
    def reduce_bytes(source, into, datatype):
        a, b = (np.frombuffer(memory, "f8") for memory in (source, into))
        b[:] = np.fmax(a, b) if commute else after(a, b)

    op = MPI.Op.Create(reduce_bytes, commute)
    for count in (1, 1000):
        x, theirs = np.full(count, comm.rank + 1.0), np.empty(count)
        mpi_comm.Allreduce(x, theirs, op)
        for _ in range(2):
            same(comm.all_reduce(x.copy(), op=op), theirs)
    op.Free()


REFUSED = {
    "truths of floats": (
        lambda comm: comm.all_reduce(np.ones(2), op="land"),
        "op 'land' of float64: it is defined for integers",
    ),
    "places of numbers": (
        lambda comm: comm.all_reduce(np.ones(2), op="minloc"),
        "op 'minloc' of float64: it is defined for pairs",
    ),
    "sums of pairs": (
        lambda comm: comm.reduce(np.zeros(2, "f4,i4")),
        "pairs of a value and an index support only 'minloc'",
    ),
    "another dtype": (
        lambda comm: comm.scan(np.ones(2, "i4"), op=Op(np.true_divide)),
        r"op Op\(divide, commutative=True\) of two arrays of int32 .* returns float64 of shape \(2,\): return one",
    ),
    "another shape": (lambda comm: comm.all_reduce(np.ones(2), op=Op(np.vdot)), r"returns float64 of shape \(\)"),
    "some elements": (
        lambda comm: comm.all_reduce(np.ones(2), op=Op(lambda a, b: (a + b)[:2])),
        r"two arrays of float64 and shape \(5,\) returns float64 of shape \(2,\): return one like them",
    ),
    "a failure": (
        lambda comm: comm.all_reduce(np.ones(2), op=Op(lambda a, b: a[9])),
        r"op Op\(.*<lambda> of test_ops.py:\d+, commutative=True\) of float64 fails: IndexError: index 9",
    ),
    "a program": (
        lambda comm: comm.all_reduce(np.ones(2), op=Op(farther), algorithm="one_shot"),
        r"algorithm 'one_shot' cannot do op=Op\(farther of test_ops.py:\d+, commutative=True\): use auto, ring, ",
    ),
    "another order": (
        lambda comm: comm.all_reduce(np.ones(2), op=Op(after, False), algorithm="ring"),
        r"algorithm 'ring' cannot do op=Op\(after of .*, commutative=False\): use auto, chain$",
    ),
    "messages": (lambda comm: comm.all_reduce(np.ones(2), op=MPI.NO_OP), "op 'MPI.NO_OP' is unknown"),
}


@pytest.mark.parametrize(("call", "words"), REFUSED.values(), ids=REFUSED)
def test_what_an_op_is_not_for(comm, call, words):
    with pytest.raises(InputError, match=words):
        call(comm)
    assert comm.all_reduce(np.ones(1)) == comm.size


@pytest.mark.sizes(2, 3)
def test_ranks_with_other_ops(comm):
    ops = [Op(farther), Op(np.fmax)]
    x = np.ones(3)
    for _ in range(2):
        comm.all_reduce(x.copy(), op=ops[0])
    with pytest.raises(InputError, match=r"op=Op\(farther of test_ops.py:\d+, .*op=Op\(fmax, commutative=True\)"):
        comm.all_reduce(x, op=ops[comm.rank == comm.size - 1])
    with pytest.raises(InputError, match=r"op=Op\(fmax, commutative=True\).*op=Op\(fmax, commutative=False\)"):
        comm.all_reduce(x, op=Op(np.fmax, comm.rank != comm.size - 1))
