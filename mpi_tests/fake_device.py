"""A device whose work is done only when somebody waits for it: whoever forgets to wait gets wrong numbers."""

import ctypes
import weakref
from collections import deque
from types import SimpleNamespace

import numpy as np

from collectives.arrays import Device, host

POISON = 0x7F  # in every byte of new and of released memory: a large number, or none


class Stream:
    """Work that is done in order, and none of it before it must be."""

    def __init__(self):
        self.queue = deque()
        self.done = 0

    def launch(self, work):
        self.queue.append(work)

    def wait_for(self, other):
        """Order what is launched from now on after what `other` has by now."""
        until = other.done + len(other.queue)
        self.launch(lambda: other.finish(until))

    def finish(self, until=None):
        while self.queue and (until is None or self.done < until):
            self.done += 1
            self.queue.popleft()()


class Array:
    """A piece of the device's memory.  NumPy can neither read nor write it; MPI can, if the device says so."""

    __array_ufunc__ = None

    def __init__(self, device, memory):
        self.__collectives_device__, self.memory = device, memory
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
        return Array(self.__collectives_device__, self.memory[index])

    def reshape(self, *shape):
        return Array(self.__collectives_device__, self.memory.reshape(*shape))

    def view(self, dtype):
        return Array(self.__collectives_device__, self.memory.view(dtype))


class Loan:
    """Memory that NumPy uses but does not own: it is released when the last array over it is gone."""

    def __init__(self, block):
        self.__array_interface__ = block.__array_interface__


class FakeDevice(Device):
    """Arrays of type `Array`, filled and read by a caller with a stream of its own."""

    name = "fake"
    is_async = True

    def __init__(self, mpi_reads):
        self.mpi_reads = mpi_reads
        self.stream, self.caller = Stream(), Stream()
        self.pinned = []

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

    def divide(self, x, divisor):
        x = raw(x)
        self.stream.launch(lambda: host().divide(x, divisor))

    def begin(self):
        self.stream.wait_for(self.caller)

    def end(self):
        self.caller.wait_for(self.stream)

    def synchronize(self):
        self.stream.finish()

    def put(self, values):
        """A new array that the caller's stream will fill."""
        array = self.empty(values.size, values.dtype).reshape(values.shape)
        self.change(array, lambda memory: values)
        return array

    def change(self, array, function):
        """Replace an array by a function of itself, on the caller's stream."""
        self.caller.launch(lambda: np.copyto(array.memory, function(array.memory)))

    def get(self, array):
        """What the caller's stream has in an array in the end."""
        self.caller.finish()
        return array.memory.copy()


def raw(x):
    """The memory of an array, which stays when the array is released."""
    if isinstance(x, Array):
        return x.memory
    return np.ndarray(x.shape, x.dtype, (ctypes.c_char * x.nbytes).from_address(x.ctypes.data))
