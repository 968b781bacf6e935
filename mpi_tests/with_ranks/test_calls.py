"""Repeated calls: the plan bound for the first call of a kind runs for later ones."""

import ctypes
import gc
import re
import weakref
from itertools import product

import numpy as np
import pytest
from mpi4py import MPI

from collectives import Communicator, algorithms
from collectives.job.errors import CommunicationError, InputError
from collectives.runtime.backends import message_programs
from collectives.runtime.backends.kernels import ON_MISMATCH
from collectives.runtime.backends.message_programs import MessageProgram
from collectives.schedule.moves import Send
from mpi_tests.helpers.reference import COLLECTIVES, ROOTED, algorithms_of, expected, inputs, same

pytestmark = pytest.mark.sizes(2, 3, proof=(1, 5))
MEMORY = {"symmetric": lambda comm, x: comm.empty(len(x), x.dtype), "ordinary": lambda comm, x: np.empty_like(x)}
SHAPED = {"all_reduce", "reduce_scatter", "all_gather", "all_to_all", "reduce", "gather", "scatter"}


def put(comm, memory, values):
    x = MEMORY[memory](comm, values)
    x[:] = values
    return x


def only_once(comm, monkeypatch):
    """Fail if the ranks agree on a new call from now on."""

    def refuse(*args, **named):
        raise AssertionError("the ranks agree on a new call")

    monkeypatch.setattr(comm.dispatcher, "resolve", refuse)


@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize("memory", MEMORY)
@pytest.mark.sizes(2, proof=(1, 3, 5))
def test_later_calls_run_on_other_arrays_without_agreeing_anew(comm, collective, memory, monkeypatch):
    for count in (0, 24 * comm.size, 30_000 * comm.size):
        xs = inputs(comm.size, count)
        for algorithm in algorithms_of(collective, comm.size):
            with monkeypatch.context() as patch:
                for run in range(3):
                    if run == 1:
                        only_once(comm, patch)
                    args = [values + np.float32(run) for values in xs]
                    x = put(comm, memory, args[comm.rank])
                    actual = getattr(comm, collective)(x, algorithm=algorithm)
                    same(actual, expected(collective, args, comm.rank), (collective, algorithm, count, run))


@pytest.mark.parametrize("collective", sorted(SHAPED))
def test_results_land_in_whatever_array_is_passed(comm, collective):
    xs = inputs(comm.size, 24 * comm.size)
    for run in range(4):
        args = [values + np.float32(run) for values in xs]
        want = expected(collective, args, comm.rank)
        x = args[comm.rank].copy()
        out = None if want is None or (collective == "reduce" and comm.rank) else np.empty_like(want)
        actual = getattr(comm, collective)(x, out=out)
        assert out is None or actual is out
        same(actual, want, (collective, run))
        same(x, args[comm.rank])


def test_an_out_of_a_rank_that_gets_no_result(comm):
    for run in range(3):
        x, out = np.ones(4), np.zeros(4)
        assert comm.reduce(x, out=out) is (x if comm.rank else out)
        assert comm.reduce(x, out=out, blocking=False).wait() is (x if comm.rank else out), run
        same(out, np.full(4, 0.0 if comm.rank else float(comm.size)))


def test_every_root_is_a_call_of_its_own(comm):
    xs = inputs(comm.size, 4 * comm.size)
    for run in range(3):
        for collective in ROOTED:
            for root in range(comm.size):
                x = xs[comm.rank] + np.float32(run)
                want = expected(collective, [values + np.float32(run) for values in xs], comm.rank, root=root)
                same(getattr(comm, collective)(x, root=root), want, (collective, root, run))


@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize("memory", MEMORY)
def test_later_calls_that_are_not_waited_for_do_not_agree_anew(comm, collective, memory, monkeypatch):
    check_started_calls(comm, collective, memory, monkeypatch)


