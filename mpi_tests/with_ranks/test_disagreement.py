import math
import re

import numpy as np
import pytest

from collectives.job.errors import InputError
from collectives.runtime.agreement import MOST_PLANS

pytestmark = pytest.mark.sizes(2, 3, proof=(5, 8))


def refusal(comm, call):
    """Return the error message that all ranks raise; check that the communicator works afterwards."""
    with pytest.raises(InputError) as caught:
        call()
    texts = comm.mpi.allgather(str(caught.value))
    assert texts == texts[:1] * comm.size
    assert comm.all_reduce(np.ones(3)).tolist() == [comm.size] * 3
    assert comm.all_gather(np.array([comm.rank]), algorithm="ring").tolist() == list(range(comm.size))
    return texts[0]


HERE = r"\S*test_disagreement\.py:\d+"


def zeros(*lengths):
    return [np.zeros(length) for length in lengths]


# Calls that are valid on each rank, but differ on the last one, where `odd` is True.
DISAGREEMENTS = {
    "elements": (
        lambda comm, odd: comm.all_reduce(np.zeros(4 + odd)),
        "all_reduce(4 elements, float64, op=sum, algorithm=auto)",
        "all_reduce(5 elements, float64, op=sum, algorithm=auto)",
    ),
    "shares": (
        lambda comm, odd: comm.all_gather(np.zeros(4 + odd)),
        "all_gather(4 elements, float64, algorithm=auto)",
        "all_gather(5 elements, float64, algorithm=auto)",
    ),
    "dtypes": (
        lambda comm, odd: comm.broadcast(np.zeros(4, "float32" if odd else "int32")),
        "broadcast(4 elements, int32, root=0, algorithm=auto)",
        "broadcast(4 elements, float32, root=0, algorithm=auto)",
    ),
    "ops": (
        lambda comm, odd: comm.all_reduce(np.zeros(4), op="max" if odd else "sum"),
        "all_reduce(4 elements, float64, op=sum, algorithm=auto)",
        "all_reduce(4 elements, float64, op=max, algorithm=auto)",
    ),
    "roots": (
        lambda comm, odd: comm.reduce(np.zeros(4), root=int(odd)),
        "reduce(4 elements, float64, op=sum, root=0, algorithm=auto)",
        "reduce(4 elements, float64, op=sum, root=1, algorithm=auto)",
    ),
    "algorithms": (
        lambda comm, odd: comm.all_reduce(np.zeros(4), algorithm="mpi" if odd else "ring"),
        "all_reduce(4 elements, float64, op=sum, algorithm=ring)",
        "all_reduce(4 elements, float64, op=sum, algorithm=mpi)",
    ),
    "collectives": (
        lambda comm, odd: comm.barrier() if odd else comm.broadcast(np.zeros(4)),
        "broadcast(4 elements, float64, root=0, algorithm=auto)",
        "barrier(algorithm=auto)",
    ),
    "wire dtypes": (
        lambda comm, odd: comm.all_reduce(np.zeros(4, "float32"), wire_dtype="bfloat16" if odd else None),
        "all_reduce(4 elements, float32, op=sum, algorithm=auto)",
        "all_reduce(4 elements, float32, op=sum, wire_dtype=bfloat16, algorithm=auto)",
    ),
    "orders": (
        lambda comm, odd: comm.reduce_scatter(np.zeros(4), reproducible=odd),
        "reduce_scatter(4 elements, float64, op=sum, algorithm=auto)",
        "reduce_scatter(4 elements, float64, op=sum, reproducible=True, algorithm=auto)",
    ),
    "fused arrays": (
        lambda comm, odd: (lambda both: comm.all_reduce(both[odd]))([comm.fuse(zeros(4, 4)), comm.fuse(zeros(5, 3))]),
        "all_reduce(8 elements, float64, op=sum, algorithm=auto) of fuse([4, 4], float64, cpu)",
        "all_reduce(8 elements, float64, op=sum, algorithm=auto) of fuse([5, 3], float64, cpu)",
    ),
    "fused and not": (
        lambda comm, odd: (lambda both: comm.broadcast(both[odd]))([comm.fuse(zeros(4, 4)), np.zeros(8)]),
        "broadcast(8 elements, float64, root=0, algorithm=auto) of fuse([4, 4], float64, cpu)",
        "broadcast(8 elements, float64, root=0, algorithm=auto)",
    ),
    "uneven chunks": (
        lambda comm, odd: comm.all_to_all(np.zeros(2 * comm.size), send_counts=[2] * comm.size if odd else None),
        "elements, float64, algorithm=auto)",
        "all_to_all(uneven counts, float64, algorithm=auto)",
    ),
}


