"""Where arrays live: the few operations in which memories differ, behind one interface.

`Host` is NumPy's memory, `collectives.arrays.cuda.Cuda` a GPU's; tests have one that does nothing until it must.
Everything above works on flat arrays, slices of them, and these operations.
"""

import ctypes
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, NamedTuple, Protocol

import numpy as np

from collectives.arrays.views import COMPLEX, HALVES, INTEGERS, sum_dtype
from collectives.schedule.ops import OPS

TURNS = 2  # staging buffers, and the events that go with them, are used in turn


class Event(Protocol):
    """A place in the order of a device's work."""

    def synchronize(self) -> None:
        """Wait until the work before it is done."""


class Device:
    """A memory, and the operations on it.

    `copy`, `fold`, `fold_all` and `divide` may return before they are done: they run in order on the device's stream.
    Whatever the host, MPI or another process is to read, and whatever they may overwrite, waits for an event.
    """

    name: str  # of its kind
    place: str  # of this one
    xp: Any  # the array namespace: numpy or cupy
    is_async = False  # whether operations return early
    mpi_reads = True  # whether MPI may be given pointers into this memory

    def empty(self, count: int, dtype: np.dtype) -> Any:
        """Return a new flat array, uninitialised."""
        return self.xp.empty(count, dtype)

    def borrow(self, address: int, count: int, dtype: np.dtype) -> Any:
        """Return memory of this process as a flat array that does not keep it: who uses it knows that it is there."""
        if not count:
            return np.empty(0, dtype)
        memory: Any = (ctypes.c_char * (count * dtype.itemsize)).from_address(address)
        return np.ndarray(count, dtype, memory)

    def host(self, nbytes: int) -> np.ndarray:
        """Return bytes of host memory for MPI to read and write in place of the device's."""
        return np.empty(nbytes, np.uint8)

    def copy(self, target: Any, source: Any) -> None:
        """Copy between two flat arrays of one length, each here or in `host` memory.

        Two that are both here may be of two dtypes of floats: numbers are rounded to nearest.
        """
        if target.dtype == source.dtype:
            np.copyto(target, source)
        else:
            with np.errstate(all="ignore"):
                np.copyto(target, source)

    @np.errstate(all="ignore")  # NaN and infinity are results; as an error on one rank they would hang the others
    def fold(self, op: str, low: Any, high: Any, out: Any) -> None:
        """Compute out = low op high, elementwise; 16-bit floats are reduced in float32 and rounded once."""
        ufunc = getattr(self.xp, OPS[op].ufunc)
        if out.dtype in HALVES:
            out[...] = ufunc(low.astype(np.float32), high.astype(np.float32)).astype(out.dtype)
        elif op == "prod" and out.dtype in COMPLEX:  # NumPy's own rounds as the CPU can: here, each operation once
            real = low.real * high.real - low.imag * high.imag
            out.imag = low.real * high.imag + low.imag * high.real
            out.real = real
        else:
            ufunc(low, high, out=out)

    def folding(self, op: str, out: Any, sources: Sequence[Any], divisor: int) -> Callable[[], None]:
        """Bind `fold_all` once, to be done often."""
        return partial(self.fold_all, op, out, sources, divisor)

    @np.errstate(all="ignore")
    def fold_all(self, op: str, out: Any, sources: Sequence[Any], divisor: int) -> None:
        """Compute out = ((s0 op s1) op s2) op ... over `divisor`, elementwise; `out` may be one of the sources.

        16-bit floats are reduced in float32 and rounded once, at the end.
        """
        wide = sum_dtype(out.dtype, op)
        total = sources[0].astype(wide)
        for source in sources[1:]:
            Device.fold(self, op, total, source.astype(wide, copy=False), total)
        if divisor > 1:
            Device.divide(self, total, divisor)
        out[...] = total.astype(out.dtype, copy=False)

    @np.errstate(all="ignore")
    def divide(self, x: Any, divisor: int) -> None:
        """Divide in place; 16-bit floats in float32, integers toward zero, as NCCL does."""
        if x.dtype in HALVES:
            x[...] = (x.astype(np.float32) / np.float32(divisor)).astype(x.dtype)
        elif x.dtype in INTEGERS:
            wide = x.astype(f"{x.dtype.kind}8", copy=False)  # which any divisor fits into
            by = wide.dtype.type(divisor)
            x[...] = (wide - self.xp.fmod(wide, by)) // by
        else:
            parts = x.view(x.real.dtype)  # of complex numbers: rounded once each
            parts /= parts.dtype.type(divisor)

    def begin(self) -> None:
        """Order what follows on the device's stream after the caller's current stream."""

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