def check_started_calls(comm, collective, memory, monkeypatch):
    """Start several calls before waiting for them, with a blocking call among them."""
    for count in (0, 24 * comm.size, 30_000 * comm.size):
        xs = inputs(comm.size, count)
        arrays = [put(comm, memory, xs[comm.rank]) for _ in range(3)]
        with monkeypatch.context() as patch:
            for run in range(3):
                if run == 1:
                    only_once(comm, patch)
                args = [[values + np.float32(run + turn) for values in xs] for turn in range(3)]
                for x, of_ranks in zip(arrays, args, strict=True):
                    x[:] = of_ranks[comm.rank]
                call = getattr(comm, collective)
                works = [call(arrays[0], blocking=False), call(arrays[1], blocking=False)]
                same(call(arrays[2]), expected(collective, args[2], comm.rank), (collective, count, run))
                for turn in (1, 0):
                    same(works[turn].wait(), expected(collective, args[turn], comm.rank), (collective, count, run))


KINDS = {
    "ordinary": lambda comm, values: values.copy(),
    "symmetric": lambda comm, values: put(comm, "symmetric", values),
    "strided": lambda comm, values: np.repeat(values, 2)[::2],
}


def in_two_groups(comm, start):
    """Start on the first half of the ranks, then on the others, so that a start which waits never ends."""
    late = comm.rank >= comm.size // 2
    works = None if late else start()
    comm.mpi.Barrier()
    return start() if late else works


@pytest.mark.parametrize("kind", KINDS)
def test_starting_a_new_call_does_not_wait_for_other_ranks(new_comm, kind):
    comm = new_comm
    xs = inputs(comm.size, 24 * comm.size)
    calls = [(name, algorithm) for name in COLLECTIVES for algorithm in ("auto", "ring", "binomial", "mpi")]
    calls = [(name, algorithm) for name, algorithm in calls if algorithm in algorithms_of(name, comm.size)]
    arrays = [KINDS[kind](comm, xs[comm.rank]) for _ in calls]

    def start():
        return [
            getattr(comm, name)(x, algorithm=algorithm, blocking=False)
            for x, (name, algorithm) in zip(arrays, calls, strict=True)
        ]

    works = in_two_groups(comm, start)
    same(comm.all_reduce(xs[comm.rank].copy()), expected("all_reduce", xs, comm.rank))
    for work, call in zip(works, calls, strict=True):
        same(work.wait(), expected(call[0], xs, comm.rank), call)


def test_starting_new_calls_of_other_forms_does_not_wait_for_other_ranks(new_comm):
    comm, ones = new_comm, np.ones(3)
    lists = [np.full((2, 3), comm.rank + 1.0), np.full(4, comm.rank + 1.0)]
    sends = [comm.rank + dest for dest in range(comm.size)]

    def start():
        return [
            comm.barrier(blocking=False),
            comm.all_reduce(comm.fuse(lists), blocking=False),
            comm.all_to_all(np.full(sum(sends), float(comm.rank)), send_counts=sends, blocking=False),
            *(comm.all_reduce(ones.copy(), blocking=False) for _ in range(3)),
        ]

    _, fused, uneven, *repeated = in_two_groups(comm, start)
    total = sum(range(1, comm.size + 1))
    for work in repeated:
        same(work.wait(), comm.size * ones)
    assert all(array is own for array, own in zip(fused.wait(), lists, strict=True))
    for array in lists:
        same(array, np.full(array.shape, float(total)))
    same(uneven.wait(), np.concatenate([np.full(comm.rank + source, float(source)) for source in range(comm.size)]))


def test_new_calls_on_several_communicators_start_and_end_in_any_order(new_comm):
    """Each rank starts them in an order of its own, and waits in another one."""
    parts = [new_comm.split(0) for _ in range(4)]
    for turn in range(3):
        works = {}
        for index in np.random.default_rng([turn, new_comm.rank]).permutation(len(parts)):
            x = np.full(10 * turn + index + 1, 2.0**index)
            works[index] = parts[index].all_reduce(x, algorithm=("ring", "auto")[index % 2], blocking=False)
        for index in np.random.default_rng([turn, new_comm.rank, 1]).permutation(len(parts)):
            same(works[index].wait(), np.full(10 * turn + index + 1, 2.0**index * new_comm.size))
    for part in parts:
        part.free()