@pytest.mark.parametrize(("call", "first", "other"), DISAGREEMENTS.values(), ids=DISAGREEMENTS)
def test_ranks_that_call_different_things(comm, call, first, other):
    last = comm.size - 1
    words = refusal(comm, lambda: call(comm, comm.rank == last))
    one, two = (rf"{re.escape(side)} #\d+ \({HERE}\)" for side in (first, other))
    expected = rf"ranks disagree: rank 0 calls .*{one}, rank {last} calls .*{two}; make the same call on every rank"
    assert re.fullmatch(expected, words)


def test_counts_that_differ(comm):
    counts = [1] * comm.size
    if comm.rank == comm.size - 1:
        counts = [2, 0, *counts[2:]]
    words = refusal(comm, lambda: comm.reduce_scatter(np.zeros(comm.size), counts=counts))
    assert f"rank 0 calls reduce_scatter(counts {[1] * comm.size}, float64" in words
    assert f"rank {comm.size - 1} calls reduce_scatter(counts [2, 0" in words


def read_only(count):
    x = np.zeros(count)
    x.flags.writeable = False
    return x


NO_ARRAYS = {
    "read-only": (lambda: read_only(6), "x is read-only: pass an array that may be written"),
    "a read-only view with gaps": (lambda: read_only(12)[::2], "x is read-only: pass an array that may be written"),
    "a list": (lambda: [1.0] * 6, "list is not an array: pass a NumPy or CuPy array or a torch tensor"),
    "None": (lambda: None, "NoneType is not an array: pass a NumPy or CuPy array or a torch tensor"),
    "objects": (lambda: np.zeros(6, object), "dtype object cannot be sent; use one of bfloat16, bool, complex128, "),
    "another byte order": (lambda: np.zeros(6, ">f8"), "dtype >f8 has another machine's byte order: pass x.astype"),
    "long double": (lambda: np.zeros(6, np.longdouble), "cannot be sent; use one of bfloat16, bool, "),
}


@pytest.mark.parametrize(("make", "message"), NO_ARRAYS.values(), ids=NO_ARRAYS)
def test_one_rank_without_an_array_that_will_do(comm, make, message):
    for bad in {0, comm.size - 1}:
        x = make() if comm.rank == bad else np.zeros(6)
        words = refusal(comm, lambda x=x: comm.all_reduce(x))
        assert words.startswith(f"rank {bad}: all_reduce: ")
        assert message in words


def test_two_ranks_fail_in_different_words(comm):
    x = [np.zeros(4), None, [1.0]][comm.rank] if comm.rank < 3 else np.zeros(4)
    words = refusal(comm, lambda: comm.all_reduce(x))
    assert words.startswith("rank 1: all_reduce: NoneType is not an array")
    assert words.endswith("(and 1 more failed)") == (comm.size > 2)


OUTS = {
    "too short": (
        lambda: np.zeros(5),
        "out has 5 elements of float64 on cpu: pass one of 6 of float64 on cpu, or none",
    ),
    "of another dtype": (
        lambda: np.zeros(6, "int64"),
        "out has 6 elements of int64 on cpu: pass one of 6 of float64 on cpu, or none",
    ),
    "read-only": (lambda: read_only(6), "out is read-only: pass an array that may be written"),
    "no array": (lambda: (), "tuple is not an array: pass a NumPy or CuPy array or a torch tensor"),
}


