import itertools

import numpy as np
import pytest

from collectives import algorithms
from collectives.schedule.moves import RecvReduce, Send
from mpi_tests.helpers.cuda_arrays import each_mode
from mpi_tests.helpers.reference import COLLECTIVES, IN_PLACE, algorithms_of, expected, inputs, mpi_reduces, reduced

pytestmark = pytest.mark.sizes(1, 2, 3, proof=(4, 7))

each_memory = pytest.mark.parametrize("mode", ["host", "staged", "read-by-mpi"])


def algorithms_on(cuda, collective, size, equal=True):
    direct = {row.name for row in algorithms.rows(collective) if row.access}
    names = [name for name in algorithms_of(collective, size, equal) if name not in direct]
    return [name for name in names if name != "mpi" or cuda.device.mpi_reads]


@each_mode
@pytest.mark.parametrize("segment_bytes", [8, 1 << 20])
@pytest.mark.sizes(1, 3, proof=(2, 4, 7))
def test_every_collective(mpi_comm, cuda, mpi_reads, segment_bytes):
    from collectives import Communicator

    comm = Communicator(mpi_comm, segment_bytes=segment_bytes)
    cuda.use(mpi_reads=mpi_reads)
    for collective in COLLECTIVES:
        for per_rank in (0, 1, 5):  # three segments of 8 bytes
            xs = inputs(comm.size, per_rank * comm.size)
            want = expected(collective, xs, comm.rank)
            for algorithm in algorithms_on(cuda, collective, comm.size):
                x = cuda.put(xs[comm.rank])
                y = getattr(comm, collective)(x, algorithm=algorithm)
                assert (y is x) == (collective in IN_PLACE)
                assert (y is want is None) or np.array_equal(cuda.get(y), want), (collective, per_rank, algorithm)
                assert y is x or np.array_equal(cuda.get(x), xs[comm.rank])
    comm.free()


@each_mode
def test_ops_dtypes_and_out(new_comm, cuda, mpi_reads):
    comm = new_comm
    cuda.use(mpi_reads=mpi_reads)
    for dtype in ("bfloat16", "float64"):
        for op in ("avg", "prod", "max"):
            xs = inputs(comm.size, 9, dtype, op)
            for algorithm in algorithms_on(cuda, "all_reduce", comm.size):
                if algorithm == "mpi" and not mpi_reduces(dtype, op):
                    continue
                x, out = cuda.put(xs[comm.rank].reshape(3, 3)), cuda.empty(9, xs[0].dtype).reshape(3, 3)
                assert comm.all_reduce(x, op=op, out=out, algorithm=algorithm) is out
                assert np.array_equal(cuda.get(out), reduced(xs, op).reshape(3, 3)), (dtype, op, algorithm)
                assert np.array_equal(cuda.get(x), xs[comm.rank].reshape(3, 3))


@each_mode
def test_uneven_counts_and_in_place(new_comm, cuda, mpi_reads):
    comm = new_comm
    cuda.use(mpi_reads=mpi_reads)
    counts = [(3 * rank + 1) % 4 for rank in range(comm.size)]
    ends = np.cumsum(counts)
    own = slice(ends[comm.rank] - counts[comm.rank], ends[comm.rank])
    xs = inputs(comm.size, sum(counts))
    for algorithm in algorithms_on(cuda, "reduce_scatter", comm.size):
        x = cuda.put(xs[comm.rank])
        actual = comm.reduce_scatter(x, out=x[own], counts=counts, op="avg", algorithm=algorithm)
        assert np.array_equal(cuda.get(actual), reduced(xs, "avg")[own]), algorithm
    for algorithm in algorithms_on(cuda, "all_gather", comm.size):
        out = cuda.put(np.where(np.isin(np.arange(sum(counts)), np.arange(sum(counts))[own]), xs[0], 0))
        comm.all_gather(out[own], out=out, counts=counts, algorithm=algorithm)
        assert np.array_equal(cuda.get(out), xs[0]), algorithm
    sends = [(comm.rank + dest) % 3 for dest in range(comm.size)]
    for algorithm in algorithms_on(cuda, "all_to_all", comm.size, equal=False):
        x = np.repeat(np.arange(comm.size) + 10.0 * comm.rank, sends)
        actual = comm.all_to_all(cuda.put(x), send_counts=sends, algorithm=algorithm)
        want = np.repeat(comm.rank + 10.0 * np.arange(comm.size), sends)  # a rank receives as many elements as it sends
        assert np.array_equal(cuda.get(actual), want), algorithm


