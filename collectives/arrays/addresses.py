"""Addresses of flat arrays, of the host or of a device."""

from typing import Any

import numpy as np


def same_memory(a: Any, b: Any) -> bool:
    """Return whether two flat views start at one address and have one length."""
    return a is b or (type(a) is type(b) and a.nbytes == b.nbytes and pointer(a) == pointer(b))


def overlap(a: Any, b: Any) -> bool:
    """Return whether two flat views of one device share memory."""
    return a.nbytes > 0 < b.nbytes and pointer(a) < pointer(b) + b.nbytes and pointer(b) < pointer(a) + a.nbytes


def pointer(x: Any) -> int:
    """Return the address of a flat array."""
    return x.ctypes.data if isinstance(x, np.ndarray) else x.data.ptr


def address_of(x: Any) -> int:
    """Return the address of a flat array, 0 for None."""
    return 0 if x is None else pointer(x)


def as_bytes(x: Any) -> Any:
    """Return a flat array's memory as bytes, for MPI or for `host` staging."""
    return x.view(np.uint8)
