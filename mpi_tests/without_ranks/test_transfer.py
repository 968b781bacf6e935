"""Asynchronous copies to and from a stand-in for a torch GPU."""

from types import SimpleNamespace

import pytest
import torch

from parallelism.buffers.transfer import Moment, Readback, to_device

GPU = "cuda:1"


@pytest.fixture
def events(monkeypatch):
    """Record the requests to the device in order."""
    events = []
    empty = torch.empty

    def pinned(shape, dtype, pin_memory):
        assert pin_memory
        copy = empty(shape, dtype=dtype)
        copy_ = copy.copy_
        copy.copy_ = lambda source, non_blocking: events.append(f"copy, {non_blocking=}") or copy_(source.value)
        return copy

    class Event:
        """An event of a device, with the time in milliseconds at which it is over."""

        def __init__(self, enable_timing):
            assert enable_timing
            self.ms = 100.0 + 7 * len(events)

        def record(self, stream):
            events.append(f"record on {stream}")

        def synchronize(self):
            events.append("wait for the event")

        def elapsed_time(self, end):
            return end.ms - self.ms

    monkeypatch.setattr(torch, "empty", pinned)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"the stream of {device}")
    return events


def test_numbers_of_a_gpu_are_copied_at_once_and_waited_for_when_they_are_read(events):
    x = SimpleNamespace(shape=(2,), dtype=torch.float64, device=GPU, is_cuda=True, value=torch.tensor([1.0, 2.0]))
    back = Readback(x)
    assert back.is_late
    assert events == ["copy, non_blocking=True", f"record on the stream of {GPU}"]
    assert back.read().tolist() == [1, 2]
    assert events[2:] == ["wait for the event"]


def test_numbers_of_the_host_are_there(events):
    x = torch.ones(3)
    back = Readback(x)
    assert back.read() is x
    assert not back.is_late
    assert events == []


def test_time_passes_between_moments_of_a_gpu_as_its_events_say(events):
    """The host may read the numbers of a step much later than they were there."""
    begin = Moment(GPU)
    end = Moment(GPU)
    assert end.since(begin) == 7e-3
    assert events == [f"record on the stream of {GPU}"] * 2


def test_time_passes_on_the_host(monkeypatch):
    monkeypatch.setattr("time.perf_counter", iter([3.0, 4.5]).__next__)
    begin = Moment("cpu")
    end = Moment("cpu")
    end.wait()
    assert end.since(begin) == 1.5


def test_a_tensor_leaves_from_pinned_memory():
    pinned = SimpleNamespace(to=lambda device, non_blocking: (device, non_blocking))
    assert to_device(SimpleNamespace(pin_memory=lambda: pinned), GPU) == (GPU, True)
    x = torch.ones(2)
    assert to_device(x, "cpu") is x
