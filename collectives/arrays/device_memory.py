"""Symmetric memory on devices: each rank's own allocation, which the other ranks of the node have opened.

A trial shows whether ranks can open it: containers and devices differ in what they allow.  Other arrays are not opened:
their owner may free them at any time, and memory from other libraries' pools may have no handle.  They go through
staging buffers.

Source: NVIDIA, CUDA Runtime API, "Device Management", cudaIpcOpenMemHandle and cudaIpcCloseMemHandle.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from collectives.arrays.cuda import Cuda
from collectives.arrays.device import DEVICE_ERRORS, TURNS
from collectives.arrays.memory import Lease, SymmetricMemory, Window, Windows, ranks_in
from collectives.job import environment
from collectives.job.errors import InputError
from collectives.job.launch import at_exit_with

SLAB_BYTES = 1 << 23  # blocks of up to a sixteenth of it share a window
ALLOCATION_BYTES = 1 << 21  # granularity of CUDA's allocations, each of which has one handle
HANDLE_BYTES = 64
MOST_RANKS = 64  # the most whose devices may wait for each other
PROBE = 0x5EED0000  # written by the first rank of a node; then one more by each


class Signals(NamedTuple):
    """Events that are recorded in turn: this rank's own, and those of each rank of the node."""

    own: list[Any]
    of: dict[int, list[Any]]


