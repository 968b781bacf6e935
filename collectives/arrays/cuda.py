"""CUDA devices through CuPy.

Streams and events are passed to CUDA as raw handles, so that other libraries' work as CuPy's do.  Each call runs with
the array's device current: the default stream belongs to the current device, and a thread that has set none would
create a context on device 0.  No stream becomes current: CuPy's `with stream` forgets one set by `use` before.

Source: NVIDIA, CUDA Runtime API, "Device Management", cudaIpcGetMemHandle: a handle stands for a whole allocation and
opens at its base; cudaIpcOpenMemHandle: peers must close the memory before its owner frees it, or the behaviour is
undefined; "Event Management", cudaStreamWaitEvent: the stream waits for the event's last record before the call, and
for nothing if the event was never recorded.
"""

import sys
import zlib
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import numpy as np

from collectives.arrays import cuda_kernels
from collectives.arrays.addresses import pointer
from collectives.arrays.device import Device, Event
from collectives.arrays.ops import Op
from collectives.job.cuda_aware import cuda_awareness

NOT_READY = 600  # cudaErrorNotReady


class Cuda(Device):
    """CuPy arrays of one device.  MPI is given pinned host memory, unless it is known to read device memory.

    Its memory and events can be shared with other processes of the node by handles.  Memory from `allocate` is freed
    with the object, which must not happen while another process has it open.  A shared event is recorded repeatedly, by
    `mark`.  Each of these may fail with an OSError, a RuntimeError or a MemoryError.
    """

    name = "cuda"
    is_async = True

    def __init__(self, index: int, mpi_reads: bool):
        import cupy

        self.device_name = f"cuda:{index}"
        self.xp, self.index, self.mpi_reads = cupy, index, mpi_reads
        self.runtime = cupy.cuda.runtime
        self.stream = stream(index)

    def on_device(self) -> Any:
        """Return a context in which the device is current."""
        return self.xp.cuda.Device(self.index)

    def empty(self, shape: int | tuple[int, ...], dtype: np.dtype) -> Any:
        with self.on_device():
            return self.xp.empty(shape, dtype)

    def host(self, nbytes: int) -> np.ndarray:
        with self.on_device():
            return np.frombuffer(self.xp.cuda.alloc_pinned_memory(nbytes), np.uint8, nbytes)

    def copy(self, target: Any, source: Any) -> None:
        if target.dtype != source.dtype:
            with self.on_device():
                cuda_kernels.cast(target, source, self.stream)
        elif target.nbytes:
            way = self.runtime.memcpyDefault  # direction by the addresses: host, this device or another
            with self.on_device():
                self.runtime.memcpyAsync(pointer(target), pointer(source), target.nbytes, way, self.stream.ptr)

    def reduce(self, op: str | Op, low: Any, high: Any, out: Any) -> None:
        assert isinstance(op, str)  # others are refused
        self.bind_reduction(op, out, [low, high], 1)()

    def bind_reduction(self, op: str, out: Any, sources: Sequence[Any], divisor: int) -> Callable[[], None]:
        """Bind the launch of out = (sources[0] op sources[1] op ...) / divisor, elementwise, to run it often."""
        with self.on_device():
            return partial(self.launch, cuda_kernels.bind_reduction(op, out, sources, divisor))

    def launch(self, work: cuda_kernels.Launch) -> None:
        with self.on_device():
            work(self.stream)

    def divide(self, x: Any, divisor: int) -> None:
        with self.on_device():
            cuda_kernels.divide(x, divisor, self.stream)

    def begin(self) -> None:
        with self.on_device():
            event = self.xp.cuda.Event(disable_timing=True)
            self.runtime.eventRecord(event.ptr, self.current_stream())
            self.runtime.streamWaitEvent(self.stream.ptr, event.ptr)

    def share_stream(self) -> Callable[[], None]:
        stream = self.xp.cuda.get_current_stream(self.index)

        def use() -> None:
            self.on_device().use()
            stream.use()

        return use

    def record(self) -> Event:
        with self.on_device():
            event = self.xp.cuda.Event(disable_timing=True)
            event.record(self.stream)
        return event

    def end(self, event: Any) -> None:
        with self.on_device():
            self.runtime.streamWaitEvent(self.current_stream(), event.ptr)

    def current_stream(self) -> int:
        """Return the handle of the caller's stream."""
        return self.xp.cuda.get_current_stream(self.index).ptr

    def synchronize(self) -> None:
        with self.on_device():
            self.stream.synchronize()

    def is_done(self, event: Any) -> bool:
        with self.on_device():
            status = self.runtime.eventQuery(event.ptr)
        return status != NOT_READY  # other errors surface in the next CUDA call

    def allocate(self, nbytes: int) -> Any:
        with self.on_device():
            return self.xp.cuda.Memory(nbytes)  # not from a pool: a handle is of a whole allocation

    def empty_caches(self) -> None:
        """Give the memory back that CuPy's pool and torch's hold, but no array uses."""
        with self.on_device():
            self.xp.get_default_memory_pool().free_all_blocks()
            torch = sys.modules.get("torch")
            if torch is not None and torch.cuda.is_initialized():
                torch.cuda.empty_cache()

    def export_memory(self, address: int) -> bytes:
        with self.on_device():
            return self.runtime.ipcGetMemHandle(address)

    def open_memory(self, handle: bytes) -> int:
        with self.on_device():
            return self.runtime.ipcOpenMemHandle(handle)

    def close_memory(self, address: int) -> None:
        with self.on_device():
            self.runtime.ipcCloseMemHandle(address)

    def borrow(self, address: int, count: int, dtype: np.dtype, owner: Any = None) -> Any:
        """Return the memory at an address as a flat array, which keeps `owner`."""
        cuda = self.xp.cuda
        memory = cuda.UnownedMemory(address, count * dtype.itemsize, owner, self.index)
        return self.xp.ndarray(count, dtype, cuda.MemoryPointer(memory, 0))

    def shared_event(self) -> Any:
        with self.on_device():
            return self.xp.cuda.Event(disable_timing=True, interprocess=True)

    def export_event(self, event: Any) -> bytes:
        return self.runtime.ipcGetEventHandle(event.ptr)

    def open_event(self, handle: bytes) -> "OpenedEvent":
        with self.on_device():
            return OpenedEvent(self.runtime.ipcOpenEventHandle(handle), self.runtime)

    def mark(self, event: Any) -> None:
        with self.on_device():
            self.runtime.eventRecord(event.ptr, self.stream.ptr)

    def wait_for(self, event: Any) -> None:
        with self.on_device():
            self.runtime.streamWaitEvent(self.stream.ptr, event.ptr)

    def identity(self) -> int:
        """Return a number that identifies this device on the machine."""
        return zlib.crc32(self.xp.cuda.Device(self.index).pci_bus_id.encode())


class TorchCuda(Cuda):
    """A CUDA device of torch tensors: the caller's stream is torch's current one."""

    def current_stream(self) -> int:
        import torch

        return torch.cuda.current_stream(self.index).cuda_stream

    def share_stream(self) -> Callable[[], None]:
        import torch

        return partial(torch.cuda.set_stream, torch.cuda.current_stream(self.index))


class OpenedEvent:
    """Another process's event, closed with the object."""

    def __init__(self, ptr: int, runtime: Any):
        self.ptr, self.runtime = ptr, runtime

    def __del__(self) -> None:
        self.runtime.eventDestroy(self.ptr)


@cache
def stream(index: int) -> Any:
    """Return the stream of collectives, the same for all libraries' arrays."""
    import cupy

    with cupy.cuda.Device(index):
        return cupy.cuda.Stream(non_blocking=True, priority=-5)  # the highest, as other ranks wait for it


@cache
def cuda(index: int, library: str = "cupy") -> Device:
    """Return the device of that index as a library's arrays are on it."""
    kind = TorchCuda if library == "torch" else Cuda
    return kind(index, cuda_awareness().is_used)
