"""Direct schedules as single kernels: each rank has a device, and devices wait for each other without the host."""

import gc

import numpy as np
import pytest

from collectives import Communicator, algorithms
from collectives.algorithms import Access
from collectives.arrays.cuda import Cuda
from collectives.runtime.backends.on_device import KernelProgram
from mpi_tests.helpers.cuda_arrays import to_tensor
from mpi_tests.helpers.reference import COLLECTIVES, REDUCTIONS, ROOTED, expected, inputs, reduced, same

pytestmark = pytest.mark.sizes(2, 3, proof=(4,))
DIRECT = [
    (row.collective, row.name)
    for row in algorithms.REGISTRY
    if row.access >= Access.STAGED and row.collective in COLLECTIVES
]


@pytest.fixture
def comm(mpi_comm, cuda):
    """Yield a communicator of ranks with one device each."""
    cuda.use(mpi_comm.rank)
    communicator = Communicator(mpi_comm)
    yield communicator
    gc.collect()
    communicator.free()


def symmetric(comm, cuda, values):
    return cuda.symmetric(comm, values)


def check_runs(comm, cuda, collective, algorithm, count, **options):
    first = inputs(comm.size, count)
    x = symmetric(comm, cuda, first[comm.rank])
    plan = comm.plan(collective, x, algorithm=algorithm, **options)
    assert [type(each) for each in plan.rounds] == [KernelProgram]
    for run in range(4):
        xs = [values + np.float32(run) for values in first]
        cuda.fill(x, xs[comm.rank])
        actual = plan()
        want = expected(collective, xs, comm.rank, **options)
        same(None if actual is None else cuda.get(actual), want, (collective, algorithm, count, run))
    plan.free()


@pytest.mark.sizes(2)
@pytest.mark.parametrize(("setting", "number"), [("", 32), ("2", 2), ("60000", None)])
def test_the_blocks_of_a_kernel(comm, cuda, monkeypatch, setting, number):
    """The default is 32, and at most as many as the device runs at once, as blocks wait for each other."""
    monkeypatch.setenv("COLLECTIVES_DEVICE_BLOCKS", setting)
    multiprocessors = cuda.cupy.cuda.Device(cuda.index).attributes["MultiProcessorCount"]
    xs = inputs(comm.size, 1 << 20)
    x = symmetric(comm, cuda, xs[comm.rank])
    plan = comm.plan("all_reduce", x, algorithm="two_shot_put")
    assert plan.rounds[0].kernel.num_blocks == min(number or multiprocessors, multiprocessors)
    same(cuda.get(plan()), reduced(xs, "sum"), setting)


@pytest.fixture
def on_one_device(monkeypatch):
    monkeypatch.setattr(Cuda, "identity", lambda device: 1)
    monkeypatch.setenv("COLLECTIVES_DEVICE_BARRIERS", "1")


@pytest.mark.sizes(2)
def test_ranks_on_one_device_divide_it(on_one_device, comm, cuda):
    """The limit is then the device's memory, not the links between devices."""
    multiprocessors = cuda.cupy.cuda.Device(cuda.index).attributes["MultiProcessorCount"]
    xs = inputs(comm.size, 1 << 22)
    x = symmetric(comm, cuda, xs[comm.rank])
    plan = comm.plan("all_reduce", x, algorithm="two_shot_put")
    assert plan.rounds[0].kernel.num_blocks == multiprocessors // 2
    same(cuda.get(plan()), reduced(xs, "sum"), "")


@pytest.mark.parametrize(("collective", "algorithm"), DIRECT)
@pytest.mark.sizes(3, proof=(2, 4))
def test_every_direct_algorithm(comm, cuda, collective, algorithm):
    for count in (0, comm.size, 700 * comm.size, *([700 * comm.size + 1] * (collective != "all_to_all"))):
        check_runs(comm, cuda, collective, algorithm, count)
    if collective in ROOTED:
        check_runs(comm, cuda, collective, algorithm, 10, root=comm.size - 1)
    if collective in REDUCTIONS:
        for op in ("avg", "max"):
            check_runs(comm, cuda, collective, algorithm, 10 * comm.size, op=op)


@pytest.mark.sizes(2)
def test_more_blocks_than_one_and_more_segments(comm, cuda, monkeypatch):
    """All blocks and segments must have arrived at a barrier before any continues."""
    from collectives.runtime.backends import phases

    monkeypatch.setattr(phases, "DEVICE_BYTES", 1 << 14)
    for algorithm in ("one_shot", "two_shot", "two_shot_put", "staged_two_shot"):
        check_runs(comm, cuda, "all_reduce", algorithm, 30_001)


@pytest.mark.sizes(2)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64", "int8", "complex64", "bool"])
def test_other_dtypes(comm, cuda, dtype):
    op = "max" if dtype == "bool" else "sum"
    xs = inputs(comm.size, 100, dtype, op)
    for algorithm in ("one_shot", "two_shot_put"):
        x = symmetric(comm, cuda, xs[comm.rank])
        same(cuda.get(comm.all_reduce(x, op=op, algorithm=algorithm)), reduced(xs, op))


