"""Repeated calls on devices: ranks compare them at their barriers, without further communication.

Ranks that share a device have barriers on the host; with a device each, barriers are on the devices, and their hosts
learn of a mismatch later.
"""

import gc
import re

import numpy as np
import pytest

from collectives import Communicator
from collectives.job.errors import InputError
from collectives.runtime.agreement import Agreement
from collectives.runtime.backends.on_device import DeviceProgram, KernelProgram
from collectives.runtime.comparator import Comparator
from mpi_tests.helpers.reference import inputs, reduced, same

pytestmark = pytest.mark.sizes(2, 4)
HERE = r"\S*test_device_disagreement\.py:\d+"
SUM = "all_reduce(600 elements, float32, op=sum, algorithm=auto)"


class Ranks:
    """A communicator and its arrays, on one device or on one per rank, in symmetric memory or not."""

    def __init__(self, mpi_comm, cuda, barrier, memory):
        self.is_late = barrier == "on devices"
        self.cuda = cuda.use(mpi_comm.rank if self.is_late else 0)
        self.comm, self.memory = Communicator(mpi_comm), memory
        self.is_last = mpi_comm.rank == mpi_comm.size - 1
        self.x, self.shorter, self.whole = self.array(600), self.array(599), self.array(600, "int32")
        self.numbers = np.ones(7)

    def array(self, count, dtype="float32"):
        values = np.zeros(count, dtype)
        return self.cuda.symmetric(self.comm, values) if self.memory == "symmetric" else self.cuda.put(values)

    def sum(self):
        return self.comm.all_reduce(self.x)

    def check(self):
        """Check that a sum is correct."""
        xs = inputs(self.comm.size, 600)
        self.cuda.fill(self.x, xs[self.comm.rank])
        same(self.cuda.get(self.sum()), reduced(xs, "sum"))

    def look(self, call):
        """Make a call, wait for the device, and call again: the host then knows of a mismatch on the device."""
        call()
        self.cuda.stream.synchronize()
        self.sum()

    def look_on_the_host(self, call):
        """Make the call, then another in which the hosts synchronize."""
        call()
        self.comm.all_reduce(self.numbers)

    def refused(self, usual, odd, look=None):
        """Return the message that all ranks raise when the last one makes another call; both ran before."""
        for call in (usual, odd, lambda: self.comm.all_reduce(self.numbers), usual):
            call()
        with pytest.raises(InputError) as caught:
            (look or self.look)(odd if self.is_last else usual)
        texts = self.comm.mpi.allgather(str(caught.value))
        assert texts == texts[:1] * self.comm.size
        for _ in range(3):
            self.check()
        return texts[0]


@pytest.fixture
def ranks(mpi_comm, cuda, request):
    group = Ranks(mpi_comm, cuda, *request.param)
    yield group
    group.x = group.shorter = group.whole = None
    gc.collect()
    group.comm.free()


AT_HOME = ("on devices", "symmetric")
each_comparison = pytest.mark.parametrize(
    "ranks", [("on the host", "symmetric"), AT_HOME, ("on devices", "ordinary")], ids=" ".join, indirect=True
)
on_devices = pytest.mark.parametrize("ranks", [AT_HOME], ids=" ".join, indirect=True)


OTHERS = {
    "op": (lambda r: r.comm.all_reduce(r.x, op="max"), "all_reduce(600 elements, float32, op=max, algorithm=auto)"),
    "dtype": (lambda r: r.comm.all_reduce(r.whole), "all_reduce(600 elements, int32, op=sum, algorithm=auto)"),
    "count": (lambda r: r.comm.all_reduce(r.shorter), "all_reduce(599 elements, float32, op=sum, algorithm=auto)"),
    "collective": (lambda r: r.comm.broadcast(r.x), "broadcast(600 elements, float32, root=0, algorithm=auto)"),
    "algorithm": (
        lambda r: r.comm.all_reduce(r.x, algorithm="ring"),
        "all_reduce(600 elements, float32, op=sum, algorithm=ring)",
    ),
    "on the host": (lambda r: r.comm.all_reduce(r.numbers), "all_reduce(7 elements, float64, op=sum, algorithm=auto)"),
}


@each_comparison
def test_another_call_is_named_on_all_ranks(ranks):
    last = ranks.comm.size - 1
    for name, (odd, description) in OTHERS.items():
        hosts_compare = name in ("algorithm", "on the host")
        words = ranks.refused(ranks.sum, lambda odd=odd: odd(ranks), ranks.look_on_the_host if hosts_compare else None)
        number = re.search(r" #(\d+) ", words).group(1)
        one, two = (rf"{re.escape(side)} #{number} \({HERE}\)" for side in (SUM, description))
        expected = f"ranks disagree: rank 0 calls {one}, rank {last} calls {two}; make the same call on every rank"
        assert re.fullmatch(expected, words), name