@pytest.mark.sizes(1, 2)
def test_new_calls_that_are_started_where_mpi_allows_one_thread(new_comm):
    """Then ranks agree on them in the thread that starts them, or waits."""
    new_comm.context.progress.background.allowed = False
    ones, sends = np.ones(5), [1] * new_comm.size
    works = [new_comm.all_reduce(ones.copy(), blocking=False) for _ in range(2)]
    works.append(new_comm.all_reduce(np.ones(10)[::2], blocking=False))
    uneven = new_comm.all_to_all(np.ones(new_comm.size), send_counts=sends, blocking=False)
    same(new_comm.all_reduce(np.ones(7)), np.full(7, float(new_comm.size)))
    for work in works[::-1]:
        same(work.wait(), new_comm.size * ones)
    same(uneven.wait(), np.ones(new_comm.size))


STARTED_WRONG = {
    "another length": (lambda comm, odd: comm.all_reduce(np.ones(4 + odd), blocking=False), "ranks disagree: rank 0"),
    "another collective": (
        lambda comm, odd: (comm.broadcast if odd else comm.all_reduce)(np.ones(7), blocking=False),
        "ranks disagree: rank 0 calls all_reduce",
    ),
    "no array": (
        lambda comm, odd: comm.all_reduce([1.0] if odd else np.ones(1), blocking=False),
        "rank 1: all_reduce: list is not an array",
    ),
    "a read-only array with gaps": (
        lambda comm, odd: comm.all_reduce(np.broadcast_to(1.0, 4) if odd else np.ones(4), blocking=False),
        "rank 1: all_reduce: x is read-only",
    ),
    "counts": (
        lambda comm, odd: comm.all_to_all(
            np.ones(comm.size), send_counts=[1] * comm.size, recv_counts=[1 + odd] * comm.size, blocking=False
        ),
        "rank 1: all_to_all: recv_counts=",
    ),
}


@pytest.mark.sizes(2, 3, 5, proof=(4, 6, 7, 8))
@pytest.mark.parametrize(("start", "words"), STARTED_WRONG.values(), ids=STARTED_WRONG)
def test_what_is_wrong_with_a_started_call_is_raised_by_its_wait(new_comm, start, words):
    comm, x = new_comm, np.ones(5)
    before = comm.all_reduce(x.copy(), blocking=False)
    wrong = in_two_groups(comm, lambda: start(comm, comm.rank == 1))
    after = comm.all_reduce(x.copy(), blocking=False)
    same(comm.all_gather(np.array([comm.rank])), np.arange(comm.size))
    for _ in range(2):
        with pytest.raises(InputError, match=f"^{words}") as caught:
            wrong.wait()
        assert len(set(comm.mpi.allgather(str(caught.value)))) == 1
    for work in (before, after):
        same(work.wait(), comm.size * x)


def test_later_calls_on_fused_arrays_do_not_agree_anew(comm, monkeypatch):
    for run in range(4):
        if run == 1:
            only_once(comm, monkeypatch)
        arrays = [np.full(shape, float(comm.rank + run + number)) for number, shape in enumerate([(3,), (2, 2), ()])]
        actual = comm.all_reduce(comm.fuse(arrays), blocking=run % 2 == 0)
        actual = actual if run % 2 == 0 else actual.wait()
        for number, (result, own) in enumerate(zip(actual, arrays, strict=True)):
            assert result is own
            same(own, np.full(own.shape, sum(rank + run + number for rank in range(comm.size)), float))


def test_in_place_chunks(comm):
    """Arrays may overlap if out is this rank's chunk of x, or x is its chunk of out."""
    xs = inputs(comm.size, 5 * comm.size)
    for _ in range(3):
        x = xs[comm.rank].copy()
        own = slice(5 * comm.rank, 5 * comm.rank + 5)
        same(comm.reduce_scatter(x, out=x[own]), expected("reduce_scatter", xs, comm.rank))
        out = np.zeros(5 * comm.size, np.float32)
        out[own] = comm.rank
        same(comm.all_gather(out[own], out=out), np.repeat(np.arange(comm.size, dtype=np.float32), 5))


