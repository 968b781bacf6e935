"""A device whose work is done only when somebody waits for it: whoever forgets to wait gets wrong numbers.

Ranks share memory and events through files, as processes share a GPU's: a handle names a file, which is one whole
allocation.
"""

import ctypes
import mmap
import os
import tempfile
import threading
import time
import weakref
from collections import deque
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from collectives.arrays.device import SharingDevice, host

POISON = 0x7F  # in every byte of new and of released memory: a large number, or none
FOLDER = "/dev/shm" if os.path.isdir("/dev/shm") else tempfile.gettempdir()
LONGEST_WAIT_S = 60  # for another process's work
RECORDED, REACHED, ASKED = range(3)  # what the memory of a shared event counts

numbers = count()
doing = threading.RLock()  # work of any stream, which may wait for that of another


class Stream:
    """Work that is done in order, and none of it before it must be."""

    def __init__(self):
        self.queue = deque()
        self.num_launched = self.num_done = 0
        self.launching = threading.Lock()

    def launch(self, work):
        with self.launching:
            self.queue.append(work)
            self.num_launched += 1

    def record(self):
        return Event(self, self.num_launched)

    def wait_for(self, event):
        """Order what is launched from now on after an event."""
        self.launch(lambda: event.stream.finish(event.until))

    def finish(self, until=None):
        with doing:
            while self.queue and (until is None or self.num_done < until):
                self.queue.popleft()()
                self.num_done += 1


class Event:
    """A place in a stream."""

    def __init__(self, stream, until):
        self.stream, self.until = stream, until

    def synchronize(self):
        self.stream.finish(self.until)


class SharedEvent:
    """An event that other processes wait for: their asking lets the stream get on, as a GPU's does by itself."""

    def __init__(self, path):
        self.path = path
        self.counts = np.frombuffer(map_file(path, 24), np.int64)

    def last(self):
        return int(self.counts[RECORDED])

    def wait(self, number):
        """Return when the other process's stream has come to what was recorded as `number`."""
        end = time.monotonic() + LONGEST_WAIT_S
        while self.counts[REACHED] < number:
            self.counts[ASKED] = max(number, self.counts[ASKED])  # again and again: others may ask at the same time
            assert time.monotonic() < end, f"an event of another process does not come: {self.counts}"
            time.sleep(1e-5)


class OwnEvent(SharedEvent):
    """The same where it is recorded."""

    def __init__(self, stream):
        super().__init__(new_file(24))
        weakref.finalize(self, os.unlink, self.path)
        self.stream = stream
        self.unreached = {}  # places in the stream, by what is counted there
        self.marked = threading.Event()
        threading.Thread(target=serve, args=(weakref.ref(self), self.marked), daemon=True).start()

    def mark(self):
        number = self.last() + 1
        self.stream.launch(lambda: self.reach(number))
        self.unreached[number] = self.stream.record()
        self.counts[RECORDED] = number
        self.marked.set()

    def reach(self, number):
        self.counts[REACHED] = number
        del self.unreached[number]

    def serve(self):
        """Do what other processes wait for."""
        place = self.unreached.get(int(self.counts[ASKED]))
        if place:
            place.synchronize()
        self.marked.clear()
        if self.unreached:
            self.marked.set()


def serve(reference, marked):
    while (event := reference()) is not None:
        event.serve()
        del event
        time.sleep(1e-4)
        marked.wait(timeout=1)


class Array:
    """A piece of the device's memory.  NumPy can neither read nor write it; MPI can, if the device says so."""

    __array_ufunc__ = None

    def __init__(self, device, memory, owner=None):
        self.__collectives_device__, self.memory, self.owner = device, memory, owner
        self.dtype, self.shape, self.strides, self.nbytes = memory.dtype, memory.shape, memory.strides, memory.nbytes
        self.flags = SimpleNamespace(c_contiguous=memory.flags.c_contiguous)
        self.data = SimpleNamespace(ptr=memory.ctypes.data)

    def __array__(self, *args, **kwargs):
        raise TypeError("NumPy cannot read device memory")

    @property
    def __cuda_array_interface__(self):
        if not self.__collectives_device__.mpi_reads:
            raise AttributeError("MPI cannot read device memory")
        return self.memory.__array_interface__ | {"version": 3}

    def __len__(self):
        return len(self.memory)

    def __getitem__(self, index):
        return Array(self.__collectives_device__, self.memory[index], self.owner)

    def reshape(self, *shape):
        return Array(self.__collectives_device__, self.memory.reshape(*shape), self.owner)

    def view(self, dtype):
        return Array(self.__collectives_device__, self.memory.view(dtype), self.owner)


class Loan:
    """Memory that NumPy uses but does not own: it is released when the last array over it is gone."""

    def __init__(self, block):
        self.__array_interface__ = block.__array_interface__


class Allocation:
    """Memory in a file, which others may open; they must have closed it when it is freed."""

    def __init__(self, nbytes):
        self.path = new_file(nbytes)
        self.memory = np.frombuffer(map_file(self.path, nbytes), np.uint8)
        self.memory[:] = POISON
        self.ptr = self.memory.ctypes.data
        weakref.finalize(self, free, self.path)

    def holds(self, address):
        return 0 <= address - self.ptr < len(self.memory)


def free(path):
    opened = list(Path(FOLDER).glob(f"{Path(path).name}.*"))
    os.unlink(path)
    assert not opened, f"freed while others have it open: {opened}"


