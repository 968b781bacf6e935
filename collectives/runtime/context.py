"""The parts behind the collectives of one communicator."""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from mpi4py import MPI

from collectives.algorithms.groups import Topology
from collectives.arrays.addresses import pointer
from collectives.arrays.cuda import Cuda
from collectives.arrays.device import Device, host
from collectives.arrays.device_memory import DeviceMemory
from collectives.arrays.memory import SymmetricMemory, Windows, array, ranks_in
from collectives.runtime.agreement import Agreement
from collectives.runtime.backends.messages import TAGS
from collectives.runtime.backends.point_to_point import Mailbox
from collectives.runtime.choose.auto import Tuning
from collectives.runtime.lazy import Lazy
from collectives.runtime.progress import Progress
from collectives.runtime.reports.call_log import Calls, LogEntry, Record
from collectives.runtime.reports.recorder import Recorder
from collectives.runtime.reports.watchdog import Watchdog


class Context:
    """The parts of a communicator, each the sole owner of its state, over a duplicate of an mpi4py communicator.

    One with a `parent` is the part of it that has a `color`: they share settings, windows of memory and progress, so
    that each advances the other's started plans.  `collectives.runtime.setup` makes the other parts.
    """

    agreement: Agreement
    mailbox: Mailbox
    memory: Memories
    progress: Progress
    recorder: Recorder
    topology: Topology
    tuning: Tuning
    windows: Windows
    check: bool
    timeout_s: float
    node: int  # its number, the same on all its ranks
    has_numba: bool  # on all ranks
    watchdog: Watchdog | None = None

    def __init__(self, mpi_comm: MPI.Comm, segment_bytes: int, parent: Context | None = None, color: int = 0):
        self.mpi = mpi_comm.Dup()
        self.rank, self.size = self.mpi.rank, self.mpi.size
        self.segment_bytes = segment_bytes
        self.num_tags = int(MPI.COMM_WORLD.Get_attr(MPI.TAG_UB) or 32767)
        self.num_plans = 0
        self.is_part = parent is not None
        if parent is None:
            self.calls = Calls(Record(), "", range(self.size))
        else:
            self.calls = parent.calls.part(color, ranks_in(parent.mpi, self.mpi))

    @Lazy
    def world_ranks(self) -> list[int]:
        return ranks_in(MPI.COMM_WORLD, self.mpi)

    def next_tags(self) -> int:
        """Return the first of the tags of a new plan: the same on every rank, since binding is collective."""
        self.num_plans += 1
        return self.num_plans % (self.num_tags // TAGS) * TAGS

    def host_names(self) -> list[str]:
        """Return the name of each rank's host.  Collective."""
        return self.agreement.gather_texts(platform.node())

    @contextmanager
    def agreed(self, name: str = "agreed", gate: Callable[[], LogEntry | None] = lambda: None) -> Iterator[None]:
        """Run a block whose ValueError or OSError on any rank becomes an InputError on every rank.  Collective.

        `gate` tells ranks that would run a bound call to agree first.
        """
        failure = ""
        with LogEntry(self.calls, name) as entry:
            try:
                yield
            except (ValueError, OSError, MemoryError) as error:
                failure = str(error) or type(error).__name__
            self.agreement.check(name, failure, entry=entry if self.check else None, late=gate())

    def abandon(self) -> None:
        """Stop its threads, and leave its memory and MPI objects, which only all ranks together could free."""
        if self.watchdog:
            self.watchdog.stop()
        self.progress.background.pause()
        self.calls.close()
        if self.memory.of_device:
            self.memory.of_device.usable = False

    def free(self) -> None:
        """Free its memory, then its MPI objects.  Collective."""
        if self.watchdog:
            self.watchdog.stop()
        if not self.is_part:
            self.progress.background.pause()
        self.calls.close()
        self.agreement.free()
        self.mpi.Free()
        self.mailbox.mpi.Free()


class Memories:
    """The symmetric memory of a communicator: of hosts, and of devices once arrays are on them."""

    def __init__(self, context: Context):
        self.context, self.agreement = context, context.agreement
        self.of_host = SymmetricMemory(context.mpi, context.node, context.windows, self.agreement.highest)
        self.of_device: DeviceMemory | None = None

    def empty(self, device: Device, count: int, dtype: np.dtype) -> Any:
        """Return a new flat array, in memory shared by the node's ranks where possible.  Collective."""
        if device is host():
            return array(self.of_host.allocate(count * dtype.itemsize), count, dtype)
        shared = self.on_devices(device)
        if shared is None:
            return device.empty(count, dtype)
        return shared.array(shared.allocate(count * dtype.itemsize), count, dtype)

    def peers(self, device: Device, view: Any) -> list[Any]:
        """Return each rank's array, on this node, at the address of `view` in symmetric memory."""
        window, ranks = self.context.windows.window_of(view), self.of_host.world_ranks
        if window is None or not window.bases.keys() >= set(ranks):
            raise ValueError("x is not in these ranks' symmetric memory: allocate it with their `empty`")
        offset = pointer(view) - window.address
        return [device.borrow(window.bases[rank] + offset, len(view), view.dtype) for rank in ranks]

    def on_devices(self, device: Device) -> DeviceMemory | None:
        """Return the shared device memory of the nodes' ranks, if all have arrays on devices.  Collective.

        Each rank's is on the device that it used first.  Where it cannot be set up, rank 0 prints the reason.
        """
        own = self.of_device and self.of_device.device.device_name
        (another,) = self.agreement.highest([not isinstance(device, Cuda) or own not in (None, device.device_name)])
        if another:
            return None
        if self.of_device is None:
            assert isinstance(device, Cuda)
            context, ways = self.context, (self.agreement.highest, self.agreement.gather_rows)
            self.of_device = DeviceMemory(context.mpi, context.node, context.windows, *ways, device)
            failures = self.agreement.gather_texts(self.of_device.failure if not self.of_device.usable else "")
            if context.rank == 0 and any(failures):
                rank, failure = next((rank, text) for rank, text in enumerate(failures) if text)
                words = "CUDA IPC is unavailable; staging device arrays through host memory"
                print(f"{words}: rank {rank}: {failure}", file=sys.stderr)
        return self.of_device if self.of_device.usable else None

    def free(self) -> None:
        """Release the memory that no array uses any more.  Collective."""
        self.of_host.free()
        if self.of_device:
            self.of_device.free()