@pytest.mark.sizes(1)
def test_a_plan_of_one_rank_has_no_work_for_its_device(comm, cuda):
    x = cuda.put(np.arange(5, dtype=np.float32))
    for op in ("sum", "avg"):
        plan = comm.plan("all_reduce", x, op=op)
        assert plan.start().wait() is x
        assert plan() is x
        assert plan.device_run == (0, None)
    assert cuda.get(x).tolist() == [0, 1, 2, 3, 4]


@each_mode
def test_a_plan_follows_the_callers_stream(mpi_comm, cuda, mpi_reads):
    from collectives import Communicator

    comm = Communicator(mpi_comm, segment_bytes=16)
    cuda.use(mpi_reads=mpi_reads)
    for algorithm in algorithms_on(cuda, "all_reduce", comm.size):
        xs = inputs(comm.size, 29)
        x = cuda.put(xs[comm.rank])
        plan = comm.plan("all_reduce", x, algorithm=algorithm)
        for _ in range(4):
            plan()
            xs = [2 * reduced(xs, "sum") - np.float32(rank) for rank in range(comm.size)]
            x *= 2
            x -= comm.rank
        assert np.array_equal(cuda.get(x), xs[comm.rank]), algorithm
        plan.free()
    comm.free()


@each_mode
def test_many_at_once(mpi_comm, cuda, mpi_reads):
    from collectives import Communicator

    comm = Communicator(mpi_comm, segment_bytes=16)
    cuda.use(mpi_reads=mpi_reads)
    xs = [inputs(comm.size, n * comm.size) for n in (1, 7, 20)]
    arrays = [cuda.put(x[comm.rank]) for x in xs]
    works = [comm.all_reduce(x, blocking=False) for x in arrays[:2]] + [comm.all_to_all(arrays[2], blocking=False)]
    for i in np.random.default_rng(comm.rank).permutation(3):
        want = expected("all_to_all" if i == 2 else "all_reduce", xs[i], comm.rank)
        assert np.array_equal(cuda.get(works[i].wait()), want)
    comm.free()


def test_calls_of_near_lengths_share_their_staging_buffers(new_comm, cuda, monkeypatch):
    """Calls share staging buffers of the host and of the device; a plan has its own."""
    comm = new_comm
    allocations = []
    host, empty = cuda.device.host, cuda.device.empty
    monkeypatch.setattr(cuda.device, "host", lambda nbytes: allocations.append(nbytes) or host(nbytes))
    monkeypatch.setattr(cuda.device, "empty", lambda count, dtype: allocations.append(count) or empty(count, dtype))

    def run(call, length):
        xs = inputs(comm.size, length)
        x = cuda.put(xs[comm.rank])
        call(x)
        assert np.array_equal(cuda.get(x), reduced(xs, "sum"))
        return len(allocations)

    def call(x):
        comm.all_reduce(x, algorithm="ring")

    first = run(call, 5000)
    assert [run(call, length) for length in (4990, 5001, 5010)] == [first] * 3
    assert (run(call, 50_000) > first) == (comm.size > 1)
    before = len(allocations)
    assert (run(lambda x: comm.plan("all_reduce", x, algorithm="ring")(), 5000) > before) == (comm.size > 1)


@each_mode
def test_send_and_recv(new_comm, cuda, mpi_reads):
    comm = new_comm
    cuda.use(mpi_reads=mpi_reads)
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    xs = inputs(comm.size, 100)
    x, actual = cuda.put(xs[comm.rank]), cuda.empty(100, "float32")
    if comm.size == 1:
        return
    for step in (comm.send, comm.recv) if comm.rank % 2 == 0 else (comm.recv, comm.send):
        step(*((x, right) if step == comm.send else (actual, left)))
    assert np.array_equal(cuda.get(actual), xs[left])


