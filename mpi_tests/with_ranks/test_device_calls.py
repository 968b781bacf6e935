"""Repeated calls on device arrays: the plan bound for the first call runs for arrays at any address."""

import gc
import threading
from functools import partial

import numpy as np
import pytest

from collectives import Communicator
from collectives.arrays.cuda import Cuda
from collectives.job.errors import InputError
from mpi_tests.helpers.cuda_arrays import each_mode, to_tensor
from mpi_tests.helpers.reference import COLLECTIVES, IN_PLACE, algorithms_of, expected, inputs, same

LATE_US = 5_000
CHECKS = (
    "arrays.views.check_dtype",
    "runtime.call.signature.flat",
    "runtime.call.call.flat",
    "runtime.call.call.Call.check",
)
pytestmark = pytest.mark.sizes(2, 3)


@pytest.fixture
def comm(mpi_comm):
    """Yield a new communicator, and free its device memory afterwards."""
    communicator = Communicator(mpi_comm)
    yield communicator
    gc.collect()
    communicator.free()


def refuse(*args, **named):
    raise AssertionError("a new call is checked, or agreed on")


def only_once(comm, monkeypatch):
    """Fail if the ranks agree on a new call from now on."""
    monkeypatch.setattr(comm.dispatcher, "resolve", refuse)


def names(cuda, collective, size):
    return [name for name in algorithms_of(collective, size) if name != "mpi" or cuda.device.mpi_reads]


@each_mode
@pytest.mark.parametrize("collective", [name for name in COLLECTIVES if name != "barrier"])
@pytest.mark.sizes(2, proof=(3,))
def test_later_calls_take_arrays_that_lie_elsewhere(comm, cuda, collective, mpi_reads, monkeypatch):
    cuda.use(mpi_reads=mpi_reads)
    for count in (0, 24 * comm.size):
        xs, references = inputs(comm.size, count), []
        for algorithm in ["auto", *names(cuda, collective, comm.size)]:
            with monkeypatch.context() as patch:
                for run in range(3):
                    if run == 1:
                        only_once(comm, patch)
                    args = [values + np.float32(run) for values in xs]
                    x = cuda.put(args[comm.rank])
                    actual = getattr(comm, collective)(x, algorithm=algorithm)
                    want = expected(collective, args, comm.rank)
                    assert (actual is want is None) or np.array_equal(cuda.get(actual), want), (algorithm, count, run)
                    if collective not in IN_PLACE:
                        same(cuda.get(x), args[comm.rank])
                    references.append((x, actual))  # so that the next arrays have other addresses


@each_mode
def test_later_calls_check_no_arguments(comm, cuda, mpi_reads, monkeypatch):
    cuda.use(mpi_reads=mpi_reads)
    count, size, references = 24 * comm.size, comm.size, []
    xs = inputs(size, count)
    at_home = cuda.symmetric(comm, np.zeros(count, np.float32))

    def calls():
        for collective in ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast"):
            want = expected(collective, xs, comm.rank)
            for x in (cuda.put(xs[comm.rank]), cuda.fill(at_home, xs[comm.rank])):
                outs = [None] if collective == "broadcast" else [None, cuda.empty(want.shape, want.dtype)]
                for out in outs:
                    named = {} if out is None else {"out": out}
                    yield (x, out), want, partial(getattr(comm, collective), cuda.fill(x, xs[comm.rank]), **named)

    for run in range(2):
        for arrays, want, call in calls():
            references.append(arrays)  # so that the next arrays have other addresses
            with monkeypatch.context() as patch:
                for name in CHECKS if run else ():
                    patch.setattr(f"collectives.{name}", refuse)
                actual = call()
            same(cuda.get(actual), want)


def test_results_land_in_whatever_array_is_passed(comm, cuda, monkeypatch):
    xs, out, references = inputs(comm.size, 24 * comm.size), None, []
    for collective in ("all_reduce", "reduce_scatter", "all_gather", "all_to_all"):
        with monkeypatch.context() as patch:
            for run in range(3):
                if run == 1:
                    only_once(comm, patch)
                args = [values + np.float32(run) for values in xs]
                want = expected(collective, args, comm.rank)
                x, out = cuda.put(args[comm.rank]), cuda.empty(want.shape, want.dtype)
                references.append(out)
                assert getattr(comm, collective)(x, out=out) is out
                same(cuda.get(out), want)
                same(cuda.get(x), args[comm.rank])


def test_calls_of_several_lengths_go_by_the_same_buffers_one_after_the_other(comm, cuda, monkeypatch):
    """A longer array follows, then shorter ones again; once all are bound, the host waits for no device."""

    def refuse(device):
        raise AssertionError("the host waits")

    cuda.lag(LATE_US)
    for run in range(3):
        if run == 1:
            monkeypatch.setattr(Cuda, "synchronize", refuse)
        arrays = []
        for count in (24, 2_000, 7, 100_000, 24, 2_000):
            args = [values + np.float32(run) for values in inputs(comm.size, count * comm.size)]
            x = cuda.put(args[comm.rank])
            arrays.append((x, args, comm.all_reduce(x), comm.reduce_scatter(x)))
        for x, args, total, part in arrays:
            sums = expected("all_reduce", args, comm.rank)
            same(cuda.get(x), sums)
            assert total is x
            same(cuda.get(part), np.split(sums * np.float32(comm.size), comm.size)[comm.rank])


