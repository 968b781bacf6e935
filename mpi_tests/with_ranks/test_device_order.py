"""Order between streams, ranks and the host: a missing wait makes a test fail.

Streams lag unless a caller waits for them, and ranks read their results one after another.
"""

import gc
import time
from functools import partial

import numpy as np
import pytest
import torch

from collectives import Communicator
from collectives.arrays.cuda import TorchCuda
from mpi_tests.helpers.cuda_arrays import each_mode, to_tensor
from mpi_tests.helpers.reference import expected, inputs, reduced, same
from parallelism.buffers.tensor_collectives import ExposedTime
from parallelism.data.units import ShardGroups
from parallelism.zero.matrices import ElementRoute, Exchange
from parallelism.zero.sharded import Sharded

LATE_US = 20_000
DIRECT = ("one_shot", "two_shot", "staged_two_shot")


def in_turn(comm, get):
    """Get this rank's result in its turn, before any wait for the devices of later ranks."""
    for rank in range(comm.size):
        if comm.rank == rank:
            result = get()
        comm.mpi.Barrier()
    return result


def check_in_turn(comm, cuda, collective, x, **options):
    """Check three runs of a plan on new inputs, each ordered between earlier and later work on the caller's stream."""
    cuda.stream.synchronize()
    plan = comm.plan(collective, x, **options)
    cuda.lag(LATE_US)
    first = inputs(comm.size, x.size)
    for run in range(3):
        xs = [values + np.float32(run) for values in first]
        cuda.fill(x, xs[comm.rank])
        actual = plan()
        actual = in_turn(comm, lambda actual=actual: cuda.get(actual))
        same(actual, expected(collective, xs, comm.rank, options.get("op", "sum")), (collective, options, run))
    cuda.lag(0)
    plan.free()


@pytest.mark.sizes(3)
@pytest.mark.parametrize("index", [0, 1])
def test_direct(new_comm, cuda, index):
    cuda.use(index)
    for algorithm in DIRECT:
        x = cuda.symmetric(new_comm, np.zeros(40, np.float32))
        check_in_turn(new_comm, cuda, "all_reduce", x, algorithm=algorithm, op="avg")
    x = cuda.symmetric(new_comm, np.zeros(30, np.float32))
    check_in_turn(new_comm, cuda, "all_to_all", x, algorithm="direct")


@pytest.mark.sizes(2)
def test_direct_without_events(new_comm, cuda, monkeypatch):
    from collectives.arrays.cuda import Cuda

    def refuse(device, event):
        raise RuntimeError("handles of events are not supported")

    monkeypatch.setattr(Cuda, "export_event", refuse)
    x = cuda.symmetric(new_comm, np.zeros(40, np.float32))
    check_in_turn(new_comm, cuda, "all_reduce", x, algorithm="two_shot")


@pytest.mark.sizes(3)
@each_mode
@pytest.mark.parametrize("algorithm", ["ring", "recursive_doubling", "mpi"])
def test_messages(mpi_comm, cuda, mpi_reads, algorithm):
    cuda.use(1, mpi_reads=mpi_reads)
    if algorithm == "mpi" and not mpi_reads:
        return
    comm = Communicator(mpi_comm, segment_bytes=16)
    check_in_turn(comm, cuda, "all_reduce", cuda.put(np.zeros(40, np.float32)), algorithm=algorithm, op="avg")
    comm.free()


@pytest.mark.sizes(2)
@each_mode
def test_send_and_recv(new_comm, cuda, mpi_reads):
    cuda.use(1, mpi_reads=mpi_reads)
    for count in (10, 100_000):  # within the short-message envelope, and beyond it
        x, values = cuda.put(np.zeros(count, np.float32)), np.arange(count, dtype=np.float32)
        cuda.stream.synchronize()
        cuda.lag(LATE_US)
        if new_comm.rank == 0:
            new_comm.send(cuda.fill(x, values), 1)
            cuda.fill(x, -values)
        else:
            new_comm.recv(x, 0)
            same(cuda.get(x), values)
        cuda.lag(0)


