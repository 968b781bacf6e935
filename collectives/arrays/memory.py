"""Symmetric memory: arrays that every rank of a node can access, in files that they map.

`collectives.arrays.device_memory` has the same on devices.  Other arrays are read through the system, where it lets one
process read another's memory: `reads_processes`.
"""

import ctypes
import mmap
import os
import tempfile
import weakref
from bisect import bisect_right
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from threading import Lock
from types import SimpleNamespace
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
from mpi4py import MPI

from collectives.arrays.addresses import pointer
from collectives.job import system
from collectives.job.errors import InputError

PAGE_BYTES = 4096
PROBE = 0x1234ABCD
probe = np.array([PROBE], np.int64)  # a number that other processes try to read
SLAB_BYTES = 1 << 20  # blocks of up to a sixteenth of it share a window
LEAD_BYTES = 64  # before a window's blocks: NumPy's long arrays begin 16 bytes behind a page, see `kernels.copy`
KEPT_BYTES = 1 << 26  # unused memory that a rank keeps: more is released when new memory is needed


@dataclass(eq=False)
class Window:
    """A window of shared memory: `bases` has each rank's address in this process, by world rank."""

    key: int  # the same on all ranks
    address: int
    nbytes: int
    bases: dict[int, int]
    handle: Any  # keeps the memory alive


@dataclass(eq=False)
class Block:
    """A part of a window, leased as memory and reused when no rank uses it any more."""

    window: Window
    offset: int
    nbytes: int
    free: bool = True

    @property
    def address(self) -> int:
        return self.window.address + self.offset


class Lease:
    """A block in use: views of it keep this alive."""

    def __init__(self, block: Block):
        self.block, self.address = block, block.address
        block.free = False
        weakref.finalize(self, setattr, block, "free", True).atexit = False

    def at(self, world_rank: int) -> int:
        """Return the address, in this process, of a rank's part of it."""
        return self.block.window.bases[world_rank] + self.block.offset


Ranges = tuple[list[int], list[int], list[int]]  # first addresses of windows in their order, ends, and keys


@dataclass
class Windows:
    """The windows of this process, of all communicators, which several threads may use.

    Arrays in one that is removed are ordinary arrays from then on, which keep it alive, as do runs in progress that
    have begun before: `by_key` has it as long.  One that a started call is pinned to is removed when that has ended, as
    the call may yet have to be agreed on.
    """

    by_key: WeakValueDictionary[int, Window] = field(default_factory=WeakValueDictionary)
    present: list[Window] = field(default_factory=list)  # in the order of their addresses
    numbers: Iterator[int] = field(default_factory=partial(count, 1))
    ranges: Ranges = ([], [], [])  # replaced as a whole, for threads that read it meanwhile
    span: tuple[int, int] = (0, 0)  # from the first window's beginning to the last one's end
    changing: Lock = field(default_factory=Lock)
    pins: Counter[int] = field(default_factory=Counter)  # of started calls, by key
    leaving: set[int] = field(default_factory=set)  # keys of pinned windows that are to be removed

    def window_of(self, view: Any) -> Window | None:
        """Return the window in which a flat array lies, if it lies in one."""
        return self.by_key.get(self.key_of(view))

    def key_of(self, view: Any) -> int:
        """Return the key of the window in which a flat array lies; 0 for one that is in none, is empty, or None."""
        return self.key_at(pointer(view)) if view is not None and len(view) else 0

    def key_at(self, address: int) -> int:
        """Return the key of the window in which an address is, or 0."""
        begins, ends, keys = self.ranges
        nth = bisect_right(begins, address) - 1
        return keys[nth] if nth >= 0 and address < ends[nth] else 0

    def add(self, window: Window) -> None:
        with self.changing:
            self.by_key[window.key] = window
            self.arrange([*self.present, window])

    def remove(self, windows: Collection[Window]) -> None:
        """Remove windows, on all ranks between the same calls."""
        with self.changing:
            self.leaving |= {window.key for window in windows}
            self.sweep()

    def pin(self, keys: Collection[int]) -> None:
        with self.changing:
            self.pins.update(keys)

    def unpin(self, keys: Collection[int]) -> None:
        with self.changing:
            self.pins -= Counter(keys)
            self.sweep()

    def sweep(self) -> None:
        if gone := self.leaving - self.pins.keys():
            self.leaving -= gone
            self.arrange([window for window in self.present if window.key not in gone])

    def arrange(self, windows: list[Window]) -> None:
        windows.sort(key=lambda window: window.address)
        self.present = windows
        begins, ends = [each.address for each in windows], [each.address + each.nbytes for each in windows]
        self.ranges = begins, ends, [each.key for each in windows]
        self.span = (begins[0], ends[-1]) if windows else (0, 0)


