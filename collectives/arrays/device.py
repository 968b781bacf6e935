"""Host and device memory behind one interface: the few operations in which they differ.

`Device` itself is NumPy's memory, `collectives.arrays.cuda.Cuda` a GPU's.
Everything above works on flat arrays, slices of them, and these operations.
"""

import ctypes
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from collectives.arrays.ops import COMPLEX, HALVES, INTEGERS, LOCATING, Op, has_kernel
from collectives.schedule.spec import OPS

DEVICE_ERRORS = (OSError, RuntimeError, MemoryError)  # CuPy's exceptions for CUDA errors
TURNS = 2  # staging buffers, and the events that go with them, are used in turn


class Event:
    """A point in the order of a device's work; on a synchronous device that is done by then."""

    def synchronize(self) -> None:
        """Wait until the work before it is done."""


DONE = Event()


def nothing() -> None:
    pass


class Device:
    """A kind of memory, and the operations on it; as it is here, the host's.

    `copy`, `reduce` and `divide` may return before they are done: they run in order on the device's
    stream.  Before the host, MPI or another process reads or overwrites an array, an event must have completed.
    """

    name = "cpu"  # of the kind of memory
    device_name = "cpu"  # name of this device
    xp: Any = np  # the array namespace: numpy or cupy
    is_async = False  # whether operations return early
    mpi_reads = True  # whether MPI may be given pointers into this memory

    def empty(self, shape: int | tuple[int, ...], dtype: np.dtype) -> Any:
        """Return a new array, uninitialised."""
        return self.xp.empty(shape, dtype)

    def borrow(self, address: int, count: int, dtype: np.dtype) -> Any:
        """Return memory of this process as a flat array that does not own it; the caller keeps it alive."""
        if not count:
            return np.empty(0, dtype)
        memory: Any = (ctypes.c_char * (count * dtype.itemsize)).from_address(address)
        return np.ndarray(count, dtype, memory)

    def host(self, nbytes: int) -> np.ndarray:
        """Return bytes of host memory for MPI to read and write in place of the device's."""
        return np.empty(nbytes, np.uint8)

    def copy(self, target: Any, source: Any) -> None:
        """Copy between two flat arrays of one length, each here or in `host` memory.

        If both are here they may have different float dtypes: numbers are rounded to nearest.
        """
        if target.dtype == source.dtype:
            np.copyto(target, source)
        else:
            with np.errstate(all="ignore"):
                np.copyto(target, source)

    def copy_pairs(self, pairs: Iterable[tuple[Any, Any]]) -> None:
        """Copy to each target from its source."""
        for target, source in pairs:
            self.copy(target, source)

    @np.errstate(all="ignore")  # NaN and infinity are results; as an error on one rank they would hang the others
    def reduce(self, op: str | Op, low: Any, high: Any, out: Any) -> None:
        """Compute out = low op high, elementwise; 16-bit floats are reduced in float32 and rounded once."""
        function: Any = op.function if isinstance(op, Op) else LOCATING.get(op) or getattr(self.xp, OPS[op].ufunc)
        if out.dtype in HALVES:
            out[...] = function(low.astype(np.float32), high.astype(np.float32)).astype(out.dtype)
        elif not has_kernel(op):
            out[...] = function(low, high)
        elif op == "prod" and out.dtype in COMPLEX:  # NumPy's rounding depends on the CPU: here, each operation once
            real = low.real * high.real - low.imag * high.imag
            out.imag = low.real * high.imag + low.imag * high.real
            out.real = real
        else:
            function(low, high, out=out)

    @np.errstate(all="ignore")
    def divide(self, x: Any, divisor: int) -> None:
        """Divide in place; 16-bit floats in float32, integers toward zero, as NCCL does."""
        if x.dtype in HALVES:
            x[...] = (x.astype(np.float32) / np.float32(divisor)).astype(x.dtype)
        elif x.dtype in INTEGERS:
            wide = x.astype(f"{x.dtype.kind}8", copy=False)  # wide enough for any divisor
            by = wide.dtype.type(divisor)
            x[...] = (wide - self.xp.fmod(wide, by)) // by
        else:
            parts = x.view(x.real.dtype)  # of complex numbers: rounded once each
            parts /= parts.dtype.type(divisor)

    def begin(self) -> None:
        """Order later work on the device's stream after the caller's current stream."""

    def share_stream(self) -> Callable[[], None]:
        """Return a function that makes the caller's current stream that of the thread which calls it."""
        return nothing

    def record(self) -> Event:
        """Return an event after all that is on the device's stream by now."""
        return DONE

    def end(self, event: Event) -> None:
        """Order the caller's current stream after an event."""

    def synchronize(self) -> None:
        """Wait until all that is on the device's stream by now is done."""

    def is_done(self, event: Any) -> bool:
        """Return whether the work before an event is done."""
        return True


class DeviceStep(NamedTuple):
    """A step of a device's program, by addresses: all of `outs` = sources[0] op sources[1] op ...

    Without outs, a barrier of the ranks.  From one source it is a copy.
    """

    outs: list[int]
    sources: list[int]
    nbytes: int


@cache
def host() -> Device:
    return Device()