class Done:
    """The event of a device that works at once."""

    def synchronize(self) -> None:
        pass


DONE = Done()


class Host(Device):
    """NumPy arrays."""

    name = place = "cpu"
    xp = np


class DeviceStep(NamedTuple):
    """A part of a device's program, by addresses: all of `outs` = sources[0] op sources[1] op ...

    Without outs, a barrier of the ranks.  From one source it is a copy.
    """

    outs: list[int]
    sources: list[int]
    nbytes: int


class DeviceKernel(Protocol):
    """Steps that a device does by itself, again and again; `event` is after the latest run."""

    event: Event

    def launch(self, stream: int) -> None:
        """Run after what is on a stream by now, which is given as the device's library knows it."""


class SharingDevice(Device):
    """A device whose memory and events other processes of the node can be given, by handles.

    Each of these may be refused, with an OSError, a RuntimeError or a MemoryError.
    """

    is_async = True

    def allocate(self, nbytes: int) -> Any:
        """Allocate memory that can be exported, from its `ptr` on; it is freed with the object."""
        raise NotImplementedError

    def export_memory(self, address: int) -> bytes:
        """Return a handle of the allocation in which an address is: of its beginning, wherever that address is."""
        raise NotImplementedError

    def open_memory(self, handle: bytes) -> int:
        """Open another process's allocation; return its address here."""
        raise NotImplementedError

    def close_memory(self, address: int) -> None:
        """Give back what was opened.  The owner must not free it before."""
        raise NotImplementedError

    def at(self, address: int, count: int, dtype: np.dtype, owner: Any) -> Any:
        """Return the memory at an address as a flat array, which keeps `owner`."""
        raise NotImplementedError

    def borrow(self, address: int, count: int, dtype: np.dtype) -> Any:
        return self.at(address, count, dtype, None)

    def shared_event(self) -> Any:
        """Return an event that is recorded again and again, and that other processes can wait for."""
        raise NotImplementedError

    def export_event(self, event: Any) -> bytes:
        raise NotImplementedError

    def open_event(self, handle: bytes) -> Any:
        """Open another process's event."""
        raise NotImplementedError

    def mark(self, event: Any) -> None:
        """Record a shared event, after all that is on the device's stream by now."""
        raise NotImplementedError

    def wait_for(self, event: Any) -> None:
        """Order what follows on the device's stream after what an event was last recorded after."""
        raise NotImplementedError

    def identity(self) -> int:
        """A number of this very device, which no other of the machine has."""
        raise NotImplementedError

    def program(
        self,
        turns: Sequence[Sequence[DeviceStep]],
        fold: tuple[str, np.dtype, int],
        arrivals: int,
        signals: Sequence[int],
    ) -> DeviceKernel:
        """Steps and barriers that the device does by itself; `fold` is op, dtype and divisor.

        Runs are of the `turns` in turn.  At `arrivals`, in this rank's shared memory, all ranks write the numbers of
        barriers that they have come to; `signals` is where this rank writes its own, in each rank's memory.
        """
        raise NotImplementedError

    def streams(self) -> tuple[int, int]:
        """The caller's current stream, and the one that collectives are done on, as the device's library knows them."""
        raise NotImplementedError


@cache
def host() -> Host:
    return Host()