def test_memory_that_is_freed_at_once_may_be_others(comm, cuda):
    """The caller frees memory right after a call, and its stream's pool allocates the next array there."""
    cuda.lag(LATE_US)
    for run in range(6):
        args = [values + np.float32(run) for values in inputs(comm.size, 5_000)]
        total = cuda.empty(5_000, np.float32)
        comm.all_reduce(cuda.put(args[comm.rank]), out=total)
        cuda.put(np.full(5_000, -1, np.float32))
        same(cuda.get(total), expected("all_reduce", args, comm.rank))


def test_symmetric_arrays_beside_ordinary_ones(comm, cuda):
    """Symmetric arrays are used on some ranks only, in repeated calls, and in turn with ordinary arrays on all."""
    at_home = [cuda.symmetric(comm, np.zeros(400, np.float32)) for _ in range(2)]
    for run in range(9):
        args = [values + np.float32(run) for values in inputs(comm.size, 400)]
        is_symmetric = run % 3 == 0 or (run % 3 == 1 and comm.rank == 0)
        x = cuda.fill(at_home[run // 6], args[comm.rank]) if is_symmetric else cuda.put(args[comm.rank])
        same(cuda.get(comm.all_reduce(x)), expected("all_reduce", args, comm.rank))
        gathered = comm.all_gather(x)
        same(cuda.get(gathered), np.tile(expected("all_reduce", args, comm.rank), comm.size))


def test_a_root_whose_arrays_are_all_symmetric(comm, cuda):
    """The other ranks, which have no result, use the same algorithm as the root."""
    x, out = (cuda.symmetric(comm, np.zeros(count, np.float32)) for count in (50, 50 * comm.size))
    for run in range(3):
        args = [np.full(50, rank + run, np.float32) for rank in range(comm.size)]
        comm.gather(cuda.fill(x, args[comm.rank]), out=out if comm.rank == 0 else None, algorithm="direct")
        if comm.rank == 0:
            same(cuda.get(out), np.concatenate(args))


def test_results_that_are_symmetric_on_some_ranks(comm, cuda):
    """No peer reads the symmetric `x` of a rank that works in its own buffers."""
    count = 50_000
    x, out = (cuda.symmetric(comm, np.zeros(n, np.float32)) for n in (count, count * comm.size))
    for run in range(3):
        args = [np.full(count, rank + run, np.float32) for rank in range(comm.size)]
        cuda.fill(x, args[comm.rank])
        own = out if comm.rank else cuda.empty(count * comm.size, np.float32)
        same(cuda.get(comm.all_gather(x, out=own)), np.concatenate(args))
    with pytest.raises(InputError, match="needs arrays from"):
        comm.all_gather(x, out=own, algorithm="direct")


def test_calls_by_another_thread_follow_its_stream(comm, cuda):
    """Like torch's backward thread, the thread's stream runs between two events of the caller's stream."""
    cuda.lag(LATE_US)
    own = cuda.cupy.cuda.Stream(non_blocking=True)
    for run in range(3):
        args = [values + np.float32(run) for values in inputs(comm.size, 3_000)]
        x = cuda.put(args[comm.rank])
        before = cuda.stream.record()

        def call(x=x, before=before):
            own.use()
            own.wait_event(before)
            comm.all_reduce(x)

        thread = threading.Thread(target=call)
        thread.start()
        thread.join()
        cuda.stream.wait_event(own.record())
        same(cuda.get(x), expected("all_reduce", args, comm.rank))


def test_uneven_chunks_of_ranks_that_have_little_and_much(comm, cuda, monkeypatch):
    counts = [1_000 * rank for rank in range(comm.size)]
    for run in range(3):
        if run == 1:
            only_once(comm, monkeypatch)
        parts = [np.full(count, rank + run, np.float32) for rank, count in enumerate(counts)]
        same(cuda.get(comm.all_gather(cuda.put(parts[comm.rank]), counts=counts)), np.concatenate(parts))


def test_a_root_that_has_more_than_the_others(comm, cuda):
    """Buffers grow on all ranks or on none."""
    for root, count in ((0, 1_000), (1, 1_000), (0, 3_000)):
        parts = [np.full(count, rank + root, np.float32) for rank in range(comm.size)]
        gathered = comm.gather(cuda.put(parts[comm.rank]), root=root)
        if comm.rank == root:
            same(cuda.get(gathered), np.concatenate(parts))
        x = cuda.put(np.ones(3 * count // 2, np.float32))
        same(cuda.get(comm.all_reduce(x)), np.full(3 * count // 2, comm.size, np.float32))


def test_calls_of_two_libraries_follow_the_streams_of_each(comm, cuda, monkeypatch):
    """A call on a torch array is ordered with torch's current stream, whichever library made the previous call."""
    cuda.lag(LATE_US)
    torchs = cuda.torchs_stream(monkeypatch)
    for run in range(4):
        args = [values + np.float32(run) for values in inputs(comm.size, 3_000)]
        x, caller = cuda.empty(3_000, np.float32), torchs if run % 2 else cuda.stream
        x.set(args[comm.rank], caller)
        comm.all_reduce(to_tensor(x) if run % 2 else x)
        same(x.get(caller), expected("all_reduce", args, comm.rank))


def test_devices_that_wait_for_each_other_take_arrays_from_anywhere(comm, cuda):
    """With one device per rank, a run is one kernel, with copies before and after it."""
    cuda.use(comm.rank)
    cuda.lag(LATE_US)
    for run in range(3):
        args = [values + np.float32(run) for values in inputs(comm.size, 3_000)]
        x = cuda.put(args[comm.rank])
        same(cuda.get(comm.all_reduce(x)), expected("all_reduce", args, comm.rank))
