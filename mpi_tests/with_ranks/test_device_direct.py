"""Direct algorithms on devices: ranks that reach each other's device memory, ordered by events only."""

import gc

import numpy as np
import pytest

from collectives import algorithms
from mpi_tests.helpers.fake_device import FakeDevice, Forgetful
from mpi_tests.helpers.reference import COLLECTIVES, REDUCTIONS, ROOTED, expected, inputs, ops_of, reduced, same

pytestmark = pytest.mark.sizes(1, 2, 3, proof=(4,))


@pytest.fixture
def comm(mpi_comm):
    """One for each test: its device memory is that of the test's device."""
    from collectives import Communicator

    made = Communicator(mpi_comm)
    yield made
    gc.collect()
    made.free()


def symmetric(comm, device, values):
    return device.fill(comm._context.memory.empty(device, values.size, values.dtype), values)


def ordinary(comm, device, values):
    return device.put(values)


PLACES = (symmetric, ordinary)


def direct(collective, place=symmetric):
    """The names of the direct algorithms within reach of arrays that lie there."""
    rows = algorithms.rows(collective)
    return [row.name for row in rows if row.reach and (place is symmetric or row.reach < algorithms.Reach.ARRAYS)]


def check_runs(comm, device, place, collective, algorithm, count, **arguments):
    """Run one plan on new inputs each time, without a look at the results in between but by the caller's stream."""
    first = inputs(comm.size, count)
    x = place(comm, device, first[comm.rank])
    plan = comm.plan(collective, x, algorithm=algorithm, **arguments)
    for run in range(3):
        xs = [values + np.float32(run) for values in first]
        device.fill(x, xs[comm.rank])
        got = plan()
        want = expected(collective, xs, comm.rank, **arguments)
        same(None if got is None else device.get(got), want, (collective, algorithm, place, count, run))
    plan.free()


@pytest.mark.parametrize("shares", ["all", "memory"])
def test_every_collective(comm, shares):
    device = FakeDevice(shares=shares)
    for collective in COLLECTIVES:
        for place in PLACES:
            for algorithm in [*direct(collective, place), "auto"]:
                for count in (0, 30 * comm.size):
                    check_runs(comm, device, place, collective, algorithm, count)


@pytest.mark.sizes(2, 3)
def test_every_root_and_uneven_chunks(comm):
    device = FakeDevice()
    for collective in ROOTED:
        for algorithm in direct(collective):
            for root in range(comm.size):
                check_runs(comm, device, symmetric, collective, algorithm, 5 * comm.size + 1, root=root)
    counts = [3 * rank for rank in range(comm.size)]
    xs = [np.arange(n) + 10.0 * rank for rank, n in enumerate(counts)]
    for place, name in ((symmetric, "direct"), (ordinary, "staged")):
        got = comm.all_gather(place(comm, device, xs[comm.rank]), counts=counts, algorithm=name)
        same(device.get(got), np.concatenate(xs), name)
        sends = [comm.rank + dest for dest in range(comm.size)]
        given = place(comm, device, np.full(sum(sends), float(comm.rank)))
        got = comm.all_to_all(given, send_counts=sends, algorithm=name)
        want = [np.full(source + comm.rank, float(source)) for source in range(comm.size)]
        same(device.get(got), np.concatenate(want), name)


@pytest.mark.sizes(2, 3)
def test_every_dtype_and_op(comm):
    device = FakeDevice()
    for dtype in ("float16", "bfloat16", "float64", "int8", "uint16", "complex64", "bool"):
        for op in ops_of(dtype):
            xs = inputs(comm.size, 3 * comm.size + 1, dtype, op)
            for collective in REDUCTIONS:
                for name in direct(collective):
                    got = getattr(comm, collective)(symmetric(comm, device, xs[comm.rank]), op=op, algorithm=name)
                    want = expected(collective, xs, comm.rank, op).astype(complex)
                    np.testing.assert_allclose(device.get(got).astype(complex), want, rtol=1e-6, err_msg=name)


