"""What Cuda asks of CUDA, and in which order, by a stand-in for CuPy that notes it."""

import sys
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from collectives.arrays import cuda, views

OURS, CUPYS, TORCHS = 0x100, 0x200, 0x300  # streams


class Stream:
    """As CuPy's: current while it is entered."""

    ptr = OURS

    def __init__(self, non_blocking):
        assert non_blocking  # or it would wait for the default stream, and that for it

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass


class Runtime:
    """Notes what is called, and with what; hands out numbers."""

    memcpyDefault = 4  # noqa: N815  # as CuPy's

    def __init__(self):
        self.seen = []

    def __getattr__(self, name):
        def call(*given):
            self.seen.append((name, *given))
            return 0x5000

        return call


class Event:
    count = 0

    def __init__(self, disable_timing, interprocess=False):
        assert disable_timing
        Event.count += 1
        self.ptr, self.interprocess = Event.count, interprocess

    def record(self, stream):
        self.at = stream.ptr


class View:
    """Of a tensor's memory, as CuPy shows it."""

    device = SimpleNamespace(id=1)
    dtype = np.dtype("float32")
    flags = SimpleNamespace(c_contiguous=True)

    def reshape(self, *shape):
        return self


@pytest.fixture
def runtime(monkeypatch):
    """CUDA as the stand-in saw it."""
    runtime = Runtime()
    cupy = SimpleNamespace(
        cuda=SimpleNamespace(
            Device=lambda index: nullcontext(),
            Stream=Stream,
            Event=Event,
            runtime=runtime,
            get_current_stream=lambda index: SimpleNamespace(ptr=CUPYS + index),
            is_available=lambda: True,
        ),
        ndarray=View,
        from_dlpack=lambda tensor: View(),
    )
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda index: SimpleNamespace(cuda_stream=TORCHS + index))
    clear()
    yield runtime
    clear()


def clear():
    cuda.cuda.cache_clear()
    cuda.stream.cache_clear()


def a_tensor():
    tensor = SimpleNamespace(layout=torch.strided, dtype=torch.float32, is_cuda=True, device="cuda:1")
    tensor.is_contiguous = lambda: True
    tensor.detach = lambda: tensor
    tensor.view = lambda *shape: tensor
    return tensor


def test_the_library_of_an_array_says_whose_stream_is_followed(runtime):
    for flat, current in ((views.flat, CUPYS), (views.flat_torch, TORCHS)):
        device, _ = flat(View() if flat is views.flat else a_tensor())
        runtime.seen.clear()
        device.begin()
        begun = Event.count
        assert runtime.seen == [("eventRecord", begun, current + 1), ("streamWaitEvent", OURS, begun)]
        runtime.seen.clear()
        last = device.record()
        assert last.at == OURS
        device.end(last)
        assert runtime.seen == [("streamWaitEvent", current + 1, last.ptr)]
        assert device.place == "cuda:1"


def test_shared_events(runtime):
    device = views.device("cuda:1")
    own = device.shared_event()
    assert own.interprocess
    device.export_event(own)
    theirs = device.open_event(b"handle")
    device.mark(own)
    device.wait_for(theirs)
    assert runtime.seen == [
        ("ipcGetEventHandle", own.ptr),
        ("ipcOpenEventHandle", b"handle"),
        ("eventRecord", own.ptr, OURS),
        ("streamWaitEvent", OURS, 0x5000),
    ]
    del theirs
    assert runtime.seen[-1] == ("eventDestroy", 0x5000)


def test_copies_go_by_addresses(runtime):
    device = views.device("cuda:1")
    a, b = np.zeros(3), np.ones(3)
    device.copy(a, b)
    device.copy(a[:0], b[:0])
    assert runtime.seen == [("memcpyAsync", a.ctypes.data, b.ctypes.data, 24, 4, OURS)]
