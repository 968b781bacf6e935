"""Direct algorithms on devices: ranks access each other's device memory, ordered only by events."""

import gc
import threading
import time

import numpy as np
import pytest
import torch

from collectives import algorithms
from collectives.arrays import cuda_kernels, memory
from collectives.arrays.cuda import Cuda
from mpi_tests.helpers.cuda_arrays import NUM_DEVICES
from mpi_tests.helpers.ranks import IS_PROOF
from mpi_tests.helpers.reference import COLLECTIVES, REDUCTIONS, ROOTED, expected, inputs, ops_of, reduced, same

pytestmark = pytest.mark.sizes(1, 2, 3, proof=(4,))


@pytest.fixture
def comm(mpi_comm):
    """Yield a new communicator, as tests inspect its device memory."""
    from collectives import Communicator

    communicator = Communicator(mpi_comm)
    yield communicator
    gc.collect()
    communicator.free()


def symmetric(comm, cuda, values):
    return cuda.symmetric(comm, values)


def ordinary(comm, cuda, values):
    return cuda.put(values)


MEMORIES = (symmetric, ordinary)


def direct(collective, allocate=symmetric):
    """Return the names of the direct algorithms that can use arrays in this memory."""
    rows = algorithms.rows(collective)
    return [row.name for row in rows if row.access and (allocate is symmetric or row.access < algorithms.Access.DIRECT)]


def check_runs(comm, cuda, allocate, collective, algorithm, count, **arguments):
    """Run one plan on new inputs each time; only the caller's stream reads the results in between."""
    first = inputs(comm.size, count)
    x = allocate(comm, cuda, first[comm.rank])
    plan = comm.plan(collective, x, algorithm=algorithm, **arguments)
    for run in range(3):
        xs = [values + np.float32(run) for values in first]
        cuda.fill(x, xs[comm.rank])
        actual = plan()
        want = expected(collective, xs, comm.rank, **arguments)
        same(None if actual is None else cuda.get(actual), want, (collective, algorithm, allocate, count, run))
    plan.free()


def refuse(*args):
    raise RuntimeError("handles are not supported")


@pytest.mark.parametrize("shares_events", [True, False])
@pytest.mark.sizes(1, 3, proof=(2, 4))
def test_every_collective(comm, cuda, shares_events, monkeypatch):
    if not shares_events:
        monkeypatch.setattr(Cuda, "export_event", refuse)
    for collective in COLLECTIVES:
        for allocate in MEMORIES:
            for algorithm in [*direct(collective, allocate), "auto"]:
                for count in (0, 30 * comm.size):
                    check_runs(comm, cuda, allocate, collective, algorithm, count)


@pytest.mark.sizes(2, 3)
def test_a_device_each_while_another_is_current(comm, cuda):
    """Device 0 is current, and no thread creates a context there, except for the test's own work."""
    cuda.use(1 + comm.rank % (NUM_DEVICES - 1))
    comm.barrier()
    for collective in ("all_reduce", "all_to_all"):
        for allocate in MEMORIES:
            for algorithm in [*direct(collective, allocate), "auto"]:
                check_runs(comm, cuda, allocate, collective, algorithm, 30 * comm.size)
    check_runs(comm, cuda, ordinary, "all_reduce", "ring", 30 * comm.size)
    actual = comm.all_to_all(cuda.put(np.zeros(comm.size)))
    assert actual.device.id == cuda.index
    assert cuda.cupy.cuda.runtime.getDevice() == 0


@pytest.mark.sizes(2)
def test_no_context_is_made_on_other_devices(comm, cuda):
    cuda.use(2)
    cuda.library.standin_contexts()
    x = cuda.symmetric(comm, np.ones(1000, np.float32))
    plans = [comm.plan("all_reduce", x, algorithm=name) for name in ("two_shot", "ring")]
    for plan in plans:
        plan()
        plan.start()
        plan.wait()
    assert cuda.library.standin_contexts() == 1 << 2
    same(cuda.get(x), np.full(1000, 16, np.float32))


