"""A stand-in for CuPy, for the doctor's children: as much of it as they use, over host memory.

FAKE_GPU says what the device is like: "aware", MPI reads its memory; "blind", it crashes if it tries; "broken".
"""

import mmap
import os
import sys
import tempfile
from types import SimpleNamespace

import numpy as np

KIND = os.environ.get("FAKE_GPU")
UNMAPPED = 16  # an address that nobody can read
mapped = {}  # address to memory and the file that it is in


class Array:
    def __init__(self, memory):
        self.memory = memory

    @property
    def __cuda_array_interface__(self):
        there = self.memory.__array_interface__ | {"version": 3}
        return there | {"data": (UNMAPPED, False)} if KIND == "blind" else there

    def __add__(self, number):
        return Array(self.memory + number)

    def __iadd__(self, number):
        self.memory += number
        return self

    def __eq__(self, other):
        return self.memory == other.memory

    def sum(self):
        return self.memory.sum() if KIND != "broken" else 7

    def get(self):
        return self.memory.copy()


def arange(count, dtype="int64"):
    return Array(np.arange(count, dtype=dtype))


def zeros_like(array):
    return Array(np.zeros_like(array.memory))


def ndarray(count, dtype, pointer):
    return Array(np.frombuffer(mapped[pointer.ptr][0], dtype, count))


class Device:
    attributes = {"ComputeMode": 3 if KIND == "broken" else 0}  # noqa: RUF012  # as CuPy's
    mem_info = (1 << 33, 1 << 34)

    def __init__(self, index=0):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def synchronize(self):
        pass


def map_file(name, nbytes):
    with open(name, "r+b") as file:
        memory = mmap.mmap(file.fileno(), nbytes)
    address = np.frombuffer(memory, np.uint8).ctypes.data
    mapped[address] = memory, name
    return address


def allocate(nbytes):
    with tempfile.NamedTemporaryFile(delete=False) as file:
        file.truncate(nbytes)
    return map_file(file.name, nbytes)


class MemoryPointer:
    def __init__(self, address, offset):
        self.ptr = address + offset

    def memset(self, value, nbytes):
        mapped[self.ptr][0][:nbytes] = bytes([value]) * nbytes


def export(address):
    if KIND == "broken":
        sys.exit("cudaErrorNotSupported")
    return mapped[address][1].encode()


def close(address):
    os.unlink(mapped[address][1])


runtime = SimpleNamespace(
    driverGetVersion=lambda: 13000,
    runtimeGetVersion=lambda: 13000,
    getDeviceCount=lambda: 1,
    getDeviceProperties=lambda index: {"name": b"Fake GPU"},
    setDevice=lambda index: None,
    ipcGetMemHandle=export,
    ipcOpenMemHandle=lambda handle: map_file(handle.decode(), 1 << 20),
    ipcCloseMemHandle=close,
)
cuda = SimpleNamespace(
    runtime=runtime,
    Device=Device,
    Memory=allocate,
    MemoryPointer=MemoryPointer,
    UnownedMemory=lambda address, nbytes, owner: address,
)
