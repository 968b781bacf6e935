"""What the operating system lets one process do with another's memory."""

import ctypes
import os

import numpy as np

PROBE = 0x1234ABCD


class IoVector(ctypes.Structure):
    """struct iovec"""

    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


probe = np.array([PROBE], np.int64)


def invitation() -> list[int]:
    """Return where another process finds a number that it knows."""
    return [os.getpid(), probe.ctypes.data]


def accept(invitations: list[list[int]]) -> bool:
    """Return whether this process can read the number in each of the others."""
    return all(pid == os.getpid() or read(pid, address) == PROBE for pid, address in invitations)


def read(pid: int, address: int) -> int | None:
    """Return an integer in another process's memory, None where the system does not let us."""
    here = np.zeros(1, np.int64)
    call = getattr(ctypes.CDLL(None), "process_vm_readv", None)
    if call is None:
        return None
    call.restype = ctypes.c_ssize_t
    local, remote = IoVector(here.ctypes.data, 8), IoVector(address, 8)
    done = call(pid, ctypes.byref(local), ctypes.c_ulong(1), ctypes.byref(remote), ctypes.c_ulong(1), ctypes.c_ulong(0))
    return int(here[0]) if done == 8 else None
