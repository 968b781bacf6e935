"""Order between calls that a background thread runs and a device's work, with stand-ins for torch's streams."""

import threading
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from collectives.torch_backend import work

CUDA = torch.device("cuda:0")


class Event:
    """An event of a stream, completed by the test."""

    def __init__(self, name, streams):
        self.name, self.streams = name, streams

    def query(self):
        return self.streams.are_done


class Streams:
    """The current stream of each thread, and the requests to streams in order."""

    def __init__(self):
        self.requests, self.current, self.are_done = [], threading.local(), False

    def stream(self, name):
        requests = self.requests.append

        def record_event():
            requests(f"record on {name}")
            return Event(name, self)

        return SimpleNamespace(
            name=name,
            record_event=record_event,
            wait_event=lambda event: requests(f"{name} waits for the event of {event.name}"),
            synchronize=lambda: requests(f"synchronize {name}"),
        )

    @contextmanager
    def use(self, stream):
        self.current.stream = stream
        yield
        del self.current.stream


@pytest.fixture
def streams(monkeypatch):
    streams = Streams()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: streams.current.stream)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: streams.stream("own"))
    monkeypatch.setattr(torch.cuda, "stream", streams.use)
    monkeypatch.setattr(work, "Future", lambda devices: streams.requests.append(devices) or torch.futures.Future())
    return streams


class Tensor:
    """A tensor on a device; operations on it run on the thread's current stream."""

    is_cuda, device = True, CUDA

    def __init__(self, name, streams):
        self.name, self.streams = name, streams

    def record_stream(self, stream):
        self.streams.requests.append(f"{self.name} is used on {stream.name}")


def test_a_call_comes_after_its_callers_work_and_before_what_follows_its_end(streams):
    """No host waits for the device: a wait only blocks the caller's stream; continuations run on the call's stream."""

    def run(run_plan):
        assert threading.current_thread() is not threading.main_thread()
        streams.requests.append(f"run on {streams.current.stream.name}")
        run_plan(plan)

    plan = SimpleNamespace(begin=lambda: streams.requests.append("begin"), done=lambda: True)
    x, out, queue = Tensor("x", streams), Tensor("out", streams), work.CallQueue()
    with streams.use(streams.stream("caller's")):
        pending = work.Pending(run, [out], 60.0, [x])
    assert streams.requests == ["record on caller's", [CUDA]]
    pending.future.add_done_callback(lambda _: streams.requests.append(f"continue on {streams.current.stream.name}"))
    queue.add(pending)
    queue.end()
    assert streams.requests[2:] == [
        "own waits for the event of caller's",
        "run on own",
        "begin",
        "record on own",
        "out is used on own",
        "x is used on own",
        "continue on own",
    ]
    assert not pending.is_completed()
    streams.are_done = True
    assert pending.is_completed()
    with streams.use(streams.stream("another")):
        pending.wait()
    assert streams.requests[9:] == ["another waits for the event of own"]


@pytest.mark.parametrize("has_gaps", [True, False])
def test_a_message_ends_on_the_stream_of_who_sees_it_first_and_others_follow(streams, monkeypatch, has_gaps):
    monkeypatch.setattr(work, "RecvMessage", SimpleNamespace)
    plan = SimpleNamespace(rounds=[SimpleNamespace(peer=0)], wait=lambda limit_s: None, done=lambda: True)
    target = torch.zeros(4)[:: 1 + has_gaps]
    received = work.MessageWork(lambda *args, **named: plan, target, 0, 0, 60.0)
    received.packing.array.fill_(7)
    monkeypatch.setattr(work, "event_on", lambda device: streams.current.stream.record_event())
    with streams.use(streams.stream("first")):
        assert not received.is_completed()
    assert target.tolist() == [7] * len(target)
    target.zero_()
    with streams.use(streams.stream("second")):
        received.wait()
    assert target.tolist() == [0] * len(target)
    assert streams.requests == ["record on first", "second waits for the event of first"]


def test_tensors_of_the_cpu_have_no_streams(streams):
    pending = work.Pending(lambda run_plan: None, [torch.ones(1)], 60.0)
    pending.run()
    pending.set_future()
    assert pending.is_success()
    assert streams.requests == [None]
    assert pending.is_completed()