@pytest.mark.parametrize(("make", "message"), OUTS.values(), ids=OUTS)
def test_one_rank_with_a_wrong_out(comm, make, message):
    out = make() if comm.rank == 1 else np.zeros(6)
    assert refusal(comm, lambda: comm.all_reduce(np.zeros(6), out=out)) == f"rank 1: all_reduce: {message}"


# x and out in memory `b` that overlap by all but one element, on every rank.
OVERLAPS = {
    "all_reduce": (lambda n, b: (b[:n], b[1 : n + 1]), "x itself"),
    "reduce": (lambda n, b: (b[1 : n + 1], b[:n]), "x itself"),
    "reduce_scatter": (lambda n, b: (b[:n], b[n // 2 : n // 2 + 1]), "chunk 0 of x"),
    "all_gather": (lambda n, b: (b[1:2], b[: 2 * n][:n]), "an out whose chunk 0 is x"),
    "gather": (lambda n, b: (b[1:2], b[: 2 * n][:n]), "an out whose chunk 0 is x"),
    "scatter": (lambda n, b: (b[:n], b[n // 2 : n // 2 + 1]), "chunk 0 of x"),
    "all_to_all": (lambda n, b: (b[:n], b[n - 1 : 2 * n - 1]), "does not work in place"),
}


@pytest.mark.sizes(2, 3)
@pytest.mark.parametrize("collective", OVERLAPS)
def test_an_out_that_overlaps_x_on_one_rank(comm, collective):
    make, words = OVERLAPS[collective]
    n = comm.size
    x, out = make(n, np.zeros(3 * n)) if comm.rank == 0 else (part.copy() for part in make(n, np.zeros(3 * n)))
    message = refusal(comm, lambda: getattr(comm, collective)(x, out=out))
    assert message.startswith(f"rank 0: {collective}: out overlaps x: ")
    assert words in message


OUT_OF_RANGE = f"is out of range: use an integer from %d to {(1 << 31) - 1}"
# Calls that are equally wrong on every rank: the message names no rank.
WRONG = {
    "op": (
        lambda comm: comm.all_reduce(np.zeros(4), op="mean"),
        "op 'mean' is unknown: use one of sum, prod, min, max",
    ),
    "sum of bool": (
        lambda comm: comm.reduce(np.zeros(4, bool)),
        "op 'sum' of bool: use 'max' for any, 'min' for all, or cast to int32 to count",
    ),
    "min of complex": (
        lambda comm: comm.reduce_scatter(np.zeros(4, "complex64"), op="min"),
        "op 'min' of complex64: complex numbers have no order; use 'sum', 'prod' or 'avg'",
    ),
    "bits of floats": (
        lambda comm: comm.all_reduce(np.zeros(4), op="bxor"),
        "op 'bxor' of float64: it is defined for integers and bool; use another op, or pass a view of integers",
    ),
    "algorithm": (
        lambda comm: comm.all_reduce(np.zeros(4), algorithm="rign"),
        "algorithm 'rign' is unknown: use one of auto, ring, recursive_doubling, rabenseifner, ",
    ),
    "op in a list": (
        lambda comm: comm.all_reduce(np.zeros(4), op=["sum"]),
        "op ['sum'] is unknown: use one of sum, prod, min, max",
    ),
    "collective in a list": (lambda comm: comm.plan(["scan"], np.zeros(4)), "collective ['scan'] is unknown: use one "),
    "root": (lambda comm: comm.broadcast(np.zeros(4), root=8), "root 8 is out of range: use a rank from 0 to "),
    "root below 0": (lambda comm: comm.reduce(np.zeros(4), root=-1), "root -1 is out of range: use a rank from 0"),
    "root of another type": (lambda comm: comm.broadcast(np.zeros(4), root=None), "root None is out of range: use "),
    "root between two ranks": (lambda comm: comm.reduce(np.zeros(4), root=0.5), "root 0.5 is out of range: use a rank"),
    "a masked array": (
        lambda comm: comm.all_reduce(np.ma.zeros(4)),
        "all_reduce: masked arrays are not supported: pass x.filled(...), or x.data to include the masked elements",
    ),
    "empty of a length below 0": (
        lambda comm: comm.empty(-5),
        "shape -5 has a negative length: pass lengths of 0 or more",
    ),
    "empty of a dimension below 0": (
        lambda comm: comm.empty((2, -5)),
        "shape (2, -5) has a negative length: pass lengths of 0 or",
    ),
    "empty of half an element": (
        lambda comm: comm.empty(2.5),
        "shape 2.5 must consist of integers: pass an integer, or one for each dimension",
    ),
    "empty of a name": (
        lambda comm: comm.empty("ab"),
        "shape 'ab' must consist of integers: pass an integer, or one for each",
    ),
    "empty of more than there can be": (
        lambda comm: comm.empty((1 << 40, 1 << 40)),
        "of float32 exceeds the memory that a process can address",
    ),
    "fused arrays that overlap": (
        lambda comm: (lambda x: comm.all_reduce(comm.fuse([x[:5], x[4:]])))(np.zeros(9)),
        "fuse: arrays overlap: pass each part of memory once",
    ),
    "halves by MPI": (
        lambda comm: comm.all_reduce(np.zeros(4, "float16"), algorithm="mpi"),
        "algorithm 'mpi' cannot reduce float16: MPI's own sums of it are wrong or absent; use another algorithm",
    ),
    "sums of short integers by MPI": (
        lambda comm: comm.reduce_scatter(np.zeros(4, "uint16"), op="avg", algorithm="mpi"),
        "algorithm 'mpi' cannot sum uint16: Open MPI's sums of it saturate, and do not wrap; use another algorithm",
    ),
    "an array that is not aligned, by MPI": (
        lambda comm: comm.all_gather(np.zeros(9, "uint8")[1:].view("float64"), algorithm="mpi"),
        "algorithm 'mpi' needs aligned arrays: pass x.copy(), or use another algorithm",
    ),
    "too few counts": (
        lambda comm: comm.reduce_scatter(np.zeros(4), counts=[4]),
        "counts=[4] must be ",
    ),
    "counts that are not whole": (
        lambda comm: comm.reduce_scatter(np.zeros(4), counts=[4 / comm.size] * comm.size),
        " integers, one for each rank, none below 0",
    ),
    "counts below 0": (
        lambda comm: comm.reduce_scatter(np.zeros(4), counts=[5, -1] + [0] * (comm.size - 2)),
        " integers, one for each rank, none below 0",
    ),
    "counts of another sum": (
        lambda comm: comm.reduce_scatter(np.zeros(4), counts=[3] * comm.size),
        " but x has 4 elements",
    ),
    "send_counts of another sum": (
        lambda comm: comm.all_to_all(np.zeros(100), send_counts=[2] * comm.size),
        ", but x has 100 elements",
    ),
    "chunks that are not even": (
        lambda comm: comm.all_to_all(np.zeros(comm.size + 1)),
        " ranks: pass send_counts",
    ),
    "all_to_all in place": (
        lambda comm: (lambda x: comm.all_to_all(x, out=x))(np.zeros(comm.size)),
        "out overlaps x: all_to_all does not work in place; pass an out with memory of its own, or none",
    ),
    "an algorithm that needs equal chunks": (
        lambda comm: comm.all_to_all(np.zeros(comm.size), send_counts=[1] * comm.size, algorithm="bruck"),
        "ranks with uneven chunks, use auto, pairwise, ",
    ),
    "scatter of nothing": (
        lambda comm: comm.scatter(None),
        "NoneType is not an array: pass a NumPy or CuPy array or a",
    ),
    "scatter of another sum": (
        lambda comm: comm.scatter(np.zeros(4), counts=[3] * comm.size),
        " but x has 4 elements",
    ),
    "recv_counts alone": (
        lambda comm: comm.all_to_all(np.zeros(comm.size), recv_counts=[1] * comm.size),
        " need send_counts: pass them too",
    ),
    "axis": (
        lambda comm: comm.all_gather(np.zeros((2, 3)), axis=1),
        "all_gather: axis 1 must be 0 or None: for another axis, use numpy.concatenate(result, axis) on a stack",
    ),
    "axis of a plan": (
        lambda comm: comm.plan("gather", np.zeros(3), axis="rows"),
        "gather: axis 'rows' must be 0 or None: for another axis, use numpy.concatenate(result, axis) on a stack",
    ),
    "collective": (lambda comm: comm.plan("allreduce", np.zeros(4)), "collective 'allreduce' is unknown: use one of "),
    "argument": (
        lambda comm: comm.plan("all_reduce", np.zeros(4), root=0),
        "all_reduce: takes no root: it takes op, out",
    ),
    "wire_dtype": (
        lambda comm: comm.all_reduce(np.zeros(4, "float32"), wire_dtype="float16"),
        "all_reduce: wire_dtype 'float16' is not supported: use 'bfloat16', or None",
    ),
    "wire_dtype of float64": (
        lambda comm: comm.reduce(np.zeros(4), wire_dtype="bfloat16"),
        "reduce: wire_dtype 'bfloat16' is for float32, but x is of float64: omit it, or cast x",
    ),
    "wire_dtype of integers": (
        lambda comm: comm.all_reduce(np.zeros(4, "int32"), wire_dtype="bfloat16"),
        "wire_dtype 'bfloat16' is for float32, but x is of int32: omit it, or cast x",
    ),
    "wire_dtype of halves": (
        lambda comm: comm.reduce_scatter(np.zeros(4, "float16"), wire_dtype="bfloat16"),
        "wire_dtype 'bfloat16' is for float32, but x is of float16: omit it, or cast x",
    ),
    "wire_dtype without a wire": (
        lambda comm: comm.reduce(np.zeros(4, "float32"), wire_dtype="bfloat16", algorithm="direct"),
        "reduce: algorithm 'direct' cannot do wire_dtype=bfloat16: use auto, binomial, chain",
    ),
    "wire_dtype by MPI": (
        lambda comm: comm.reduce(np.zeros(4, "float32"), wire_dtype="bfloat16", algorithm="mpi"),
        "reduce: algorithm 'mpi' cannot do wire_dtype=bfloat16: use auto, binomial, chain",
    ),
    "wire_dtype of what is only moved": (
        lambda comm: comm.plan("all_gather", np.zeros(4, "float32"), wire_dtype="bfloat16"),
        "all_gather: takes no wire_dtype: it takes out, counts",
    ),
    "reproducible in another order": (
        lambda comm: comm.reduce_scatter(np.zeros(4), reproducible=True, algorithm="ring"),
        "reduce_scatter: algorithm 'ring' cannot do reproducible=True: use auto, chain, direct, staged",
    ),
    "reproducible by MPI": (
        lambda comm: comm.reduce(np.zeros(4), reproducible=True, algorithm="mpi"),
        "reduce: algorithm 'mpi' cannot do reproducible=True: use auto, chain, direct",
    ),
    "reproducible and a wire_dtype": (
        lambda comm: comm.reduce(
            np.zeros(4, "float32"), wire_dtype="bfloat16", reproducible=True, algorithm="binomial"
        ),
        "reduce: algorithm 'binomial' cannot do wire_dtype=bfloat16, reproducible=True: use auto, chain",
    ),
    "fuse of nothing": (lambda comm: comm.all_reduce(comm.fuse([])), "fuse: no arrays are given: pass at least one"),
    "fuse of no arrays": (
        lambda comm: comm.plan("reduce", comm.fuse([1.0])),
        "fuse: float is not an array: pass a NumPy or CuPy array or",
    ),
    "fuse of two dtypes": (
        lambda comm: comm.broadcast(comm.fuse([np.zeros(4), np.zeros(4, "int8")])),
        "fuse: cannot fuse arrays of different dtypes (float64, int8): fuse those of each dtype separately",
    ),
    "fused arrays that a collective does not take": (
        lambda comm: comm.reduce_scatter(comm.fuse(zeros(4, 4))),
        "reduce_scatter: takes no fused arrays: use all_reduce, broadcast, reduce, scan, exscan, or call it for each",
    ),
    "fused arrays and out": (
        lambda comm: comm.all_reduce(comm.fuse(zeros(4, 4)), out=np.zeros(8)),
        "all_reduce: takes no out with fused arrays, which get the results themselves: omit it",
    ),
    "fused arrays that are read-only, not waited for": (
        lambda comm: comm.all_reduce(comm.fuse([np.zeros(4), read_only(4)]), blocking=False).wait(),
        "all_reduce: array 1 is read-only: pass an array that may be written",
    ),
    "fused arrays that are read-only": (
        lambda comm: comm.all_reduce(comm.fuse([np.zeros(4), read_only(4)])),
        "all_reduce: array 1 is read-only: pass an array that may be written",
    ),
    "fused arrays that are none": (
        lambda comm: comm.all_reduce(comm.fuse(3)),
        "fuse: 3 is not a list of arrays: pass one, as fuse([x, y])",
    ),
    "color": (lambda comm: comm.split(-1), f"color -1 {OUT_OF_RANGE % 0}, or None for no part"),
    "fractional color": (lambda comm: comm.split(0.5), f"color 0.5 {OUT_OF_RANGE % 0}, or None for no part"),
    "key": (lambda comm: comm.split(0, 1 << 31), f"key {1 << 31} {OUT_OF_RANGE % (-1 << 31)}"),
    "key of text": (lambda comm: comm.split(0, "a"), f"key 'a' {OUT_OF_RANGE % (-1 << 31)}"),
}


@pytest.mark.parametrize(("call", "message"), WRONG.values(), ids=WRONG)
def test_what_all_ranks_get_wrong(comm, call, message):
    words = refusal(comm, lambda: call(comm))
    assert message in words
    assert not words.startswith("rank")


def test_fused_arrays_on_two_devices(comm, cuda):
    words = refusal(comm, lambda: comm.all_reduce(comm.fuse([np.zeros(4), cuda.put(np.zeros(4))])))
    assert words == "fuse: cannot fuse arrays of different devices (cpu, cuda): fuse those of each device separately"


@pytest.mark.sizes(3, 5)
def test_an_algorithm_for_other_numbers_of_ranks(comm):
    words = refusal(comm, lambda: comm.all_gather(np.zeros(4), algorithm="neighbor"))
    assert words == (
        "all_gather: algorithm 'neighbor' needs an even number of ranks, or one: "
        f"on {comm.size} ranks, use auto, ring, recursive_doubling, bruck, hierarchical, hierarchical_direct, direct, "
        "staged, leaders, mpi"
    )


@pytest.mark.parametrize("collective", ["all_gather", "gather"])
def test_a_count_that_does_not_fit_on_one_rank(comm, collective):
    x = np.zeros(2 + (comm.rank == 1))
    words = refusal(comm, lambda: getattr(comm, collective)(x, counts=[2] * comm.size))
    assert words == f"rank 1: {collective}: counts={[2] * comm.size} say 2 for rank 1, but x has 3 elements"


def test_chunks_of_a_scatter_that_receivers_take_for_equal(comm):
    x, out = (np.zeros(comm.size + 1), None) if comm.rank == 0 else (None, np.zeros(1))
    words = refusal(comm, lambda: comm.scatter(x, out=out))
    assert f"rank 0 calls scatter({comm.size + 1} elements, float64, root=0, algorithm=auto)" in words
    assert f"rank 1 calls scatter({comm.size} elements, float64, root=0, algorithm=auto)" in words


def test_recv_counts_that_do_not_match(comm):
    receives = [2] * comm.size
    if comm.rank == 1:
        receives[0] = 3
    x = np.zeros(2 * comm.size)
    words = refusal(comm, lambda: comm.all_to_all(x, send_counts=[2] * comm.size, recv_counts=receives))
    sent = [2] * comm.size
    assert words == (f"rank 1: all_to_all: recv_counts={[3, *sent[1:]]}, but {sent} is sent: pass that, or omit it")


def test_a_wrong_out_of_uneven_chunks(comm):
    out = np.zeros(2 * comm.size + (comm.rank == 0))
    words = refusal(comm, lambda: comm.all_to_all(np.zeros(2 * comm.size), out=out, send_counts=[2] * comm.size))
    assert words.startswith(f"rank 0: out has {2 * comm.size + 1} elements of float64 on cpu: pass one of ")


def test_an_array_that_is_not_aligned_on_one_rank_after_one_that_is(comm):
    aligned = np.zeros(4)
    for _ in range(2):
        comm.all_reduce(aligned, algorithm="mpi")
    x = np.zeros(33, "uint8")[1:].view("float64") if comm.rank == comm.size - 1 else aligned
    with pytest.raises(InputError, match=r"algorithm 'mpi' needs aligned arrays: pass x.copy\(\)"):
        comm.all_reduce(x, algorithm="mpi")
    np.testing.assert_array_equal(comm.all_reduce(x + 1), np.full(4, comm.size))


def test_a_plan_and_a_nonblocking_call_are_refused_alike(comm):
    x = np.zeros(4 + comm.rank // (comm.size - 1))
    plan = refusal(comm, lambda: comm.plan("all_reduce", x)).replace("calls plan ", "calls ")
    work = refusal(comm, lambda: comm.all_reduce(x, blocking=False).wait())
    assert [re.sub(rf" #\d+ \({HERE}\)", "", words) for words in (plan, work)] == [
        f"ranks disagree: rank 0 calls all_reduce(4 elements, float64, op=sum, algorithm=auto), rank {comm.size - 1} "
        "calls all_reduce(5 elements, float64, op=sum, algorithm=auto); make the same call on every rank"
    ] * 2


def test_a_plan_is_not_a_call(comm):
    words = refusal(comm, lambda: comm.plan("barrier") if comm.rank == 1 else comm.barrier())
    assert "rank 0 calls barrier(algorithm=auto) #2" in words
    assert "rank 1 calls plan barrier(algorithm=auto) #2" in words


def test_the_same_call_from_other_lines(comm):
    x = np.full(3, float(comm.rank))
    if comm.rank == 1:
        comm.broadcast(x, root=1)
    else:
        comm.broadcast(x, root=1)
    assert x.tolist() == [1.0] * 3


def test_a_rank_that_is_one_call_behind(comm):
    """The root of a small broadcast does not wait for the others."""
    plan = comm.plan("broadcast", np.zeros(2), root=0, algorithm="binomial")
    if comm.rank == 0:
        plan()
    words = refusal(comm, comm.barrier)
    assert re.fullmatch(
        rf"ranks disagree: rank 0 calls barrier\(algorithm=auto\) #4 \({HERE}\), "
        rf"rank 1 calls barrier\(algorithm=auto\) #3 \({HERE}\): rank 1 skipped 1 earlier; "
        "make the same sequence of calls on every rank",
        words,
    )
    if comm.rank != 0:
        plan()


def test_others_work_goes_on_after_a_refusal(comm):
    x = np.full(3, float(comm.rank))
    work = comm.all_reduce(x, blocking=False)
    refusal(comm, lambda: comm.broadcast(np.zeros(2 + comm.rank)))
    assert work.wait().tolist() == [sum(range(comm.size))] * 3


def agree(comm, error, *ranks):
    with comm.agreed():
        if comm.rank in ranks:
            raise error


def test_agreed(comm):
    agree(comm, ValueError("nobody says it"))
    last, long = comm.size - 1, "é" * 5000
    missing = FileNotFoundError(2, "No such file or directory", "töte.txt")
    for error, ranks, words in (
        (ValueError("n_head=3: use 2"), [last], f"rank {last}: n_head=3: use 2"),
        (ValueError("n_head=3: use 2"), range(comm.size), "n_head=3: use 2"),
        (ValueError(), [0], "rank 0: ValueError"),
        (missing, [1], "rank 1: [Errno 2] No such file or directory: 'töte.txt'"),
        (ValueError(long), [0], f"rank 0: {long}"),
        (ValueError(f"{long}{comm.rank}"), [0, 1], f"rank 0: {long}0 (and 1 more failed)"),
    ):
        assert refusal(comm, lambda error=error, ranks=ranks: agree(comm, error, *ranks)) == words


def test_without_the_check_a_rank_fails_alone(mpi_comm):
    from collectives import Communicator

    comm = Communicator(mpi_comm, check=False)
    if comm.rank == 1:
        with pytest.raises(InputError, match="all_reduce: list is not an array"):
            comm.all_reduce([1.0])
    assert comm.all_reduce(np.ones(1)) == comm.size
    with pytest.raises(InputError, match="rank 1: said"):
        agree(comm, ValueError("said"), 1)
    comm.free()


def test_segments_that_differ_or_cannot_be(mpi_comm):
    from collectives import Communicator

    for wrong in (0, 1 << 31, "x", 1.5):
        with pytest.raises(InputError, match=f"segment_bytes={wrong!r} must be from 1 to 1073741824"):
            Communicator(mpi_comm, segment_bytes=wrong)
    if mpi_comm.size > 1:
        with pytest.raises(InputError, match=r"rank 0 calls Communicator\(segment_bytes=64\), rank 1 calls .*=65\)"):
            Communicator(mpi_comm, segment_bytes=64 + (mpi_comm.rank == 1))


def test_checks_and_time_limits_that_cannot_be(mpi_comm, monkeypatch):
    from collectives import Communicator

    for arguments, words in (
        ({"check": "often"}, "check='often' must be True or False"),
        ({"timeout_s": -1}, "timeout_s=-1 must be seconds, or 0 for no limit"),
        ({"timeout_s": "x"}, "timeout_s='x' must be seconds, or 0 for no limit"),
        ({"timeout_s": math.nan}, "timeout_s=nan must be seconds, or 0 for no limit"),
    ):
        with pytest.raises(InputError, match=words):
            Communicator(mpi_comm, **arguments)
    with pytest.raises(InputError, match=r"rank 0 calls Communicator\(check=True\), rank 1 calls .*=False\)"):
        Communicator(mpi_comm, check=mpi_comm.rank == 0)
    monkeypatch.setenv("COLLECTIVES_CHECK", "yes")
    with pytest.raises(InputError, match="COLLECTIVES_CHECK='yes': write 1, or 0 to compare nothing"):
        Communicator(mpi_comm)
    monkeypatch.setenv("COLLECTIVES_CHECK", "1")
    for seconds in ("soon", "-1", "nan"):
        monkeypatch.setenv("COLLECTIVES_TIMEOUT_S", seconds)
        with pytest.raises(InputError, match=f"COLLECTIVES_TIMEOUT_S='{seconds}': write seconds, as in 600, or 0"):
            Communicator(mpi_comm)


@pytest.mark.sizes(2)
def test_the_environment_says_what_the_arguments_do_not(mpi_comm, monkeypatch):
    from collectives import Communicator

    def settings(**arguments):
        comm = Communicator(mpi_comm, **arguments)
        part = comm.split(0)
        settings = comm.check, comm.timeout_s
        assert settings == (part.check, part.timeout_s)
        part.free()
        comm.free()
        return settings

    assert settings() == (True, 600)
    monkeypatch.setenv("COLLECTIVES_TIMEOUT_S", "2.5")
    assert settings() == (True, 2.5)
    assert settings(check=False, timeout_s=0) == (False, 0)
    monkeypatch.setenv("COLLECTIVES_CHECK", "0")
    assert settings()[0] is False


@pytest.mark.sizes(1, 2, 3)
def test_exchanges_of_many_lengths_keep_few_plans(comm):
    agreement = comm.context.agreement
    for _ in range(2):
        for length in range(1, MOST_PLANS + 9):
            every = np.arange(comm.size * length).reshape(comm.size, length) * (-1) ** np.arange(length)
            mine = every[comm.rank].tolist()
            assert agreement.highest(mine) == every.max(0).tolist()
            rows = agreement.gather_rows(mine)
            agreement.gather_rows([0] * length)  # by the same plan: `rows` stay
            np.testing.assert_array_equal(rows, every)
            assert len(agreement.plans) <= MOST_PLANS
    assert agreement.gather_ints(comm.rank - 5) == [rank - 5 for rank in range(comm.size)]
    ranks = range(comm.size)
    assert agreement.exchange([10 * comm.rank + p for p in ranks]) == [10 * p + comm.rank for p in ranks]