@pytest.mark.sizes(2)
def test_plans_that_are_left_to_a_thread(new_comm, cuda):
    cuda.use(1)
    xs = inputs(2, 1000)
    arrays = [cuda.symmetric(new_comm, xs[new_comm.rank]), cuda.put(xs[new_comm.rank])]
    plans = [
        new_comm.plan("all_reduce", x, algorithm=name) for x, name in zip(arrays, ("two_shot", "ring"), strict=True)
    ]
    cuda.lag(LATE_US)
    for run in range(1, 4):
        for plan in plans:
            plan.start()
        for plan in reversed(plans):
            plan.wait()
        for x in arrays:
            actual = in_turn(new_comm, lambda x=x: cuda.get(x))
            same(actual, 2 ** (run - 1) * reduced(xs, "sum"))


@pytest.mark.sizes(2)
@each_mode
@pytest.mark.parametrize("algorithm", ["two_shot", "ring", "auto"])
def test_started_calls_do_not_wait_for_other_ranks(new_comm, cuda, algorithm, mpi_reads):
    """A thread binds each of them, after the work on the caller's stream."""
    cuda.use(1, mpi_reads=mpi_reads)
    xs, comm = inputs(2, 1000), new_comm
    arrays = [cuda.symmetric(comm, xs[comm.rank]) if algorithm == "two_shot" else cuda.put(xs[comm.rank])]
    arrays.append(cuda.put(xs[comm.rank]))
    cuda.stream.synchronize()
    cuda.lag(LATE_US)
    for run in range(3):
        for x in arrays:
            cuda.fill(x, xs[comm.rank] + np.float32(run))
        comm.mpi.Barrier()
        if comm.rank:
            comm.mpi.Barrier()
        works = [comm.all_reduce(arrays[0], algorithm=algorithm, blocking=False)]
        works.append(comm.all_gather(arrays[1], blocking=False))
        if comm.rank == 0:
            comm.mpi.Barrier()
        results = [work.wait() for work in works]
        args = [values + np.float32(run) for values in xs]
        for collective, result in zip(("all_reduce", "all_gather"), results, strict=True):
            actual = in_turn(comm, lambda result=result: cuda.get(result))
            same(actual, expected(collective, args, comm.rank), (run, collective))
            cuda.fill(result, actual * 0)


@pytest.mark.sizes(2)
@pytest.mark.parametrize("algorithm", ["two_shot", "ring"])
@pytest.mark.parametrize("make", ["call", "plan"])
def test_memory_of_a_run_that_nobody_waits_for_is_not_given_out_again(new_comm, cuda, algorithm, make):
    """Without a reference to the dropped array its memory would be that of the next one."""
    put = cuda.put if algorithm == "ring" else partial(cuda.symmetric, new_comm)
    progress = new_comm.context.progress
    cuda.lag(LATE_US)
    for run in range(3):
        x = put(np.ones(1 << 12, np.float32))
        address = x.data.ptr
        if make == "call":
            work = new_comm.all_reduce(x, algorithm=algorithm, blocking=False)
        else:
            work = new_comm.plan("all_reduce", x, algorithm=algorithm).start()
        del x, work
        while progress.started:
            time.sleep(1e-4)
        gc.collect()
        assert put(np.ones(1 << 12, np.float32)).data.ptr != address, run
        cuda.device.synchronize()
        progress.release_queued()
        assert not progress.queued


@pytest.mark.sizes(2)
def test_memory_that_is_given_out_again_is_read_no_more(new_comm, cuda):
    """The next plan reuses the staging buffers of a freed one at once."""
    xs = [inputs(2, 1000 + n) for n in range(8)]
    arrays = [cuda.put(values[new_comm.rank]) for values in xs]
    cuda.stream.synchronize()
    cuda.lag(10 * LATE_US)  # longer than it takes to bind a plan
    for x in arrays:
        new_comm.plan("all_reduce", x, algorithm="one_shot")()  # peers read its staging buffers until it completes
        gc.collect()
    for x, values in zip(arrays, xs, strict=True):
        same(in_turn(new_comm, lambda x=x: cuda.get(x)), reduced(values, "sum"))


