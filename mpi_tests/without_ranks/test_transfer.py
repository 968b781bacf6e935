"""Asynchronous copies to and from a stand-in for a torch GPU."""

from types import SimpleNamespace

import pytest
import torch

from parallelism.buffers.transfer import Readback, to_device

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

    def current_stream(device):
        assert device == GPU
        return SimpleNamespace(record_event=lambda: events.append("record") or event)

    event = SimpleNamespace(synchronize=lambda: events.append("wait for the event"))
    monkeypatch.setattr(torch, "empty", pinned)
    monkeypatch.setattr(torch.cuda, "current_stream", current_stream)
    return events


def test_numbers_of_a_gpu_are_copied_at_once_and_waited_for_when_they_are_read(events):
    x = SimpleNamespace(shape=(2,), dtype=torch.float64, device=GPU, is_cuda=True, value=torch.tensor([1.0, 2.0]))
    back = Readback(x)
    assert back.is_late
    assert events == ["copy, non_blocking=True", "record"]
    assert back.ended_s == 0
    assert back.read().tolist() == [1, 2]
    assert events[2:] == ["wait for the event"]
    assert back.ended_s > 0


def test_numbers_of_the_host_are_there(events):
    x = torch.ones(3)
    back = Readback(x)
    assert back.read() is x
    assert not back.is_late
    assert events == []


def test_a_tensor_leaves_from_pinned_memory():
    pinned = SimpleNamespace(to=lambda device, non_blocking: (device, non_blocking))
    assert to_device(SimpleNamespace(pin_memory=lambda: pinned), GPU) == (GPU, True)
    x = torch.ones(2)
    assert to_device(x, "cpu") is x