def test_uneven_chunks_that_change_on_one_rank(comm):
    for run in range(4):
        sends = [dest + (run % 2 if comm.rank == 0 else 0) for dest in range(comm.size)]
        x = np.full(sum(sends), float(comm.rank))
        actual = comm.all_to_all(x, send_counts=sends)
        want = [np.full(comm.rank + (run % 2 if source == 0 else 0), float(source)) for source in range(comm.size)]
        same(actual, np.concatenate(want), run)


@pytest.mark.sizes(2, 4)
def test_ranks_whose_arrays_lie_in_different_kinds_of_memory(comm):
    xs = inputs(comm.size, 1000)
    shared = put(comm, "symmetric", xs[comm.rank])
    for in_shared in (0, 1, -1, 0, 2, -1, 1, 0):  # on which rank, or on all
        shared[:] = xs[comm.rank]
        x = shared if in_shared in (comm.rank, -1) else xs[comm.rank].copy()
        same(comm.all_reduce(x), expected("all_reduce", xs, comm.rank), in_shared)


@pytest.mark.sizes(2, 4)
def test_started_calls_that_ranks_find_bound_or_not(comm):
    check_that_they_are_bound_again(comm)


def check_that_they_are_bound_again(comm):
    """Check that all ranks bind a call again that is bound on only some of them."""
    shared = [put(comm, "symmetric", np.zeros(1000, np.float32)) for _ in range(8)]
    works, results = [], []
    for turn, in_shared in enumerate((0, 1, -1, 0, 2, -1, 1, 0)):  # on which rank, or on all
        x = shared[turn] if in_shared in (comm.rank, -1) else np.empty(1000, np.float32)
        x[:] = comm.rank + turn
        works.append(comm.all_reduce(x, blocking=False))
        results.append(x)
    ones = comm.all_reduce(np.ones(1000, np.float32))
    same(ones, np.full(1000, np.float32(comm.size)))
    for turn, (work, x) in enumerate(zip(works, results, strict=True)):
        assert work.wait() is x
        same(x, np.full(1000, np.float32(sum(range(comm.size)) + turn * comm.size)), turn)


def test_tensors_and_arrays_mix(comm):
    torch = pytest.importorskip("torch")
    xs = inputs(comm.size, 40)
    for run in range(4):
        x = xs[comm.rank].copy()
        tensor = torch.from_numpy(x) if (run + comm.rank) % 2 else x
        actual = comm.all_reduce(tensor)
        assert actual is tensor
        same(x, expected("all_reduce", xs, comm.rank))
        actual = comm.all_gather(torch.from_numpy(xs[comm.rank].copy()))
        assert isinstance(actual, torch.Tensor)
        same(actual.numpy(), expected("all_gather", xs, comm.rank))


def test_no_array_of_the_callers_is_kept(comm):
    """Read-only arrays, lists of counts and subclasses are still detected in each call."""
    references = []
    for algorithm in ("auto", "ring", "mpi"):
        for _ in range(3):
            x, out = np.ones(100), np.empty(100 * comm.size)
            comm.all_reduce(x, algorithm=algorithm)
            comm.all_gather(x, out=out, algorithm=algorithm)
            references += [weakref.ref(x), weakref.ref(out)]
    del x, out
    gc.collect()
    assert [reference() for reference in references] == [None] * len(references)


@pytest.mark.sizes(1, 2)
def test_what_was_taken_before_is_refused_where_it_will_not_do(comm):
    x = np.ones(6)
    comm.all_reduce(x)
    frozen = np.ones(6)
    frozen.flags.writeable = False
    for bad in (frozen, np.ones(6, ">f8")):
        with pytest.raises(InputError):
            comm.all_reduce(bad)
    both = np.ones(12)
    comm.all_reduce(both[:6], out=both[6:])
    with pytest.raises(InputError, match="out overlaps x"):
        comm.all_reduce(both[:6], out=both[3:9])
    same(comm.all_reduce(np.ones(6)), np.full(6, float(comm.size)))