def after_a_round(comm, cuda, mode, values, moves):
    """Return three chunks of five elements after a round of moves in segments of two."""
    from collectives.arrays.views import host
    from collectives.runtime.backends.messages import RequestBinder
    from collectives.runtime.backends.vector import Vector
    from collectives.runtime.plan import Plan
    from collectives.runtime.progress import Progress

    device = host() if mode == "host" else cuda.use(mpi_reads=mode == "read-by-mpi").device
    x = values.copy() if mode == "host" else cuda.put(values)
    bound = RequestBinder(comm.mpi, 0, device, "sum", segment_bytes=8).bind(0, moves, Vector((x, [5, 5, 5])))
    Plan("round", x, Progress(oversubscribed=True), device, [bound])()
    return x if mode == "host" else cuda.get(x)


@pytest.mark.sizes(2)
@each_memory
def test_reductions_into_what_is_still_being_sent(comm, cuda, mode):
    """In one round, the runs of a Send and of a RecvReduce overlap, but are not equal."""
    a, b = inputs(2, 15)
    first, last = range(2), range(1, 3)
    moves = (Send(1, first), RecvReduce(1, last)) if comm.rank == 0 else (RecvReduce(0, first), Send(0, last))
    want = np.concatenate([a[:5], (a + b)[5:]]) if comm.rank == 0 else np.concatenate([(a + b)[:10], b[10:]])
    assert np.array_equal(after_a_round(comm, cuda, mode, (a, b)[comm.rank], moves), want)


@pytest.mark.sizes(2)
@each_memory
def test_two_reductions_from_one_rank(comm, cuda, mode):
    """A round has two messages of many segments between the same ranks."""
    a, b = inputs(2, 15)
    runs = range(2, 3), range(1)
    moves = tuple(Send(1, run) for run in runs) if comm.rank == 0 else tuple(RecvReduce(0, run) for run in runs)
    want = a if comm.rank == 0 else np.concatenate([(a + b)[:5], b[5:10], (a + b)[10:]])
    assert np.array_equal(after_a_round(comm, cuda, mode, (a, b)[comm.rank], moves), want)


@pytest.mark.sizes(2)
def test_segments_are_copied_while_others_travel(mpi_comm, cuda, monkeypatch):
    from collectives import Communicator
    from collectives.arrays.cuda import Cuda
    from collectives.runtime.backends import messages

    events, copies = [], itertools.count()
    copy, start, under_way = Cuda.copy, messages.Lane.start, messages.Messages

    def traced(device, target, source):
        number = next(copies)
        events.append(f"queue {number}")
        copy(device, target, source)
        device.stream.launch_host_func(lambda _: events.append(f"copy {number}"), None)

    cuda.lag(20_000)
    comm = Communicator(mpi_comm, segment_bytes=16)
    x = cuda.put(np.full(20, comm.rank, np.float32))
    plan = comm.plan("broadcast", x, algorithm="binomial")
    monkeypatch.setattr(Cuda, "copy", traced)
    monkeypatch.setattr(messages.Lane, "start", lambda lane, i: (start(lane, i), events.append(f"start {i}")))
    monkeypatch.setattr(messages, "Messages", lambda requests: (events.append("await"), under_way(requests))[1])
    actual = cuda.get(plan())
    comm.free()
    assert (actual == 0).all()
    if comm.rank == 0:
        # The copy of a segment is queued before the wait for the previous segment's message, and runs while that
        # travels; a message leaves before the next copy is complete.
        assert [word for word in events[:6] if "copy" not in word] == ["queue 0", "queue 1", "start 0", "start 1"]
        for i in range(5):
            assert events.index(f"queue {i}") < events.index(f"copy {i}") < events.index(f"start {i}")
        following = [word for i in (2, 3, 4) for word in ("await", f"queue {i}", f"start {i}")]
        assert [word for word in events if "copy" not in word][4:14] == [*following, "await"]


@pytest.mark.sizes(2)
def test_mpi_is_refused_what_it_cannot_read(new_comm, cuda):
    from collectives import InputError

    with pytest.raises(InputError, match="algorithm 'mpi' needs an MPI that reads cuda memory; use another algorithm"):
        new_comm.all_reduce(cuda.put(np.ones(3)), algorithm="mpi")