@pytest.mark.sizes(3)
def test_16_bit_floats_are_rounded_once(comm):
    device = FakeDevice()
    xs = [np.full(40, 1 + 2.0**-7 if rank == 0 else 2.0**-9).astype("bfloat16") for rank in range(comm.size)]
    want = sum(x.astype(np.float64) for x in xs).astype(xs[0].dtype)
    for name in direct("all_reduce"):
        if name != "hierarchical_direct":
            got = comm.all_reduce(symmetric(comm, device, xs[comm.rank]), algorithm=name)
            same(device.get(got), want, name)


@pytest.mark.sizes(2, 3)
@pytest.mark.parametrize("num_segments", [2, 3])
def test_segments_follow_each_other(comm, num_segments, monkeypatch):
    from collectives.runtime import phases

    monkeypatch.setattr(phases, "DEVICE_BYTES", -(-60 * 4 // num_segments))
    device = FakeDevice()
    for collective in COLLECTIVES:
        for algorithm in direct(collective):
            check_runs(comm, device, symmetric, collective, algorithm, 60 * comm.size)


@pytest.mark.sizes(4)
def test_over_nodes(mpi_comm, monkeypatch):
    """Direct in the nodes, and by messages from host memory between them."""
    from collectives import Communicator

    monkeypatch.setenv("COLLECTIVES_FAKE_NODES", "2x2")
    comm = Communicator(mpi_comm, segment_bytes=40)
    device = FakeDevice()
    for collective in ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast"):
        for place in PLACES:
            check_runs(comm, device, place, collective, "hierarchical_direct", 30 * comm.size)
    comm.free()


@pytest.mark.sizes(2, 4)
def test_many_in_turn(comm):
    """Plans that each rank waits for in another order, while the caller's stream goes on."""
    device = FakeDevice()
    xs = [inputs(comm.size, n * comm.size) for n in (1, 7, 20)]
    kinds = [("all_reduce", "two_shot"), ("all_reduce", "one_shot"), ("all_to_all", "direct")]
    arrays = [symmetric(comm, device, x[comm.rank]) for x in xs]
    plans = [comm.plan(kind, x, algorithm=name) for (kind, name), x in zip(kinds, arrays, strict=True)]
    order = np.random.default_rng(comm.rank).permutation(3)
    for _ in range(3):
        for x, values in zip(arrays, xs, strict=True):
            device.fill(x, values[comm.rank])
        for i in range(3):
            plans[(i + comm.rank) % 3].start()
        for i in order:
            same(device.get(plans[i].wait()), expected(kinds[i][0], xs[i], comm.rank), kinds[i])


@pytest.mark.sizes(2)
def test_the_host_does_not_wait_for_the_device(comm):
    """When a plan has been run, nothing of what the caller put on its stream has been done."""
    device = FakeDevice()
    xs = inputs(2, 64)
    x = symmetric(comm, device, xs[comm.rank])
    plan = comm.plan("all_reduce", x, algorithm="two_shot")
    device.synchronize()
    begun = []
    device.caller.launch(lambda: begun.append(1))
    plan()
    plan()
    assert not begun
    comm.mpi.Barrier()
    same(device.get(x), 2 * reduced(xs, "sum"))


def in_turn(comm, got):
    """Each rank's result, one rank after another: nobody's device has done more by then than it was asked to."""
    for rank in range(comm.size):
        if comm.rank == rank:
            yield got()
        comm.mpi.Barrier()


@pytest.mark.sizes(3)
@pytest.mark.parametrize("duty", ["begin", "end", "mark", "wait_for"])
@pytest.mark.parametrize("algorithm", ["one_shot", "two_shot", "staged_two_shot"])
def test_a_forgotten_duty_shows(comm, algorithm, duty):
    device = Forgetful(duty)
    xs = inputs(comm.size, 40)
    plan = comm.plan("all_reduce", symmetric(comm, device, xs[comm.rank]), op="avg", algorithm=algorithm)
    got = plan()
    (got,) = in_turn(comm, lambda: device.get(got))
    assert not all(comm.mpi.allgather(np.array_equal(got, reduced(xs, "avg"))))


@pytest.mark.sizes(3)
def test_nothing_forgotten_is_right(comm):
    """What the tests of forgotten duties do, without one forgotten."""
    device = FakeDevice()
    xs = inputs(comm.size, 40)
    for algorithm in ("one_shot", "two_shot", "staged_two_shot"):
        got = comm.plan("all_reduce", symmetric(comm, device, xs[comm.rank]), op="avg", algorithm=algorithm)()
        (got,) = in_turn(comm, lambda got=got: device.get(got))
        same(got, reduced(xs, "avg"))


@pytest.mark.sizes(2)
@pytest.mark.parametrize("shares", ["all", "memory"])
def test_a_forgotten_meeting_shows(comm, shares, monkeypatch):
    from collectives.runtime.on_device import Meeting

    device = FakeDevice(shares=shares)
    xs = inputs(2, 40)
    plan = comm.plan("all_reduce", symmetric(comm, device, xs[comm.rank]), algorithm="two_shot")
    monkeypatch.setattr(Meeting, "arrive", lambda self: iter(()))
    (got,) = in_turn(comm, lambda: device.get(plan()))
    assert not all(comm.mpi.allgather(np.array_equal(got, reduced(xs, "sum"))))


@pytest.mark.sizes(2)
def test_a_forgotten_offset_shows(comm, monkeypatch):
    """A handle is of a whole allocation, wherever an array lies in it."""
    from collectives.runtime import shared_memory

    device = FakeDevice()
    xs = inputs(2, 40)
    first, x = (symmetric(comm, device, xs[comm.rank]) for _ in range(2))
    assert device.export_memory(first.data.ptr) == device.export_memory(x.data.ptr)
    assert first.data.ptr != x.data.ptr
    window_of = comm._context.windows.window_of
    for forgets in (False, True):
        if forgets:
            monkeypatch.setattr(
                shared_memory, "address_of", lambda array: 0 if array is None else window_of(array).address
            )
        device.fill(first, np.zeros(40))
        device.fill(x, xs[comm.rank])
        got = device.get(comm.plan("all_reduce", x, algorithm="two_shot")())
        right = comm.mpi.allgather(np.array_equal(got, reduced(xs, "sum")))
        assert all(right) != forgets


def test_memory_is_reused_and_freed(comm):
    """Peers close what they have opened before its owner frees it: the fake fails where they don't."""
    device = FakeDevice()
    x = comm._context.memory.empty(device, 1 << 20, np.dtype("float32"))
    there = x.data.ptr
    del x
    assert comm._context.memory.empty(device, 1 << 20, np.dtype("float32")).data.ptr == there
    gc.collect()
    small = comm._context.memory.empty(device, 3, np.dtype("float32"))  # nothing that is unused fits: all of it goes
    assert len(device.allocations) == 1
    assert len(device.opened) == comm.size - 1
    comm._context.memory.of_device.close_windows([])
    assert small.memory.view(np.uint8).tolist() == [0x7F] * 12


def test_where_nothing_is_shared_arrays_go_by_messages(comm, capfd):
    from collectives import InputError

    device = FakeDevice(shares="nothing" if comm.rank == comm.size - 1 else "all")
    xs = inputs(comm.size, 40)
    x = symmetric(comm, device, xs[comm.rank])
    for algorithm in ("ring", "auto", "auto"):
        device.fill(x, xs[comm.rank])
        same(device.get(comm.all_reduce(x, algorithm=algorithm)), reduced(xs, "sum"))
    with pytest.raises(InputError, match="'two_shot' needs arrays in host memory, or devices whose memory"):
        comm.all_reduce(x, algorithm="two_shot")
    said = capfd.readouterr().err.splitlines()
    words = "CUDA IPC is unavailable; staging device arrays through host memory: "
    assert said == [f"{words}rank {comm.size - 1}: handles of memory are not supported"] * (comm.rank == 0)


class Strange(FakeDevice):
    """Opens memory that is not the owner's."""

    def open_memory(self, handle):
        self.mine = self.allocate(1 << 21)
        return self.mine.ptr

    def close_memory(self, address):
        del self.mine


@pytest.mark.sizes(2)
def test_memory_that_only_seems_shared_is_found_out(comm, capfd):
    """A handle is given and opened, but other numbers are there."""
    device = Strange()
    xs = inputs(2, 40)
    x = symmetric(comm, device, xs[comm.rank])
    same(device.get(comm.all_reduce(x)), reduced(xs, "sum"))
    assert ("other numbers" in capfd.readouterr().err) == (comm.rank == 0)