@pytest.mark.sizes(3)
def test_a_kernel_is_compiled_once_a_node(comm, cuda, monkeypatch, tmp_path):
    from cupy.cuda import compiler

    compiled, compile_program = [], compiler._NVRTCProgram.compile

    def counting_compile(program, *args):
        compiled.extend(program.name_expressions or ())
        return compile_program(program, *args)

    monkeypatch.setattr(compiler._NVRTCProgram, "compile", counting_compile)
    source = tmp_path / "new.cu"
    source.write_text(f"{cuda_kernels.SOURCE.read_text()}// {comm.mpi.bcast(time.time_ns())}")
    monkeypatch.setattr(cuda_kernels, "SOURCE", source)
    cuda_kernels.kernel.cache_clear()
    cuda_kernels.kernel("reduce<Max, float, float, 2>", 0)
    cuda_kernels.kernel.cache_clear()
    assert sum(comm.mpi.allgather(len(compiled))) == 1


@pytest.mark.sizes(2)
def test_the_callers_stream_stays_current(comm, cuda):
    current = cuda.cupy.cuda.get_current_stream
    x = cuda.symmetric(comm, np.ones(100, np.float32))
    for algorithm in ("ring", "two_shot"):
        comm.all_reduce(x, algorithm=algorithm)
        assert current() == cuda.stream
    with cuda.cupy.cuda.Stream(non_blocking=True) as other:
        comm.all_reduce(x)
        assert current() == other


@pytest.mark.sizes(2, 3)
def test_every_root_and_uneven_chunks(comm, cuda):
    for collective in ROOTED:
        for algorithm in direct(collective):
            for root in range(comm.size):
                check_runs(comm, cuda, symmetric, collective, algorithm, 5 * comm.size + 1, root=root)
    counts = [3 * rank for rank in range(comm.size)]
    xs = [np.arange(n) + 10.0 * rank for rank, n in enumerate(counts)]
    for allocate, name in ((symmetric, "direct"), (ordinary, "staged")):
        actual = comm.all_gather(allocate(comm, cuda, xs[comm.rank]), counts=counts, algorithm=name)
        same(cuda.get(actual), np.concatenate(xs), name)
        sends = [comm.rank + dest for dest in range(comm.size)]
        args = allocate(comm, cuda, np.full(sum(sends), float(comm.rank)))
        actual = comm.all_to_all(args, send_counts=sends, algorithm=name)
        want = [np.full(source + comm.rank, float(source)) for source in range(comm.size)]
        same(cuda.get(actual), np.concatenate(want), name)


@pytest.mark.sizes(3, proof=(2,))
def test_every_dtype_and_op(comm, cuda):
    for dtype in ("bfloat16", "float64", "int8", "bool", *(("float16", "uint16", "complex64") if IS_PROOF else ())):
        for number, op in enumerate(ops_of(dtype)):
            xs = inputs(comm.size, 3 * comm.size + 1, dtype, op)
            x = symmetric(comm, cuda, xs[comm.rank])
            for collective in REDUCTIONS if number == 0 or IS_PROOF else ("all_reduce",):  # the same kernels as others
                for name in direct(collective):
                    x[...] = cuda.put(xs[comm.rank])
                    actual = getattr(comm, collective)(x, op=op, algorithm=name)
                    want = expected(collective, xs, comm.rank, op).astype(complex)
                    np.testing.assert_allclose(cuda.get(actual).astype(complex), want, rtol=1e-6, err_msg=name)


@pytest.mark.sizes(3)
def test_16_bit_floats_are_rounded_once(comm, cuda):
    xs = [np.full(40, 1 + 2.0**-7 if rank == 0 else 2.0**-9).astype("bfloat16") for rank in range(comm.size)]
    want = sum(x.astype(np.float64) for x in xs).astype(xs[0].dtype)
    for name in direct("all_reduce"):
        if name != "hierarchical_direct":
            actual = comm.all_reduce(symmetric(comm, cuda, xs[comm.rank]), algorithm=name)
            same(cuda.get(actual), want, name)


