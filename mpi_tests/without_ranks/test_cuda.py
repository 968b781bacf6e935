"""The order of Cuda's calls to CUDA, as visible in the contents of arrays."""

import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from collectives.arrays import addresses, cuda_kernels
from collectives.arrays import cuda as devices


@pytest.fixture
def device(cuda):
    cuda.use(1)
    cuda.lag(20_000)
    return cuda.device


def late(cuda, stream, value):
    """Return an array that a busy stream will fill later."""
    with cuda.cupy.cuda.Device(cuda.index):
        x = cuda.cupy.empty(1000, np.float32)
        cuda.cupy.cuda.Device().synchronize()
        x.set(np.full(1000, value, np.float32), stream)
    return x


@pytest.mark.parametrize("library", ["cupy", "torch"])
def test_the_library_of_an_array_says_whose_stream_is_followed(cuda, device, library, monkeypatch):
    """A call is ordered between earlier and later work on its stream of the array's device; device 0 is current."""
    with cuda.cupy.cuda.Device(1):
        torchs = cuda.cupy.cuda.Stream(non_blocking=True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda index: SimpleNamespace(cuda_stream={1: torchs.ptr}[index]))
    caller = cuda.stream if library == "cupy" else torchs
    device = devices.cuda(1, library)
    for value in range(5):
        x, y = late(cuda, caller, value), late(cuda, caller, -1)
        device.begin()
        device.copy(y, x)
        device.end(device.record())
        with cuda.cupy.cuda.Device(1):
            assert (y.get(caller) == value).all()


def test_the_default_stream_is_that_of_the_arrays_device(cuda, device):
    with cuda.cupy.cuda.Device(1):
        cuda.cupy.cuda.Stream.null.use()
    for value in range(5):
        x, y = late(cuda, cuda.cupy.cuda.Stream.null, value), late(cuda, cuda.cupy.cuda.Stream.null, -1)
        device.begin()
        device.copy(y, x)
        device.end(device.record())
        with cuda.cupy.cuda.Device(1):
            assert (y.get() == value).all()


def test_what_is_read_on_the_host_is_there_after_an_event(cuda, device):
    x, there = late(cuda, cuda.stream, 3), device.host(4000)
    device.begin()
    device.copy(there, addresses.as_bytes(x))
    device.record().synchronize()
    assert (there.view(np.float32) == 3).all()


def test_collectives_go_first_and_leave_room(device):
    """The stream has the highest priority, ignores default streams, and kernels use few blocks."""
    assert device.stream.priority == -5
    assert device.xp.cuda.runtime.streamGetFlags(device.stream.ptr) == device.xp.cuda.runtime.streamNonBlocking
    assert cuda_kernels.num_blocks(1 << 30, 1) == 4 * device.xp.cuda.Device(1).attributes["MultiProcessorCount"]


def test_a_setting_limits_the_blocks_of_reductions(cuda, device, monkeypatch):
    monkeypatch.setenv("COLLECTIVES_DEVICE_BLOCKS", "3")
    out, source = cuda.put(np.zeros(50_000, np.float32)), cuda.put(np.ones(50_000, np.float32))
    reduce = device.bind_reduction("sum", out, [source, source], 1)
    assert reduce.args[0].num_blocks == 3
    device.begin()
    reduce()
    device.end(device.record())
    assert (cuda.get(out) == 2).all()
    assert cuda_kernels.num_blocks(300, 1) == 2


def test_nothing_is_copied_of_empty_arrays(cuda, device):
    device.copy(cuda.put(np.zeros(0)), cuda.put(np.zeros(0)))
    device.synchronize()


def test_a_process_may_not_open_its_own_handles(device):
    memory = device.allocate(1 << 21)
    with pytest.raises(RuntimeError, match="invalid device context"):
        device.open_memory(device.export_memory(memory.ptr))


def test_a_handle_is_of_a_whole_allocation(device):
    memory = device.allocate(1 << 21)
    assert device.export_memory(memory.ptr + 512) == device.export_memory(memory.ptr)


def test_ranks_compile_an_instance_one_after_the_other_and_leave_one_file(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    try_lock = """if True:
        import fcntl, sys
        from unittest import mock
        from collectives.arrays import cuda_kernels
        lock = fcntl.lockf
        def lock_or_say(file, how, *bytes):
            try:
                lock(file, how | fcntl.LOCK_NB, *bytes)
            except BlockingIOError:
                print("waits")
        with mock.patch("fcntl.lockf", lock_or_say), cuda_kernels.once_per_node(sys.argv[1]):
            pass
    """
    with cuda_kernels.once_per_node("a"):
        tried = {
            name: subprocess.run([sys.executable, "-c", try_lock, name], capture_output=True, check=True).stdout
            for name in "ab"
        }
    assert tried == {"a": b"waits\n", "b": b""}
    (folder,) = tmp_path.iterdir()  # one that no other user can write
    assert len([*folder.iterdir()]) == 1


def test_an_instance_is_compiled_where_there_is_no_folder_for_the_lock(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with cuda_kernels.once_per_node("a"):
        pass
