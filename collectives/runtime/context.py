"""The parts behind the collectives of one communicator, each the sole owner of its state, and their setup."""

from __future__ import annotations

import platform
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI

from collectives.algorithms.groups import Topology
from collectives.arrays.addresses import pointer
from collectives.arrays.cuda import Cuda
from collectives.arrays.device import Device, host
from collectives.arrays.device_memory import DeviceMemory
from collectives.arrays.memory import SymmetricMemory, Windows, array, ranks_in
from collectives.job import environment
from collectives.job.launch import library_name
from collectives.job.settings import is_a
from collectives.runtime.agreement import Agreement
from collectives.runtime.backends import compiler
from collectives.runtime.backends.binding import bookkeeping
from collectives.runtime.backends.messages import LARGEST_MESSAGE_BYTES, TAGS
from collectives.runtime.backends.point_to_point import Mailbox
from collectives.runtime.choose import links
from collectives.runtime.choose.auto import Tuning, parse_tuning, read_tuning
from collectives.runtime.progress import Progress
from collectives.runtime.reports.call_log import Call, Calls, Record
from collectives.runtime.reports.recorder import Recorder
from collectives.runtime.reports.watchdog import Watchdog
from collectives.schedule.cost import NETWORK


class Context:
    """The parts of a communicator, over a duplicate of an mpi4py communicator.  Construction is collective.

    With a `parent`, the communicator is the part of it that has a `color`: they share settings, windows of memory and
    progress, so that each advances the other's started plans.
    """

    def __init__(
        self,
        mpi_comm: MPI.Comm,
        segment_bytes: int,
        check: bool | None = None,
        timeout_s: float | None = None,
        parent: Context | None = None,
        color: int = 0,
    ):
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
        shared = self.mpi.Split_type(MPI.COMM_TYPE_SHARED)
        self.progress: Progress = parent.progress if parent else Progress(environment.oversubscribed(shared.size))
        self.windows: Windows = parent.windows if parent else Windows()
        self.agreement = Agreement(self.rank, self.size, partial(bookkeeping, self))
        if parent is None:
            is_valid = is_a(segment_bytes, int) and 1 <= segment_bytes <= LARGEST_MESSAGE_BYTES
            failure = f"segment_bytes={segment_bytes!r} must be from 1 to {LARGEST_MESSAGE_BYTES}" * (not is_valid)
            self.agreement.check(f"Communicator(segment_bytes={segment_bytes})", failure)
            self.check, self.timeout_s = settings(self.agreement, check, timeout_s)
            self.node = node_number(self, shared)  # the same on all its ranks
            self.has_numba = has_kernels(self, shared)  # on all ranks
        else:
            self.check, self.timeout_s, self.node = parent.check, parent.timeout_s, parent.node
            self.has_numba = parent.has_numba
        shared.Free()
        self.topology = Topology.from_ids(self.agreement.gather_ints(self.node))
        own_node = self.topology.nodes[self.topology.node_of[self.rank]]
        self.mailbox = Mailbox(mpi_comm.Dup(), own_node, self.num_tags, self.calls)
        self.tuning: Tuning = parent.tuning if parent else tuning_from_file(self)
        self.memory = Memories(self)
        self.recorder: Recorder = parent.recorder if parent else self.make_recorder()
        self.watchdog: Watchdog | None = None
        if not parent and self.timeout_s:
            self.watchdog = Watchdog(self.mpi, self.num_tags, self.recorder, self.progress, self.timeout_s)

    def make_recorder(self) -> Recorder:
        """Return the writer of the last calls, to a folder of this communicator's own.  Collective."""
        (now_ns,) = self.agreement.highest([time.time_ns()])
        now = datetime.fromtimestamp(now_ns / 1e9, UTC)
        folder = environment.calls_folder()
        own = folder and folder / f"{now:%Y-%m-%dT%H-%M-%S.%f}"
        return Recorder(self.rank, self.calls.record, self.progress, own)

    def next_tags(self) -> int:
        """Return the first of the tags of a new plan: the same on every rank, since binding is collective."""
        self.num_plans += 1
        return self.num_plans % (self.num_tags // TAGS) * TAGS

    def host_names(self) -> list[str]:
        """Return the name of each rank's host.  Collective."""
        return self.agreement.gather_texts(platform.node())

    @contextmanager
    def agreed(self, name: str = "agreed") -> Iterator[None]:
        """Run a block whose ValueError or OSError on any rank becomes an InputError on every rank.  Collective."""
        failure = ""
        with Call(self.calls, name) as call:
            try:
                yield
            except (ValueError, OSError, MemoryError) as error:
                failure = str(error) or type(error).__name__
            self.agreement.check(name, failure, call=call if self.check else None)

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
        """Return each rank's array, on this node, at the place of `view` in symmetric memory."""
        window, ranks = self.context.windows.window_of(view), self.of_host.world_ranks
        if window is None or not window.bases.keys() >= set(ranks):
            raise ValueError("x is not in these ranks' symmetric memory: allocate it with their `empty`")
        offset = pointer(view) - window.address
        return [device.borrow(window.bases[rank] + offset, len(view), view.dtype) for rank in ranks]

    def on_devices(self, device: Device) -> DeviceMemory | None:
        """Return the shared device memory of the nodes' ranks, if all have arrays on devices.  Collective.

        Each rank's is on the device that it used first.  Where it cannot be set up, rank 0 prints the reason.
        """
        own = self.of_device and self.of_device.device.place
        (another,) = self.agreement.highest([not isinstance(device, Cuda) or own not in (None, device.place)])
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


def settings(agreement: Agreement, check: bool | None, timeout_s: float | None) -> tuple[bool, float]:
    """Return the settings passed, else those of the environment; refuse invalid ones on all ranks.  Collective."""
    failure = ""
    try:
        check = environment.check() if check is None else check
        timeout_s = environment.timeout_s() if timeout_s is None else timeout_s
        environment.writable_calls_folder()
        if check not in (True, False):
            raise ValueError(f"check={check!r} must be True or False")
        if not (is_a(timeout_s, float) and timeout_s >= 0):
            raise ValueError(f"timeout_s={timeout_s!r} must be seconds, or 0 for no limit")
    except ValueError as error:
        failure = str(error)
    agreement.check(f"Communicator(check={check!r})", failure)
    return bool(check), timeout_s or 0.0


def node_number(context: Context, shared: MPI.Comm) -> int:
    """Return the number of this rank's node: its first rank.  Collective."""
    with context.agreed("Communicator"):
        fake = environment.fake_nodes()
        if fake and fake[0] != -(-context.size // fake[1]):
            raise ValueError(
                f"COLLECTIVES_FAKE_NODES={fake[0]}x{fake[1]} does not make the {context.size} ranks of this job: "
                "change it, or unset it"
            )
    if fake:
        return context.rank // fake[1]
    return ranks_in(context.mpi, shared)[0]


def has_kernels(context: Context, shared: MPI.Comm) -> bool:
    """Return whether all ranks can use the compiled kernels; if not, rank 0 prints why.  Collective.

    The first rank of a node compiles them, if need be, and the others find them on disk.
    """
    agreement = context.agreement
    failure = compiler.failure() if shared.rank == 0 else ""
    agreement.highest([0])
    failure = failure or compiler.failure()
    if not any(agreement.highest([bool(failure)])):
        return True
    rank, words = next((rank, words) for rank, words in enumerate(agreement.gather_texts(failure)) if words)
    if context.rank == 0:
        compiler.warn(f"rank {rank} has no compiled kernels, and all data go by messages ({words})")
    return False


def tuning_from_file(context: Context) -> Tuning:
    """Read the file that rank 0's COLLECTIVES_TUNING names; other ranks need not have it.  Collective."""
    agreement, is_first = context.agreement, context.rank == 0
    path = agreement.gather_texts(str(environment.tuning_file() or "") * is_first)[0]
    if not path:
        return tuning_of_hosts(context)
    with context.agreed():
        text = read_tuning(Path(path)) if is_first else ""
    text = agreement.gather_texts(text)[0]
    with context.agreed():
        return parse_tuning(text, path)


def tuning_of_hosts(context: Context) -> Tuning:
    """Read the speeds that were measured of these hosts, if rank 0 has them; other ranks need not.  Collective."""
    agreement, is_first = context.agreement, context.rank == 0
    cores = min(agreement.gather_ints(environment.cores()))
    if not max(agreement.gather_ints(is_first and links.any_cached())):
        return Tuning(NETWORK._replace(cores=cores))
    place = links.place(context.host_names(), context.topology.nodes, library_name(MPI))
    cached = links.parse(agreement.gather_texts(links.read(place.file) * is_first)[0])
    if cached is None or cached.place != place:
        return Tuning(NETWORK._replace(cores=cores))
    return Tuning(cached.network._replace(cores=cores), measured=cached.measured or "earlier")