@pytest.mark.sizes(2)
def test_a_tensor_without_memory_is_refused_on_all_ranks(comm):
    torch = pytest.importorskip("torch")
    comm.all_reduce(torch.zeros(3))
    call = torch.vmap(comm.all_reduce) if comm.rank else comm.all_reduce
    with pytest.raises(InputError, match="rank 1: all_reduce: "):
        call(torch.zeros(2, 3) if comm.rank else torch.zeros(3))


CALLS = {
    "another length": (lambda comm: comm.all_reduce(np.ones(4)), lambda comm: comm.all_reduce(np.ones(5))),
    "another dtype": (lambda comm: comm.all_reduce(np.ones(4)), lambda comm: comm.all_reduce(np.ones(4, "float32"))),
    "as many bytes": (lambda comm: comm.broadcast(np.ones(4, "i4")), lambda comm: comm.broadcast(np.ones(4, "f4"))),
    "another op": (lambda comm: comm.all_reduce(np.ones(4)), lambda comm: comm.all_reduce(np.ones(4), op="max")),
    "another root": (lambda comm: comm.broadcast(np.ones(4)), lambda comm: comm.broadcast(np.ones(4), root=1)),
    "another collective": (lambda comm: comm.all_reduce(np.ones(4)), lambda comm: comm.broadcast(np.ones(4))),
    "a barrier": (lambda comm: comm.barrier(), lambda comm: comm.all_gather(np.ones(4))),
    "messages": (lambda comm: comm.all_reduce(np.ones(4), algorithm="ring"), lambda comm: comm.all_reduce(np.ones(4))),
    "MPI's own": (lambda comm: comm.all_reduce(np.ones(4), algorithm="mpi"), lambda comm: comm.all_reduce(np.ones(4))),
    "two by messages": (
        lambda comm: comm.all_reduce(np.ones(4), algorithm="ring"),
        lambda comm: comm.all_gather(np.ones(4), algorithm="ring"),
    ),
    "counts": (
        lambda comm: comm.all_gather(np.ones(4), counts=[4] * comm.size),
        lambda comm: comm.all_gather(np.ones(4)),
    ),
    "an order": (
        lambda comm: comm.all_reduce(np.ones(4)),
        lambda comm: comm.all_reduce(np.ones(4), reproducible=True),
    ),
    "long ones": (lambda comm: comm.all_reduce(np.ones(1 << 17)), lambda comm: comm.all_reduce(np.ones(4))),
    "symmetric ones": (
        lambda comm: comm.all_reduce(comm._array[:4]),
        lambda comm: comm.all_reduce(comm._array[:5]),
    ),
    "a plan": (lambda comm: comm.all_reduce(np.ones(4)), lambda comm: comm.plan("all_reduce", np.ones(4))),
    "one that is not waited for": (
        lambda comm: comm.all_reduce(np.ones(4)),
        lambda comm: comm.all_reduce(np.ones(5), blocking=False).wait(),
    ),
    "two that are not waited for": (
        lambda comm: comm.all_reduce(np.ones(4), blocking=False).wait(),
        lambda comm: comm.all_reduce(np.ones(5), blocking=False).wait(),
    ),
    "a split": (lambda comm: comm.all_reduce(np.ones(4)), lambda comm: comm.split(0).free()),
    "memory": (lambda comm: comm.all_reduce(np.ones(4)), lambda comm: comm.empty(4)),
    "fused arrays": (
        lambda comm: comm.all_reduce(np.ones(4)),
        lambda comm: comm.all_reduce(comm.fuse([np.ones(2), np.ones(2)])),
    ),
    "a comparison": (lambda comm: comm.all_reduce(np.ones(4)), lambda comm: comm.compare("anything")),
}


@pytest.mark.sizes(2, 3, proof=(5, 8))
@pytest.mark.parametrize(("one", "other"), CALLS.values(), ids=CALLS)
def test_ranks_that_repeat_calls_of_other_signatures(comm, one, other):
    check_that_both_are_named(comm, one, other)