@pytest.mark.sizes(3)
@pytest.mark.parametrize("passed", [(1 << 16) - 3, (1 << 32) - 3])
def test_the_numbers_of_barriers_wrap_around(comm, cuda, passed):
    """A flag has the lowest 16 bits of a barrier's number, and a channel counts 32."""
    x = symmetric(comm, cuda, np.zeros(1000, np.float32))
    plan = comm.plan("all_reduce", x, algorithm="two_shot_put")
    channel = plan.only.kernel.channel
    flags = cuda.device.borrow(int(channel.record["arrivals"]), 2 * comm.size, np.dtype(np.uint64))
    latest = [number % (1 << 16) for number in sorted((passed - 1, passed), key=lambda number: number % 2)]
    cuda.fill(flags, np.repeat(np.array(latest, np.uint64), comm.size))
    cuda.fill(channel.state, np.array([0, passed, 0], np.uint32))
    cuda.stream.synchronize()
    comm.mpi.Barrier()
    for run in range(6):
        xs = [values + np.float32(run) for values in inputs(comm.size, 1000)]
        cuda.fill(x, xs[comm.rank])
        same(cuda.get(plan()), reduced(xs, "sum"))
    assert channel.state.get()[1] % (1 << 16) < 100
    plan.free()


@pytest.mark.sizes(2)
def test_a_run_is_one_launch_and_no_wait_of_the_host(comm, cuda):
    xs = inputs(comm.size, 1000)
    x = symmetric(comm, cuda, xs[comm.rank])
    for algorithm in ("auto", "one_shot", "two_shot_put"):
        plan = comm.plan("all_reduce", x, algorithm=algorithm)
        cuda.stream.synchronize()
        before = cuda.library.standin_num_launches(b""), cuda.library.standin_num_waits()
        for _ in range(5):
            plan()
        after = cuda.library.standin_num_launches(b""), cuda.library.standin_num_waits()
        assert after == (before[0] + 5, before[1])
        plan.free()


@pytest.mark.sizes(2)
def test_a_graph_of_it_is_launched_again_and_again(comm, cuda):
    xs = inputs(comm.size, 1000)
    x = symmetric(comm, cuda, xs[comm.rank])
    plan = comm.plan("all_reduce", x, algorithm="one_shot")
    same(cuda.get(plan()), reduced(xs, "sum"))
    with cuda.cupy.cuda.Device(cuda.index):
        cuda.stream.begin_capture()
        plan()
        plan()
        graph = cuda.stream.end_capture()
        for run in range(3):
            cuda.fill(x, xs[comm.rank] + np.float32(run))
            graph.launch(cuda.stream)
            want = comm.size * reduced([values + np.float32(run) for values in xs], "sum")
            same(cuda.get(x), want)
    same(cuda.get(plan()), comm.size * want)
    plan.free()


@pytest.mark.sizes(2)
def test_runs_on_other_streams_follow_each_other(comm, cuda):
    xs = inputs(comm.size, 5000)
    x = symmetric(comm, cuda, xs[comm.rank])
    plan = comm.plan("all_reduce", x, algorithm="staged_two_shot")
    cuda.stream.synchronize()
    with cuda.cupy.cuda.Device(cuda.index):
        other = cuda.new_stream(cuda.index)
        plan()
        cuda.stream.use()
        plan()
        same(cuda.get(x), comm.size * reduced(xs, "sum"))
        other.synchronize()
    plan.free()


@pytest.mark.sizes(2)
def test_runs_on_tensors_follow_torchs_stream(comm, cuda, monkeypatch):
    """CuPy's current stream, on which nothing happens, is another one."""
    torchs, x = cuda.torchs_stream(monkeypatch), symmetric(comm, cuda, np.zeros(1000, np.float32))
    plan = comm.plan("all_reduce", to_tensor(x), algorithm="one_shot")
    assert [type(each) for each in plan.rounds] == [KernelProgram]
    cuda.stream.synchronize()
    cuda.lag(20_000)
    for run in range(3):
        xs = [values + np.float32(run) for values in inputs(2, 1000)]
        with cuda.cupy.cuda.Device(cuda.index):
            x.set(xs[comm.rank], torchs)
            plan()
            same(x.get(torchs), reduced(xs, "sum"))


@pytest.mark.sizes(2)
def test_started_runs_and_calls(comm, cuda):
    xs = inputs(comm.size, 300)
    x = symmetric(comm, cuda, xs[comm.rank])
    work = comm.all_reduce(x, blocking=False)
    work.wait()
    same(cuda.get(x), reduced(xs, "sum"))
    for _ in range(3):
        cuda.fill(x, xs[comm.rank])
        same(cuda.get(comm.all_reduce(x)), reduced(xs, "sum"))


@pytest.mark.sizes(2)
def test_ranks_that_share_a_device_are_ordered_by_the_hosts(mpi_comm, cuda, monkeypatch):
    for shared, stated, is_kernel in ((True, "", False), (True, "1", True), (False, "0", False)):
        monkeypatch.setenv("COLLECTIVES_DEVICE_BARRIERS", stated)
        cuda.use(0 if shared else mpi_comm.rank)
        comm = Communicator(mpi_comm)
        xs = inputs(comm.size, 300)
        x = symmetric(comm, cuda, xs[comm.rank])
        plan = comm.plan("all_reduce", x, algorithm="one_shot")
        assert isinstance(plan.rounds[0], KernelProgram) == is_kernel
        same(cuda.get(plan()), reduced(xs, "sum"))
        plan.free()
        del x, plan
        gc.collect()
        comm.free()