class FakeDevice(SharingDevice):
    """Arrays of type `Array`, filled and read by a caller with a stream of its own.

    `shares` says whether processes are given each other's memory and events, "memory" only, or "nothing".
    """

    name = "fake"

    def __init__(self, mpi_reads=False, shares="all"):
        self.place = f"fake:{next(numbers)}"
        self.mpi_reads, self.shares = mpi_reads, shares
        self.stream, self.caller = Stream(), Stream()
        self.pinned = []
        self.allocations = weakref.WeakSet()
        self.opened = {}  # by address: the path, and the memory

    def empty(self, count, dtype):
        dtype = np.dtype(dtype)
        return Array(self, np.full(count * dtype.itemsize, POISON, np.uint8).view(dtype))

    def host(self, nbytes):
        block = np.full(nbytes, POISON, np.uint8)
        self.pinned.append(block)  # so that work may still refer to it when it is released
        loan = Loan(block)
        weakref.finalize(loan, block.fill, POISON)
        return np.asarray(loan)

    def copy(self, target, source):
        both_here = isinstance(target, Array) and isinstance(source, Array)
        target, source = raw(target), raw(source)
        assert target.shape == source.shape
        assert target.dtype == source.dtype or both_here
        self.stream.launch(lambda: host().copy(target, source))

    def fold(self, op, low, high, out):
        low, high, out = raw(low), raw(high), raw(out)
        self.stream.launch(lambda: host().fold(op, low, high, out))

    def fold_all(self, op, out, sources, divisor):
        out, sources = raw(out), list(map(raw, sources))
        self.stream.launch(lambda: host().fold_all(op, out, sources, divisor))

    def divide(self, x, divisor):
        x = raw(x)
        self.stream.launch(lambda: host().divide(x, divisor))

    def begin(self):
        self.stream.wait_for(self.caller.record())

    def record(self):
        return self.stream.record()

    def end(self, event):
        self.caller.wait_for(event)

    def synchronize(self):
        self.stream.finish()

    def allocate(self, nbytes):
        allocation = Allocation(nbytes)
        self.allocations.add(allocation)
        return allocation

    def export_memory(self, address):
        if self.shares == "nothing":
            raise OSError("handles of memory are not supported")
        return next(a.path.encode() for a in self.allocations if a.holds(address))

    def open_memory(self, handle):
        path = handle.decode()
        memory = np.frombuffer(map_file(path, os.path.getsize(path)), np.uint8)
        Path(f"{path}.{os.getpid()}").touch()
        self.opened[memory.ctypes.data] = path, memory
        return memory.ctypes.data

    def close_memory(self, address):
        self.stream.finish()
        os.unlink(f"{self.opened.pop(address)[0]}.{os.getpid()}")

    def at(self, address, count, dtype, owner):
        whole = [a for a in self.allocations if a.holds(address)]
        whole += [memory for _, memory in self.opened.values() if 0 <= address - memory.ctypes.data < len(memory)]
        buffer = (ctypes.c_char * (count * np.dtype(dtype).itemsize)).from_address(address)
        return Array(self, np.ndarray(count, dtype, buffer), (owner, whole))

    def shared_event(self):
        if self.shares != "all":
            raise OSError("handles of events are not supported")
        return OwnEvent(self.stream)

    def export_event(self, event):
        return event.path.encode()

    def open_event(self, handle):
        return SharedEvent(handle.decode())

    def mark(self, event):
        event.mark()

    def wait_for(self, event):
        number = event.last()  # none that comes later
        self.stream.launch(lambda: event.wait(number))

    def put(self, values):
        """A new array that the caller's stream will fill."""
        return self.fill(self.empty(values.size, values.dtype).reshape(values.shape), values)

    def fill(self, array, values):
        """Have the caller's stream fill an array."""
        self.change(array, lambda memory: values)
        return array

    def change(self, array, function):
        """Replace an array by a function of itself, on the caller's stream."""
        self.caller.launch(lambda: np.copyto(array.memory, function(array.memory)))

    def get(self, array):
        """What the caller's stream has in an array in the end."""
        self.caller.finish()
        return array.memory.copy()


class Forgetful(FakeDevice):
    """Does one of its duties only the first few times.

    "host_waits" are those of the host for what is done on the stream.
    """

    def __init__(self, duty, times=0, **options):
        super().__init__(**options)
        if duty == "host_waits":
            self.synchronize = self.limited(self.synchronize, times)
            self.record = self.forgetful_record(self.record, iter(range(times)))
        else:
            setattr(self, duty, self.limited(getattr(self, duty), times))

    def limited(self, work, times):
        left = iter(range(times))
        return lambda *given: None if next(left, None) is None else work(*given)

    def forgetful_record(self, record, left):
        def recorded():
            event = record()
            wait = event.synchronize
            event.synchronize = lambda: None if next(left, None) is None else wait()
            return event

        return recorded


def raw(x):
    """The memory of an array, which stays when the array is released."""
    if isinstance(x, Array):
        return x.memory
    return np.ndarray(x.shape, x.dtype, (ctypes.c_char * x.nbytes).from_address(x.ctypes.data))


def new_file(nbytes):
    """A path that a handle has room for."""
    file, path = tempfile.mkstemp(prefix="fake-", dir=FOLDER)
    os.truncate(file, nbytes)
    os.close(file)
    return path


def map_file(path, nbytes):
    with open(path, "r+b") as file:
        return mmap.mmap(file.fileno(), nbytes)