class SymmetricMemory:
    """Memory that the ranks of a communicator allocate together, each node's in windows of its own.

    `agree_max` is the elementwise maximum over the ranks of a list of integers.
    """

    slab_bytes, lead_bytes = SLAB_BYTES, LEAD_BYTES

    def __init__(self, comm: MPI.Comm, node: int, windows: Windows, agree_max: Any):
        self.comm, self.node_comm = comm, MPI.Intracomm(comm.Split(node))
        self.windows, self.agree_max = windows, agree_max
        self.world_ranks = ranks_in(MPI.COMM_WORLD, self.node_comm)
        self.blocks: list[Block] = []
        self.kinds: dict[int, int] = {0: 0}
        self.waits = np.zeros((comm.size, 2), np.int64)  # for each rank at barriers: how often, and nanoseconds

    def kind(self, key: int) -> int:
        """Classify a window for collectives: 0 for none, 1 for one that all these ranks have, or its own key."""
        if key not in self.kinds:
            self.kinds = {key: kind for key, kind in self.kinds.items() if not key or key in self.windows.by_key}
            self.kinds[key] = 1 if self.windows.by_key[key].bases.keys() >= set(self.world_ranks) else key
        return self.kinds[key]

    def allocate(self, nbytes: int) -> Lease:
        """Allocate at least `nbytes` of memory, as much as any rank asks for.  Collective.

        Raises: InputError on every rank where a node has not enough shared memory.
        """
        in_use = [not block.free for block in self.blocks]
        next_key = self.world_ranks[0] << 32 | next(self.windows.numbers) if self.comm.rank == 0 else 0
        need, key, *in_use = self.agree_max([nbytes, next_key, *in_use])
        need = size_class(need, self.slab_bytes // 16)
        unused = [block for block, is_used in zip(self.blocks, in_use, strict=True) if not is_used]
        fitting = [block for block in unused if need <= block.nbytes <= 2 * need]
        if not fitting:
            fitting = self.make_room(key, need, unused)
            self.blocks += fitting
        return Lease(min(fitting, key=lambda block: block.nbytes))

    def make_room(self, key: int, need: int, unused: list[Block]) -> list[Block]:
        """Make new blocks; release unused ones if they are many bytes, or memory is short."""
        if sum(block.nbytes for block in unused) <= KEPT_BYTES:
            try:
                return self.make_blocks(key, need)
            except InputError:
                if not unused:
                    raise
        self.release(unused)
        unused.clear()  # as it refers to the memory
        return self.make_blocks(key, need)

    def make_blocks(self, key: int, nbytes: int) -> list[Block]:
        """Make a window, and divide it into blocks where these are small."""
        number = self.slab_bytes // nbytes if nbytes <= self.slab_bytes // 16 else 1
        window = self.make_window(key, self.lead_bytes + number * nbytes)
        self.windows.add(window)
        block_bytes = window.nbytes - self.lead_bytes if number == 1 else nbytes
        return [Block(window, self.lead_bytes + i * nbytes, block_bytes) for i in range(number)]

    def make_window(self, key: int, nbytes: int) -> Window:
        """Map memory for every rank of the node, one part after the other.  Collective.

        It is a file without a name, which vanishes with the last process that maps it: nothing need be freed.

        Raises: InputError on every rank where one is refused it.
        """
        self.check_space(nbytes)
        part = -(-nbytes // PAGE_BYTES) * PAGE_BYTES
        created = create_file(part * self.node_comm.size) if self.node_comm.rank == 0 else None
        path, failure = self.node_comm.bcast(created)
        mapping, failure = map_file(path) if path else (None, failure)
        (failed,) = self.agree_max([mapping is None])
        if self.node_comm.rank == 0 and path:
            os.unlink(path)
        if failed:
            raise InputError(f"no {nbytes >> 20} MiB that ranks share: {self.first_failure(failure)}")
        first = pointer(mapping)
        bases = {world: first + i * part for i, world in enumerate(self.world_ranks)}
        return Window(key, bases[self.world_ranks[self.node_comm.rank]], nbytes, bases, mapping)

    def first_failure(self, failure: str) -> str:
        """Return the first rank with a failure, and its failure.  Collective."""
        failures = self.comm.allgather(failure)
        return next(f"rank {rank}: {words}" for rank, words in enumerate(failures) if words)

    def close_windows(self, windows: list[Window]) -> None:
        """Release the resources of windows other than their memory.  Collective."""

    def check_space(self, nbytes: int) -> None:
        """Refuse, on all ranks, memory that exceeds a node's shared memory: its use would end the process."""
        need = nbytes * self.node_comm.size
        there = os.statvfs(shared_folder())
        free_bytes = there.f_bavail * there.f_frsize
        (lacking,) = self.agree_max([need - free_bytes])
        if lacking > 0:
            raise InputError(
                f"a node's shared memory lacks {-(-lacking // 2**20)} MiB for this: enlarge {shared_folder()}, "
                "or use ordinary arrays"
            )

    def release(self, unused: list[Block]) -> None:
        """Release the windows of which no block is in use.  Collective in the node."""
        in_use = {block.window for block in self.blocks if block not in unused}
        windows = list(dict.fromkeys(block.window for block in unused if block.window not in in_use))
        self.blocks = [block for block in self.blocks if block.window not in windows]
        if windows:
            self.windows.remove(windows)
            self.close_windows(windows)

    def free(self) -> None:
        """Leave each window to the arrays in it: it is released when this rank drops the last one.  Collective."""
        windows = list(dict.fromkeys(block.window for block in self.blocks))
        self.blocks = []
        self.windows.remove(windows)
        self.close_windows(windows)
        self.node_comm.Free()


def ranks_in(other: MPI.Comm, comm: MPI.Comm) -> list[int]:
    """Return the ranks that the members of `comm` have in another communicator."""
    group, others = comm.Get_group(), other.Get_group()
    ranks = list(MPI.Group.Translate_ranks(group, range(group.size), others))
    group.Free()
    others.Free()
    return ranks


def size_class(nbytes: int, small: int) -> int:
    """Round up a number of bytes: to a power of 2 if small, then to steps of an eighth, if very large to pages.

    >>> size_class(5000, 1 << 16), size_class(800_000, 1 << 16), size_class(804_000, 1 << 16)
    (8192, 851968, 851968)
    """
    pages = max(1, -(-nbytes // PAGE_BYTES)) * PAGE_BYTES
    if pages <= small:
        return 1 << (pages - 1).bit_length()
    step = max(PAGE_BYTES, 1 << (pages.bit_length() - 4)) if pages <= KEPT_BYTES else PAGE_BYTES
    return -(-pages // step) * step


def shared_folder() -> str:
    """Return the folder of files in memory; where the system has none, that of temporary files."""
    return "/dev/shm" if os.path.isdir("/dev/shm") else tempfile.gettempdir()


def create_file(nbytes: int) -> tuple[str, str]:
    """Create a file for ranks to share; returns its path, or "" and why there is none."""
    path = ""
    try:
        file, path = tempfile.mkstemp(prefix="collectives-", dir=shared_folder())
        os.close(file)
        os.truncate(path, nbytes)
    except OSError as error:
        if path:
            os.unlink(path)
        return "", str(error)
    return path, ""


def map_file(path: str) -> tuple[np.ndarray | None, str]:
    """Map a file as bytes, or say why not."""
    try:
        with open(path, "r+b") as file:
            return np.frombuffer(mmap.mmap(file.fileno(), 0), np.uint8), ""
    except OSError as error:
        return None, str(error)


def array(lease: Lease, count: int, dtype: np.dtype) -> np.ndarray:
    """Return a flat array at the beginning of leased memory, which it keeps."""
    interface = {"data": (lease.address, False), "shape": (count * dtype.itemsize,), "typestr": "|u1", "version": 3}
    return np.asarray(SimpleNamespace(__array_interface__=interface, lease=lease)).view(dtype)


def probe_address() -> list[int]:
    """Return the address of a number that other processes try to read."""
    return [os.getpid(), probe.ctypes.data]


def reads_processes(probes: list[list[int]]) -> bool:
    """Return whether this process can read the number in each of the others."""
    return all(pid == os.getpid() or read_process(pid, address) == PROBE for pid, address in probes)


def read_process(pid: int, address: int) -> int | None:
    """Return an integer in another process's memory, None where the system does not let us."""
    here = np.zeros(1, np.int64)
    call = system.function("process_vm_readv")
    if call is None:
        return None
    call.restype = ctypes.c_ssize_t
    local, remote = (np.array([base, 8], np.uintp) for base in (here.ctypes.data, address))  # C's `struct iovec`
    one, no_flags = ctypes.c_ulong(1), ctypes.c_ulong(0)
    args = pid, local.ctypes.data_as(ctypes.c_void_p), one, remote.ctypes.data_as(ctypes.c_void_p), one, no_flags
    return int(here[0]) if call(*args) == 8 else None
