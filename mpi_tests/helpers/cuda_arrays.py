"""A pytest plug-in: CuPy arrays for tests, on devices that mpi_tests.helpers.cuda_on_host emulates on the CPU."""

import ctypes
import os
from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from mpi_tests.helpers.cuda_on_host.load import CannotLoadError, load

NUM_DEVICES = 4
LAG_US = 500  # longest lag by default

each_mode = pytest.mark.parametrize("mpi_reads", [False, True], ids=["staged", "read-by-mpi"])


class Caller:
    """A CuPy user with a current stream of its own on each device; `library` is the stand-in's C library."""

    def __init__(self, library):
        import cupy

        self.cupy, self.library, self.index = cupy, library, 0
        self.streams = [self.new_stream(index) for index in range(NUM_DEVICES)]

    def new_stream(self, index):
        with self.cupy.cuda.Device(index):
            stream = self.cupy.cuda.Stream(non_blocking=True)
            stream.use()
        return stream

    @property
    def stream(self):
        return self.streams[self.index]

    @property
    def device(self):
        """The current device object of the collectives."""
        from collectives.arrays import views

        return views.device(f"cuda:{self.index}")

    def use(self, index=0, mpi_reads=False):
        """Select the device of new arrays, and whether MPI receives device memory; returns this."""
        from collectives.arrays import cuda

        self.index = index
        os.environ["COLLECTIVES_CUDA_AWARE"] = str(int(mpi_reads))
        cuda.cuda.cache_clear()
        return self

    def put(self, values):
        """Return a new array, which this stream fills asynchronously."""
        with self.cupy.cuda.Device(self.index):
            x = self.cupy.empty(values.shape, values.dtype)
        return self.fill(x, values)

    def empty(self, shape, dtype):
        with self.cupy.cuda.Device(self.index):
            return self.cupy.empty(shape, dtype)

    def symmetric(self, comm, values):
        return self.fill(comm.empty(values.shape, values.dtype, device=f"cuda:{self.index}"), values)

    def fill(self, x, values):
        with self.cupy.cuda.Device(self.index):
            if x.size:
                x.set(np.array(values, order="C"), self.stream)
        return x

    def get(self, x):
        """Return an array's values after all work on this stream."""
        with self.cupy.cuda.Device(self.index):
            return x.get(self.stream)

    def torchs_stream(self, monkeypatch):
        """Return a new stream, which torch calls its current one on this device from now on."""
        with self.cupy.cuda.Device(self.index):
            stream = self.cupy.cuda.Stream(non_blocking=True)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda index: SimpleNamespace(cuda_stream=stream.ptr))
        return stream

    def lag(self, us):
        """Let streams lag by up to so many microseconds, except for work that a caller waits for."""
        self.library.standin_set_delay(us)


class DeviceTensor(torch.Tensor):
    """A tensor of the stand-in's memory that a torch without CUDA takes for one on a GPU.

    Torch's operations on it run at once, on the host.
    """

    is_cuda = True

    @property
    def array(self):
        """The same memory as a flat CuPy array."""
        import cupy

        with torch._C.DisableTorchFunctionSubclass():
            address, nbytes, dtype = self.data_ptr(), self.nbytes, str(self.dtype).removeprefix("torch.")
        if not nbytes:
            return cupy.empty(0, dtype)
        index = cupy.cuda.runtime.pointerGetAttributes(address).device
        memory = cupy.cuda.UnownedMemory(address, nbytes, self, index)
        return cupy.ndarray(self.numel(), dtype, cupy.cuda.MemoryPointer(memory, 0))

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()

    def __dlpack__(self, **options):
        return self.array.__dlpack__(**options)


def to_tensor(x):
    """Return a CuPy array as a tensor of the same memory, as `views.to_torch` does where torch has CUDA."""
    dtype, memory = getattr(torch, str(x.dtype)), (ctypes.c_char * x.nbytes).from_address(x.data.ptr)
    memory.owner = x
    tensor = torch.frombuffer(memory, dtype=dtype).view(x.shape) if x.nbytes else torch.empty(x.shape, dtype=dtype)
    return tensor.as_subclass(DeviceTensor)


@pytest.fixture
def cuda(monkeypatch) -> Iterator[Caller]:
    """Yield a CuPy user; skip the test without the stand-in, and fail it if CUDA was misused."""
    from collectives.arrays import cuda

    monkeypatch.setenv("CUDA_ON_HOST_DEVICES", str(NUM_DEVICES))
    monkeypatch.setenv("COLLECTIVES_CUDA_AWARE", "0")
    try:
        library = load()
    except CannotLoadError as error:
        pytest.skip(f"the stand-in for CUDA is not available: {error}")
    caller = Caller(library)
    caller.lag(LAG_US)
    yield caller.use()
    cuda.cuda.cache_clear()
    caller.cupy.cuda.Device(0).use()
    for index in range(NUM_DEVICES):
        with caller.cupy.cuda.Device(index):
            caller.cupy.cuda.Stream.null.use()
    assert library.standin_num_misuses() == 0