@pytest.mark.sizes(2, 3)
@pytest.mark.parametrize("num_segments", [2, 3])
def test_segments_follow_each_other(comm, cuda, num_segments, monkeypatch):
    from collectives.runtime.backends import phases

    monkeypatch.setattr(phases, "DEVICE_BYTES", -(-60 * 4 // num_segments))
    for collective in COLLECTIVES:
        for algorithm in direct(collective):
            check_runs(comm, cuda, symmetric, collective, algorithm, 60 * comm.size)


@pytest.mark.sizes(4)
def test_over_nodes(mpi_comm, cuda, monkeypatch):
    """Algorithms are direct within nodes, and send messages from host memory between them."""
    from collectives import Communicator

    monkeypatch.setenv("COLLECTIVES_FAKE_NODES", "2x2")
    comm = Communicator(mpi_comm, segment_bytes=40)
    for collective in ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast"):
        for allocate in MEMORIES:
            check_runs(comm, cuda, allocate, collective, "hierarchical_direct", 30 * comm.size)
    comm.free()


@pytest.mark.sizes(2, 4)
def test_many_in_turn(comm, cuda):
    """Each rank waits for the plans in another order, while the caller's stream continues."""
    xs = [inputs(comm.size, n * comm.size) for n in (1, 7, 20)]
    kinds = [("all_reduce", "two_shot"), ("all_reduce", "one_shot"), ("all_to_all", "direct")]
    arrays = [symmetric(comm, cuda, x[comm.rank]) for x in xs]
    plans = [comm.plan(kind, x, algorithm=name) for (kind, name), x in zip(kinds, arrays, strict=True)]
    order = np.random.default_rng(comm.rank).permutation(3)
    for _ in range(3):
        for x, values in zip(arrays, xs, strict=True):
            cuda.fill(x, values[comm.rank])
        for i in range(3):
            plans[(i + comm.rank) % 3].start()
        for i in order:
            same(cuda.get(plans[i].wait()), expected(kinds[i][0], xs[i], comm.rank), kinds[i])


@pytest.mark.sizes(2)
def test_the_host_does_not_wait_for_the_device(comm, cuda):
    """When the call of a plan returns, the earlier work on the caller's stream is still pending."""
    xs = inputs(2, 64)
    x = symmetric(comm, cuda, xs[comm.rank])
    plan = comm.plan("all_reduce", x, algorithm="two_shot")
    gate, starts = threading.Event(), []
    cuda.stream.launch_host_func(lambda _: starts.append(gate.wait(60)), None)
    plan()
    plan()
    assert not starts
    gate.set()
    same(cuda.get(x), 2 * reduced(xs, "sum"))


def test_memory_is_reused_and_freed(comm, cuda, monkeypatch):
    """Peers close memory before its owner frees it; the stand-in reports violations."""
    library = cuda.library
    comm.empty(3, "float32", device="cuda")  # the first call determines what is shared
    gc.collect()
    own, opened = library.standin_num_allocations(), library.standin_num_opened_memory()
    x = comm.empty(1 << 20, "float32", device="cuda")
    there = x.data.ptr
    del x
    x = comm.empty(1 << 20, "float32", device="cuda")
    assert x.data.ptr == there
    del x
    gc.collect()
    monkeypatch.setattr(memory, "KEPT_BYTES", 0)
    comm.empty(1 << 21, "float32", device="cuda")  # no unused window fits: all of them are freed
    assert library.standin_num_allocations() == own
    assert library.standin_num_opened_memory() == opened == comm.size - 1


@pytest.mark.sizes(2)
def test_unused_windows_go_where_there_is_no_memory_else(comm, cuda, monkeypatch):
    from collectives import InputError

    x = comm.empty(1 << 20, "float32", device="cuda")
    del x
    gc.collect()
    cuda.cupy.get_default_memory_pool().free_all_blocks()
    most, allocate = cuda.library.standin_num_allocations(), Cuda.allocate

    def allocate_few(device, nbytes):
        if cuda.library.standin_num_allocations() >= most:
            raise MemoryError("out of memory")
        return allocate(device, nbytes)

    with monkeypatch.context() as patch:
        patch.setattr(Cuda, "allocate", allocate_few)
        x = comm.empty(1 << 21, "float32", device="cuda")
        with pytest.raises(InputError, match="out of memory"):
            comm.empty(1 << 21, "float32", device="cuda")
    same(cuda.get(comm.all_reduce(cuda.fill(x, np.ones(1 << 21, np.float32)))), np.full(1 << 21, 2, np.float32))


@pytest.mark.sizes(2)
def test_what_pools_hold_goes_where_there_is_no_memory_else(comm, cuda, monkeypatch):
    """Ranks share a device, whose memory is in the pools of one of them: all empty theirs before any tries again."""
    pool, allocate, empty_caches = cuda.cupy.get_default_memory_pool(), Cuda.allocate, Cuda.empty_caches
    emptied, attempts = [], []
    held = comm.empty(1, "int64")
    held[0] = 0
    everyones = comm.peers(held)
    comm.empty(3, "float32", device="cuda")  # the first call determines what is shared
    if comm.rank:
        cuda.cupy.empty(1 << 20)
        held[0] = pool.free_bytes()
        assert held[0]
    comm.mpi.Barrier()

    def empty_late(device):
        if comm.rank:
            time.sleep(0.05)
        empty_caches(device)
        held[0] = pool.free_bytes()

    def allocate_rest(device, nbytes):
        attempts.append(nbytes)
        if any(peer[0] for peer in everyones):
            raise MemoryError("out of memory")
        return allocate(device, nbytes)

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append("torch's"))
    monkeypatch.setattr(Cuda, "empty_caches", empty_late)
    monkeypatch.setattr(Cuda, "allocate", allocate_rest)
    x = comm.empty(1 << 21, "float32", device="cuda")
    assert emptied == ["torch's"]
    assert len(attempts) == 2
    same(cuda.get(comm.all_reduce(cuda.fill(x, np.ones(1 << 21, np.float32)))), np.full(1 << 21, 2, np.float32))


@pytest.mark.sizes(2)
def test_lengths_that_are_near_share_windows(comm, cuda, monkeypatch):
    """Unused windows are kept, with room for slightly longer arrays; small arrays share one."""
    allocated, allocate = [], Cuda.allocate
    comm.empty(3, "float32", device="cuda")
    monkeypatch.setattr(Cuda, "allocate", lambda device, nbytes: allocated.append(nbytes) or allocate(device, nbytes))
    for nbytes in (800_000, 804_000, 8_000_000, 800_000, 8_100_000):
        x = cuda.put(np.ones(nbytes // 4, np.float32))
        comm.plan("all_reduce", x, algorithm="staged_two_shot")()
        gc.collect()
    assert len(allocated) == 2
    allocated.clear()
    for count in range(10_000, 10_010):
        comm.all_reduce(cuda.put(np.ones(count, np.float32)), algorithm="staged_two_shot")
    assert len(allocated) <= 2  # one of buffers, and one of staging buffers


def test_a_communicator_closes_what_it_has_opened(mpi_comm, cuda):
    from collectives import Communicator

    library = cuda.library
    gc.collect()
    before = library.standin_num_opened_events(), library.standin_num_opened_memory(), library.standin_num_allocations()
    comm = Communicator(mpi_comm)
    comm.all_reduce(cuda.symmetric(comm, np.ones(100, np.float32)))
    comm.free()
    cuda.stream.synchronize()
    del comm
    gc.collect()
    now = library.standin_num_opened_events(), library.standin_num_opened_memory(), library.standin_num_allocations()
    assert now == before


def test_where_nothing_is_shared_arrays_go_by_messages(comm, cuda, capfd, monkeypatch):
    from collectives import InputError

    if comm.rank == comm.size - 1:
        monkeypatch.setattr(Cuda, "export_memory", refuse)
    xs = inputs(comm.size, 40)
    x = symmetric(comm, cuda, xs[comm.rank])
    for algorithm in ("ring", "auto", "auto"):
        cuda.fill(x, xs[comm.rank])
        same(cuda.get(comm.all_reduce(x, algorithm=algorithm)), reduced(xs, "sum"))
    with pytest.raises(InputError, match="'two_shot' needs arrays in host memory, or devices whose memory"):
        comm.all_reduce(x, algorithm="two_shot")
    lines = capfd.readouterr().err.splitlines()
    words = "CUDA IPC is unavailable; staging device arrays through host memory: "
    assert lines == [f"{words}rank {comm.size - 1}: handles are not supported"] * (comm.rank == 0)


@pytest.mark.sizes(2)
def test_memory_that_only_seems_shared_is_found_out(comm, cuda, capfd, monkeypatch):
    """The handle can be opened, but the memory has other contents."""
    wrong = cuda.cupy.cuda.Memory(1 << 21)
    monkeypatch.setattr(Cuda, "open_memory", lambda device, handle: wrong.ptr)
    monkeypatch.setattr(Cuda, "close_memory", lambda device, address: None)
    xs = inputs(2, 40)
    x = symmetric(comm, cuda, xs[comm.rank])
    same(cuda.get(comm.all_reduce(x)), reduced(xs, "sum"))
    assert ("other values" in capfd.readouterr().err) == (comm.rank == 0)