NODES = {4: ("2x2", "4x1"), 6: ("3x2",), 8: ("4x2",)}


@pytest.fixture(params=[0, 1])
def between_nodes(request, mpi_comm, monkeypatch):
    """Yield a communicator of ranks that simulate several nodes."""
    choices = NODES[mpi_comm.size]
    monkeypatch.setenv("COLLECTIVES_FAKE_NODES", choices[request.param % len(choices)])
    comm = Communicator(mpi_comm)
    yield comm
    comm.free()


@pytest.mark.sizes(4, proof=(8,))
def test_ranks_of_other_nodes_that_repeat_calls_of_other_signatures(between_nodes):
    comm = between_nodes
    for one, other in CALLS.values():
        check_that_both_are_named(comm, one, other)


@pytest.mark.sizes(4, proof=(8,))
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_later_calls_between_nodes_that_are_not_waited_for(between_nodes, collective, monkeypatch):
    check_started_calls(between_nodes, collective, "ordinary", monkeypatch)


@pytest.mark.sizes(4, proof=(8,))
def test_started_calls_between_nodes_that_ranks_find_bound_or_not(between_nodes):
    check_that_they_are_bound_again(between_nodes)


@pytest.mark.sizes(4, proof=(6, 8))
def test_short_calls_between_nodes_are_compared_by_their_own_messages(between_nodes, monkeypatch):
    """In a repeated call a rank sends only the schedule's messages, for any arrays."""
    comm, name = between_nodes, carrying_algorithm(between_nodes)
    started = count_messages(comm, monkeypatch)
    for dtype, op, num in product(("float64", "float16", "int32"), ("sum", "max", "avg"), (1, 5, 24 * comm.size)):
        for run in range(3):
            args = [np.arange(num).astype(dtype) % 5 + rank + run for rank in range(comm.size)]
            want = {"sum": np.sum, "max": np.max, "avg": np.mean}[op](np.array(args, "float64"), axis=0).astype(dtype)
            x, out = args[comm.rank].copy(), np.empty_like(args[0])
            started.clear()
            actual = comm.all_reduce(x, op=op, out=out if run else None, algorithm=name)
            if run == 2:
                assert started == messages_of(comm, "all_reduce")
            assert actual is (out if run else x)
            np.testing.assert_allclose(actual, want, rtol=1e-3 if dtype == "float16" else 1e-12)
            same(x, args[comm.rank] if run else actual)


@pytest.mark.sizes(4)
def test_a_rank_of_another_node_that_skips_a_call(between_nodes):
    comm, x = between_nodes, np.ones(4)
    for _ in range(3):
        comm.all_reduce(x)
    plan = comm.plan("broadcast", np.zeros(2), algorithm="binomial")
    if comm.rank == 0:
        plan()  # whose root does not wait for the others
    with pytest.raises(InputError, match=r"all_reduce.* #(\d+) .*: rank 1 skipped 1 earlier"):
        comm.all_reduce(x)
    if comm.rank:
        plan()


@pytest.mark.sizes(2)
@pytest.mark.parametrize("name", ["MPI_Startall", "MPI_Testall"])
def test_a_message_of_a_program_that_fails(mpi_comm, name, monkeypatch):
    monkeypatch.setenv("COLLECTIVES_FAKE_NODES", "2x1")
    failing = ctypes.CFUNCTYPE(ctypes.c_int)(lambda: MPI.ERR_INTERN)
    addresses = {each: message_programs.mpi_function(each) for each in ("MPI_Startall", "MPI_Testall")}
    addresses[name] = ctypes.cast(failing, ctypes.c_void_p).value
    monkeypatch.setattr(message_programs, "mpi_function", addresses.get)
    comm = Communicator(mpi_comm)
    words = MPI.Get_error_string(MPI.ERR_INTERN)
    with pytest.raises(CommunicationError, match=re.escape(f"a message between nodes has failed: {words}")):
        comm.plan("all_reduce", np.ones(4))()


