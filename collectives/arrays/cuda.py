"""CUDA devices, by CuPy.

Streams and events are given to CUDA as it knows them, so that other libraries' are as good as CuPy's.

Source: NVIDIA, CUDA Runtime API, "Device Management", cudaIpcGetMemHandle: a handle is of a whole allocation, from its
base; cudaIpcOpenMemHandle: it is to be closed before the owner frees the memory, which else is undefined;
"Event Management", cudaStreamWaitEvent: what an event was last recorded after when it is called, nothing if never.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import numpy as np

from collectives.arrays import cuda_kernels
from collectives.arrays.device import Device, Event, SharingDevice
from collectives.arrays.views import pointer
from collectives.job import environment


class Cuda(SharingDevice):
    """CuPy arrays of one device.  MPI is given pinned host memory, unless it was shown to read device memory."""

    name = "cuda"

    def __init__(self, index: int, mpi_reads: bool):
        import cupy

        self.place = f"cuda:{index}"
        self.xp, self.index, self.mpi_reads = cupy, index, mpi_reads
        self.runtime = cupy.cuda.runtime
        self.stream = stream(index)

    @contextmanager
    def current(self) -> Iterator[None]:
        with self.xp.cuda.Device(self.index), self.stream:
            yield

    def empty(self, count: int, dtype: np.dtype) -> Any:
        with self.xp.cuda.Device(self.index):
            return self.xp.empty(count, dtype)

    def host(self, nbytes: int) -> np.ndarray:
        return np.frombuffer(self.xp.cuda.alloc_pinned_memory(nbytes), np.uint8, nbytes)

    def copy(self, target: Any, source: Any) -> None:
        if target.dtype != source.dtype:
            with self.current():
                cuda_kernels.cast(target, source)
        elif target.nbytes:
            way = self.runtime.memcpyDefault  # by the addresses: of the host, this device or another
            self.runtime.memcpyAsync(pointer(target), pointer(source), target.nbytes, way, self.stream.ptr)

    def fold(self, op: str, low: Any, high: Any, out: Any) -> None:
        with self.current():
            cuda_kernels.fold(op, out, [low, high])

    def folding(self, op: str, out: Any, sources: Sequence[Any], divisor: int) -> Callable[[], None]:
        with self.current():
            return partial(self.launch, cuda_kernels.folding(op, out, sources, divisor))

    def launch(self, work: cuda_kernels.Launch) -> None:
        with self.current():
            work()

    def divide(self, x: Any, divisor: int) -> None:
        with self.current():
            cuda_kernels.divide(x, divisor)

    def begin(self) -> None:
        with self.xp.cuda.Device(self.index):
            event = self.xp.cuda.Event(disable_timing=True)
            self.runtime.eventRecord(event.ptr, self.current_stream())
            self.runtime.streamWaitEvent(self.stream.ptr, event.ptr)

    def record(self) -> Event:
        with self.xp.cuda.Device(self.index):
            event = self.xp.cuda.Event(disable_timing=True)
            event.record(self.stream)
        return event

    def end(self, event: Any) -> None:
        self.runtime.streamWaitEvent(self.current_stream(), event.ptr)

    def current_stream(self) -> int:
        """Return the caller's stream, as CUDA knows it."""
        return self.xp.cuda.get_current_stream(self.index).ptr

    def synchronize(self) -> None:
        self.stream.synchronize()

    def allocate(self, nbytes: int) -> Any:
        with self.xp.cuda.Device(self.index):
            return self.xp.cuda.Memory(nbytes)  # no pool's: a handle is of a whole allocation

    def export_memory(self, address: int) -> bytes:
        return self.runtime.ipcGetMemHandle(address)

    def open_memory(self, handle: bytes) -> int:
        with self.xp.cuda.Device(self.index):
            return self.runtime.ipcOpenMemHandle(handle)

    def close_memory(self, address: int) -> None:
        with self.xp.cuda.Device(self.index):
            self.runtime.ipcCloseMemHandle(address)

    def at(self, address: int, count: int, dtype: np.dtype, owner: Any) -> Any:
        cuda = self.xp.cuda
        memory = cuda.UnownedMemory(address, count * dtype.itemsize, owner, self.index)
        return self.xp.ndarray(count, dtype, cuda.MemoryPointer(memory, 0))

    def shared_event(self) -> Any:
        with self.xp.cuda.Device(self.index):
            return self.xp.cuda.Event(disable_timing=True, interprocess=True)

    def export_event(self, event: Any) -> bytes:
        return self.runtime.ipcGetEventHandle(event.ptr)

    def open_event(self, handle: bytes) -> "OpenedEvent":
        with self.xp.cuda.Device(self.index):
            return OpenedEvent(self.runtime.ipcOpenEventHandle(handle), self.runtime)

    def mark(self, event: Any) -> None:
        self.runtime.eventRecord(event.ptr, self.stream.ptr)

    def wait_for(self, event: Any) -> None:
        self.runtime.streamWaitEvent(self.stream.ptr, event.ptr)


class TorchCuda(Cuda):
    """The same for tensors, whose caller's stream is torch's current one."""

    def current_stream(self) -> int:
        import torch

        return torch.cuda.current_stream(self.index).cuda_stream


class OpenedEvent:
    """Another process's event, given back with the object."""

    def __init__(self, ptr: int, runtime: Any):
        self.ptr, self.runtime = ptr, runtime

    def __del__(self) -> None:
        self.runtime.eventDestroy(self.ptr)


@cache
def stream(index: int) -> Any:
    """Return the stream of collectives, whichever library's arrays they are of."""
    import cupy

    with cupy.cuda.Device(index):
        return cupy.cuda.Stream(non_blocking=True)


@cache
def cuda(index: int, library: str = "cupy") -> Device:
    """Return the device of that index as a library's arrays are on it."""
    kind = TorchCuda if library == "torch" else Cuda
    return kind(index, environment.mpi_reads_device_memory())