@each_comparison
def test_a_skipped_call_is_named_on_all_ranks(ranks):
    """The test only increments the count, as a call without an answer from other ranks would."""

    def one_more():
        ranks.comm.context.calls.number += not ranks.is_last
        ranks.sum()

    words = ranks.refused(ranks.sum, ranks.sum, lambda call: ranks.look(one_more))
    number, fewer = (int(number) for number in re.findall(r" #(\d+) ", words))
    assert fewer + 1 == number
    assert words.endswith(
        f"rank {ranks.comm.size - 1} skipped 1 earlier; make the same sequence of calls on every rank"
    )


@each_comparison
def test_calls_that_one_rank_makes_for_the_first_time_or_wrongly_are_named(ranks):
    for op, words in (
        ("min", r"rank 0 calls all_reduce\(.* op=sum.* calls all_reduce\(.* op=min"),
        ("none", rf"rank {ranks.comm.size - 1}: all_reduce: .*none"),
    ):
        ranks.check()
        with pytest.raises(InputError, match=words):
            ranks.look(lambda op=op: ranks.comm.all_reduce(ranks.x, op=op if ranks.is_last else "sum"))
        ranks.check()


@on_devices
def test_symmetric_memory_on_some_ranks_only_is_named(ranks, cuda):
    """The devices detect it when it is too late to bind the call again."""
    elsewhere = cuda.put(np.zeros(600, np.float32))
    ranks.check()
    with pytest.raises(InputError, match=rf"{re.escape(SUM)} #\d+: arrays lie in symmetric memory at one address on"):
        ranks.look(lambda: ranks.comm.all_reduce(elsewhere if ranks.is_last else ranks.x))
    ranks.check()


@on_devices
def test_calls_that_a_graph_captures(ranks, cuda):
    """Other calls are compared as before, whichever ranks launch the graph."""
    ranks.check()
    with cuda.cupy.cuda.Device(cuda.index):
        cuda.stream.begin_capture()
        ranks.sum()
        graph = cuda.stream.end_capture()
        for run in range(3):
            xs = [x + np.float32(run) for x in inputs(ranks.comm.size, 600)]
            cuda.fill(ranks.x, xs[ranks.comm.rank])
            graph.launch(cuda.stream)
            same(cuda.get(ranks.x), reduced(xs, "sum"))
            ranks.check()
    ranks.refused(ranks.sum, lambda: ranks.comm.broadcast(ranks.x))


@on_devices
def test_a_graph_is_launched_at_any_time(ranks, cuda):
    """The launch is on another stream than a call, before it on some ranks and after it on others."""
    xs = inputs(ranks.comm.size, 599)
    ranks.check()
    ranks.comm.all_reduce(ranks.shorter)
    with cuda.cupy.cuda.Device(cuda.index):
        other = cuda.new_stream(cuda.index)
        cuda.stream.use()
        cuda.stream.begin_capture()
        ranks.sum()
        graph = cuda.stream.end_capture()
        cuda.fill(ranks.x, np.full(600, ranks.comm.rank + 1, np.float32))
        cuda.fill(ranks.shorter, xs[ranks.comm.rank])
        cuda.stream.synchronize()
        launches = [lambda: graph.launch(other), lambda: ranks.comm.all_reduce(ranks.shorter)]
        for launch in reversed(launches) if ranks.is_last else launches:
            launch()
        other.synchronize()
    same(cuda.get(ranks.x), np.full(600, sum(range(ranks.comm.size + 1)), np.float32))
    same(cuda.get(ranks.shorter), reduced(xs, "sum"))


@each_comparison
def test_a_call_again_is_compared_by_nothing_else(ranks, cuda, monkeypatch):
    """The comparison adds no messages or host rounds; with barriers on devices, a call is one launch."""

    def refuse(*args, **named):
        raise AssertionError("the hosts compare")

    ranks.check()
    ranks.check()
    cuda.stream.synchronize()
    monkeypatch.setattr(Comparator, "compare", refuse)
    monkeypatch.setattr(Agreement, "check", refuse)
    before = cuda.library.standin_num_launches(b""), cuda.library.standin_num_waits()
    for _ in range(5):
        ranks.sum()
    launches, waits = cuda.library.standin_num_launches(b""), cuda.library.standin_num_waits()
    monkeypatch.undo()
    assert waits == before[1]
    if ranks.is_late:
        assert launches == before[0] + 5
    bound = list(ranks.comm.dispatcher.bound_on_devices.values())[-1]
    assert isinstance(bound.compare.__self__, KernelProgram if ranks.is_late else DeviceProgram)