@pytest.mark.sizes(2, 3, 5, proof=(4, 6, 7, 8))
def test_calls_where_a_rank_has_no_numba(mpi_comm, monkeypatch, capsys):
    if mpi_comm.rank == mpi_comm.size - 1:
        monkeypatch.setattr("collectives.runtime.backends.compiler.failure", lambda: f"lost by test {mpi_comm.size}")
    comm = Communicator(mpi_comm)
    assert not comm.context.has_numba
    lost = f"rank {comm.size - 1} has no compiled kernels, and all data go by messages (lost by test {comm.size})"
    assert capsys.readouterr().err == f"collectives: {lost}\n" * (comm.rank == 0)
    for one, other in (CALLS["another length"], CALLS["another collective"], CALLS["one that is not waited for"]):
        check_that_both_are_named(comm, one, other)
    comm.free()


@pytest.mark.sizes(8)
@pytest.mark.parametrize("num", [1, 7])
def test_short_all_to_alls_between_nodes_are_compared_by_their_own_messages(mpi_comm, num, monkeypatch):
    monkeypatch.setenv("COLLECTIVES_FAKE_NODES", "4x2")
    comm = Communicator(mpi_comm)
    started = count_messages(comm, monkeypatch)
    for run in range(4):
        x = np.repeat(100 * run + 10 * comm.rank + np.arange(comm.size), num).astype("float32")
        started.clear()
        actual = comm.all_to_all(x)
        same(actual, np.repeat(100 * run + 10 * np.arange(comm.size) + comm.rank, num).astype("float32"))
    assert started == messages_of(comm, "all_to_all")
    comm.free()


@pytest.mark.sizes(4, 8)
@pytest.mark.parametrize("in_place", [True, False])
def test_arrays_are_as_they_were_where_ranks_of_other_nodes_call_something_else(between_nodes, in_place):
    comm = between_nodes
    x, out = np.full(6, 1.0 + comm.rank), np.full(6, -1.0)
    for op in ("sum", "max") * 2:
        comm.all_reduce(x.copy(), op=op, out=None if in_place else out)
    for odd in range(comm.size):
        out[:] = -1
        with pytest.raises(InputError, match="ranks disagree: rank 0 calls all_reduce"):
            comm.all_reduce(x, op="max" if comm.rank == odd else "sum", out=None if in_place else out)
        same(x, np.full(6, 1.0 + comm.rank))
        same(out, np.full(6, -1.0))
        same(comm.all_reduce(x.copy()), np.full(6, comm.size * (comm.size + 1) / 2))


def count_messages(comm, monkeypatch):
    """Record the destinations of the messages of programs from now on, in order, and separate comparisons."""
    started = []
    launch, compare = MessageProgram.launch, comm.dispatcher.comparator.compare

    def counting_launch(program, *args):
        started.extend(
            to for at, each in program.waits.items() if at < program.frame[ON_MISMATCH] for to in each.leaving
        )
        return launch(program, *args)

    def counting_compare(*args):
        started.append("comparison")
        compare(*args)

    monkeypatch.setattr(MessageProgram, "launch", counting_launch)
    monkeypatch.setattr(comm.dispatcher.comparator, "compare", counting_compare)
    return started


def carrying_algorithm(comm):
    """Return the algorithm whose messages compare calls, too."""
    return "leaders" if comm.topology.has_groups_in_nodes else "recursive_doubling"


def messages_of(comm, collective):
    """Return this rank's destinations in the schedule of the calls, each once per round."""
    row = algorithms.find(collective, carrying_algorithm(comm))
    rounds = row.rounds(comm.rank, comm.size, 0, comm.topology.nodes)
    return [to for moves in rounds for to in dict.fromkeys(m.to for m in moves if isinstance(m, Send))]


