"""How calls that another thread runs stand among a device's work, with stand-ins for torch's streams."""

import threading
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from collectives.torch_backend import work

CUDA = torch.device("cuda:0")


class Streams:
    """Each thread's current stream, and what was asked of which, in order."""

    def __init__(self):
        self.asked, self.current = [], threading.local()

    def stream(self, name):
        asked = self.asked.append
        return SimpleNamespace(
            name=name,
            record_event=lambda: asked(f"record on {name}") or f"event of {name}",
            wait_event=lambda event: asked(f"{name} waits for {event}"),
            synchronize=lambda: asked(f"synchronize {name}"),
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
    monkeypatch.setattr(work, "Future", lambda devices: streams.asked.append(devices) or torch.futures.Future())
    return streams


def test_a_call_comes_after_its_callers_work_and_ends_with_its_own(streams):
    def run(run_plan):
        assert threading.current_thread() is not threading.main_thread()
        streams.asked.append(f"run on {streams.current.stream.name}")
        run_plan(plan)

    device = SimpleNamespace(is_async=True, synchronize=lambda: streams.asked.append("synchronize device"))
    plan = SimpleNamespace(device=device, begin=lambda: None, done=lambda: True, wait=lambda limit_s: None)
    tensor, queue = SimpleNamespace(is_cuda=True, device=CUDA), work.CallQueue()
    with streams.use(streams.stream("caller's")):
        pending = work.Pending(run, [tensor], 60.0)
    assert streams.asked == ["record on caller's", [CUDA]]
    queue.add(pending)
    pending.wait()
    queue.end()
    assert streams.asked[2:] == [
        "own waits for event of caller's",
        "run on own",
        "synchronize device",
        "synchronize own",
    ]
    assert pending.get_future().done()


def test_tensors_of_the_cpu_have_no_streams(streams):
    pending = work.Pending(lambda run_plan: None, [torch.ones(1)], 60.0)
    pending.run()
    assert pending.is_success()
    assert streams.asked == [None]
