"""A pytest plug-in: CuPy arrays for tests, on devices that mpi_tests.helpers.cuda_on_host emulates on the CPU."""

import os
from collections.abc import Iterator

import numpy as np
import pytest

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

    def lag(self, us):
        """Let streams lag by up to so many microseconds, except for work that a caller waits for."""
        self.library.standin_set_delay(us)


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