@pytest.mark.sizes(2)
@pytest.mark.parametrize("num_segments", [1, 2, 3])
@pytest.mark.parametrize("algorithm", ["one_shot", "staged_two_shot"])
def test_runs_that_follow_each_other_at_once(new_comm, cuda, algorithm, num_segments, monkeypatch):
    """A run begins with the staging buffer that the previous run did not use last."""
    from collectives.runtime.backends import phases

    monkeypatch.setattr(phases, "DEVICE_BYTES", -(-60 * 4 // num_segments))
    xs, x = inputs(2, 120), cuda.put(np.zeros(120, np.float32))
    plan = new_comm.plan("all_reduce", x, algorithm=algorithm)
    for _ in range(3):
        cuda.lag(0)
        cuda.fill(x, xs[new_comm.rank])
        cuda.stream.synchronize()
        cuda.lag(LATE_US)
        for _ in range(4):
            plan()
        same(in_turn(new_comm, lambda: cuda.get(x)), 8 * reduced(xs, "sum"))


@pytest.mark.sizes(2)
def test_memory_is_closed_when_it_is_read_no_more(mpi_comm, cuda):
    comm = Communicator(mpi_comm)
    xs = inputs(2, 1000)
    x = cuda.symmetric(comm, xs[comm.rank])
    plan = comm.plan("all_reduce", x, algorithm="two_shot")
    cuda.stream.synchronize()
    cuda.lag(LATE_US)
    plan()
    plan.free()
    comm.free()
    same(cuda.get(x), reduced(xs, "sum"))


@pytest.mark.sizes(3)
def test_what_ranks_share_is_found_out(mpi_comm, cuda):
    cuda.lag(LATE_US)
    comm = Communicator(mpi_comm)
    x = cuda.symmetric(comm, np.ones(10, np.float32))
    same(cuda.get(comm.all_reduce(x, algorithm="two_shot")), np.full(10, 3, np.float32))
    comm.free()


@pytest.fixture
def plans(monkeypatch):
    """Collect the plans that are made of tensors on devices."""
    plans, own_plan = [], Communicator.plan

    def plan(comm, collective, x, **arguments):
        plans.append(own_plan(comm, collective, x, **arguments))
        return plans[-1]

    monkeypatch.setattr(Communicator, "plan", plan)
    monkeypatch.setattr("parallelism.buffers.arena.to_torch", to_tensor)
    monkeypatch.setattr("collectives.arrays.views.to_torch", to_tensor)
    return plans


def sharded(comm, zero_stage):
    module = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(2)))
    return Sharded(module, ShardGroups(comm, comm), None, zero_stage, ["0", "1"], device="cuda:0")


@pytest.mark.sizes(2)
@pytest.mark.parametrize("zero_stage", [0, 1])
def test_gradients_are_reduced_between_earlier_and_later_work_on_torchs_stream(
    new_comm, cuda, plans, zero_stage, monkeypatch
):
    """CuPy's current stream, on which nothing happens, is another one."""
    torchs = cuda.torchs_stream(monkeypatch)
    replica = sharded(new_comm, zero_stage).replica
    gradients = replica.arena.gradients.array
    own = slice(0, len(gradients)) if zero_stage == 0 else replica.units[0].chunks[new_comm.rank]
    cuda.stream.synchronize()
    cuda.lag(LATE_US)
    for run in range(3):
        xs = [np.full(len(gradients), rank + run, np.float32) for rank in range(2)]
        gradients.set(xs[new_comm.rank], torchs)
        replica.step_done()
        same(in_turn(new_comm, lambda: gradients[own].get(torchs)), reduced(xs, "avg")[own])


@pytest.mark.sizes(2)
@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_all_plans_of_training_follow_torchs_stream(new_comm, cuda, plans, zero_stage, monkeypatch):
    cuda.torchs_stream(monkeypatch)
    sharded(new_comm, zero_stage)
    Exchange(new_comm, [ElementRoute("matrix", 0, 1, 5)], torch.float32, "cuda:0", ExposedTime())
    assert len(plans) > 1
    assert {type(plan.device) for plan in plans} == {TorchCuda}