def check_that_both_are_named(comm, one, other):
    comm._array = comm.empty(8)
    for call in (one, other) * 2:
        call(comm)
    for odd in {0, comm.size - 1}:
        with pytest.raises(
            InputError, match=r"ranks disagree: rank 0 calls .*; make the same call on every rank"
        ) as caught:
            (other if comm.rank == odd else one)(comm)
        words = comm.mpi.allgather(str(caught.value))
        assert words == words[:1] * comm.size
        assert words[0].count("test_calls.py:") == 2
        one(comm)
        other(comm)


@pytest.mark.sizes(2, 3, 5, proof=(4, 6, 7, 8))
def test_a_rank_that_skips_a_repeated_call(comm):
    x = np.ones(4)
    for _ in range(3):
        comm.all_reduce(x)
        comm.barrier()
    with pytest.raises(InputError, match=r"rank 0 calls all_reduce.*rank 1 calls barrier"):
        comm.barrier() if comm.rank == 1 else comm.all_reduce(x)
    plan = comm.plan("broadcast", np.zeros(2), algorithm="binomial")
    if comm.rank == 0:
        plan()  # whose root does not wait for the others
    with pytest.raises(InputError, match=r"barrier.* #(\d+) .*: rank 1 skipped 1 earlier"):
        comm.barrier()
    if comm.rank:
        plan()


@pytest.mark.sizes(2)
def test_one_of_many_signatures_that_is_no_more_kept(comm, monkeypatch):
    from collectives.runtime import dispatch

    monkeypatch.setattr(dispatch, "MOST_BOUND", 4)
    comm.dispatcher.bound.clear()
    for _ in range(3):
        for count in range(1, 8):
            same(comm.all_reduce(np.ones(count)), np.full(count, float(comm.size)))
    assert len(comm.dispatcher.bound) == 4


def test_memory_is_bounded_by_the_number_of_signatures(comm):
    def usage():
        gc.collect()
        return sum(block.nbytes for block in comm.context.memory.of_host.blocks), len(comm.dispatcher.bound)

    sizes = []
    for _ in range(3):
        for count in range(1, 50):
            comm.all_reduce(np.ones(count, "int16"))
        sizes.append(usage())
    assert sizes[1] == sizes[2] == sizes[0]


def test_a_started_plan_goes_on_while_calls_are_made(comm):
    x, y = np.ones(50_000), np.ones(10)
    plan = comm.plan("all_reduce", x)
    comm.all_reduce(y.copy())
    plan.start()
    for _ in range(5):
        same(comm.all_reduce(y.copy()), np.full(10, float(comm.size)))
    plan.wait()
    same(x, np.full(50_000, float(comm.size)))


@pytest.mark.parametrize("again", [lambda work: work.start(), lambda work: work()], ids=["start", "run"])
def test_a_started_call_runs_once(comm, again):
    x = np.ones(10)
    work = comm.all_reduce(x, blocking=False)
    assert work.wait() is x
    with pytest.raises(RuntimeError, match="started as a call, which runs once: make a plan, to run it often"):
        again(work)
    same(comm.all_reduce(x), np.full(10, float(comm.size**2)))


@pytest.mark.sizes(2)
def test_polling_one_run_advances_others(comm):
    """Nobody else advances a long message in a node."""
    long, x = np.full(100_000, 1.0 + comm.rank), np.ones(3)
    plan = comm.plan("all_reduce", x)
    if comm.rank == 0:
        comm.send(long, 1)
        plan()
    else:
        message = comm.recv(long, 0, blocking=False)
        plan.start()
        while not plan.done():
            pass
        message.wait()
    same(long, np.ones(100_000))
    same(x, np.full(3, 2.0))


@pytest.mark.parametrize("again", [lambda plan: plan.start(), lambda plan: plan()], ids=["start", "run"])
def test_a_started_plan_is_waited_for_before_it_runs_again(comm, again):
    plan = comm.plan("all_reduce", np.ones(10))
    plan.start()
    comm.barrier()
    while plan.is_under_way:
        plan.advance()
    with pytest.raises(RuntimeError, match=r"all_reduce \w+ has been started: wait\(\) before the next start\(\)"):
        again(plan)
    plan.wait()
    same(plan(), np.full(10, float(comm.size**2)))