class DeviceMemory(SymmetricMemory):
    """Memory that the ranks of a communicator allocate together, each on its own device.

    `gather_rows` gives every rank's integers by rank.  If it is not available on a rank, `usable` is false on all, and
    `failure` gives the reason on that rank.
    """

    slab_bytes, lead_bytes = SLAB_BYTES, 0

    def __init__(
        self,
        comm: MPI.Comm,
        node: int,
        windows: Windows,
        agree_max: Callable[[list[int]], list[int]],
        gather_rows: Callable[[list[int]], np.ndarray],
        device: Cuda,
    ):
        super().__init__(comm, node, windows, agree_max)
        self.device, self.gather_rows = device, gather_rows
        self.ranks = ranks_in(comm, self.node_comm)
        self.me = self.node_comm.rank
        self.signals: Signals | None = None
        self.has_barriers = False  # whether devices may wait for each other
        self.num_sharing = 1  # ranks of the node on one device, at most
        self.failure = ""
        self.usable = self.probe()
        at_exit_with(self, leave)
        if self.usable:
            self.signals = self.make_signals()
            self.has_barriers = self.may_wait()

    def allocate(self, nbytes: int) -> Lease:
        """Allocate as on the host; no rank still reads memory that was released before."""
        self.device.synchronize()
        return super().allocate(nbytes)

    def array(self, lease: Lease, count: int, dtype: np.dtype) -> Any:
        """Return a flat array at the beginning of leased memory, which it keeps."""
        return self.device.borrow(lease.address, count, dtype, lease)

    def make_window(self, key: int, nbytes: int) -> Window:
        """Make a window for every rank of the node.  Collective.

        Where a rank is refused memory, all empty the caches of their array libraries, as ranks may share a device, and
        it tries again.

        Raises: InputError on every rank where one is refused memory or a handle; `failure` then gives the reason.
        """
        nbytes = -(-nbytes // ALLOCATION_BYTES) * ALLOCATION_BYTES
        own, handle, failure = self.exportable(nbytes)
        if self.on_any(failure):
            self.device.empty_caches()
            self.agree_max([0])  # all have
            if failure:
                own, handle, failure = self.exportable(nbytes)
        bases, failure = self.open_all(handle, self.device.open_memory, failure)
        window = Window(key, own.ptr if own else 0, nbytes, bases, own)
        if self.on_any(failure):
            self.close_windows([window])
            raise InputError(f"no {nbytes >> 20} MiB of device memory that ranks share: {self.first_failure(failure)}")
        bases[self.world_ranks[self.me]] = window.address
        return window

    def exportable(self, nbytes: int) -> tuple[Any, bytes, str]:
        """Return new memory of this rank and its handle, and an error, "" for none."""
        own, handle = None, b""
        try:
            own = self.device.allocate(nbytes)
            handle = self.device.export_memory(own.ptr)
        except DEVICE_ERRORS as error:
            return own, handle, one_line(error)
        return own, handle, ""

    def on_any(self, failure: str) -> bool:
        """Return whether a rank has a failure.  Collective."""
        self.failure = failure
        return bool(self.agree_max([bool(failure)])[0])

    def open_all(self, handle: bytes, open_one: Callable[[bytes], Any], failure: str) -> tuple[dict[int, Any], str]:
        """Open the handles of the node's other ranks; return the results by world rank, and an error.  Collective."""
        rows = self.gather_rows([len(handle), *np.frombuffer(handle.ljust(HANDLE_BYTES, b"\0"), np.int64).tolist()])
        remote_objects = {}
        for rank, world in zip(self.ranks, self.world_ranks, strict=True):
            length, *words = rows[rank].tolist()
            if length and rank != self.ranks[self.me] and not failure:
                try:
                    remote_objects[world] = open_one(np.array(words, np.int64).tobytes()[:length])
                except DEVICE_ERRORS as error:
                    failure = one_line(error)
        return remote_objects, failure

    def close_windows(self, windows: list[Window]) -> None:
        """Close the other ranks' memory on every rank, before any frees its own.  Collective."""
        self.device.synchronize()
        for window in windows:
            for address in window.bases.values():
                if address != window.address:
                    self.device.close_memory(address)
        self.agree_max([0])

    def free(self) -> None:
        """Close the other ranks' memory; this rank's is freed when no array uses it any more.  Collective."""
        self.usable = False
        super().free()

    def probe(self) -> bool:
        """Return whether each rank of each node reads the others' writes.  Collective."""
        try:
            window = self.make_window(0, ALLOCATION_BYTES)
        except InputError:
            return False
        failure = attempt(lambda: self.write(window.address, PROBE + self.me))
        self.agree_max([0])
        failure = failure or attempt(lambda: self.compare(window))
        failed = self.on_any(failure)
        self.close_windows([window])
        return not failed

    def write(self, address: int, number: int) -> None:
        buffer = self.device.host(8)
        buffer.view(np.int64)[0] = number
        self.device.copy(self.device.borrow(address, 8, buffer.dtype), buffer)
        self.device.synchronize()

    def compare(self, window: Window) -> None:
        buffer = self.device.host(8)
        for nth, world in enumerate(self.world_ranks):
            self.device.copy(buffer, self.device.borrow(window.bases[world], 8, buffer.dtype))
            self.device.synchronize()
            if buffer.view(np.int64)[0] != PROBE + nth:
                raise OSError(f"a peer reads other values than the owner wrote in memory of {self.device.device_name}")

    def may_wait(self) -> bool:
        """Return whether the node's devices may wait for each other: none runs another rank's work.  Collective."""
        stated = environment.device_barriers()
        rows = self.gather_rows([self.device.identity()])
        devices = [int(rows[rank][0]) for rank in self.ranks]
        self.num_sharing = max(map(devices.count, devices))
        shared = self.num_sharing > 1 if stated is None else not stated
        return not self.agree_max([shared or len(self.ranks) > MOST_RANKS])[0]

    def make_signals(self) -> Signals | None:
        """Make events that the node's ranks wait for; None if a rank cannot make some.  Collective."""
        own, handles, failure = [], [b""] * TURNS, ""
        try:
            own = [self.device.shared_event() for _ in range(TURNS)]
            handles = [self.device.export_event(event) for event in own]
        except DEVICE_ERRORS as error:
            failure = one_line(error)
        events: dict[int, list[Any]] = {world: [] for world in self.world_ranks}
        for handle in handles:
            remote_events, failure = self.open_all(handle, self.device.open_event, failure)
            for world, event in remote_events.items():
                events[world].append(event)
        return None if self.on_any(failure) else Signals(own, events)


def leave(memory: DeviceMemory) -> None:
    """Close the other ranks' memory at the end of the process, so that none frees memory still read.  Collective."""
    if memory.usable:
        memory.close_windows(list(dict.fromkeys(block.window for block in memory.blocks)))


def attempt(work: Callable[[], None]) -> str:
    """Return the error of `work` in one line, "" for none."""
    try:
        work()
    except DEVICE_ERRORS as error:
        return one_line(error)
    return ""


def one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
