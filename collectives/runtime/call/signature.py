"""The signature of a call, which decides how it is run: all but the addresses of its arrays."""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections.abc import Hashable
from typing import Any

import numpy as np
from mpi4py import MPI

from collectives.arrays.addresses import address_of
from collectives.arrays.device import Device, host
from collectives.arrays.memory import SymmetricMemory
from collectives.arrays.views import cuda, flat, is_a
from collectives.schedule.spec import COLLECTIVES

C_CONTIGUOUS, ALIGNED, WRITEABLE = 0x1, 0x100, 0x400  # of NumPy's flags
FLAGS = C_CONTIGUOUS | ALIGNED | WRITEABLE

DEVICE = "device"
Signature = tuple[Hashable, ...]
get_address = MPI.Get_address  # looked up once: every call uses it


class Unsigned(Exception):  # noqa: N818  not an error: such a call is resolved each time that it is made
    """The call has no signature: its arguments are invalid, or it must be bound to the addresses of its arrays."""


# The signature; the addresses of `x` and `out`, which is `x` if there is none; the keys of their windows of symmetric
# memory, 0 for arrays outside of it; whether the arrays are on the host; and whether a device array is outside of
# symmetric memory, in which case the next call's array may have another address.
Signed = tuple[Signature, tuple[int, ...], tuple[int, ...], bool, bool]


def sign(memory: SymmetricMemory, collective: str, x: Any, out: Any, options: tuple) -> Signed:
    """Describe a call, with its arrays' addresses apart.

    Raises: Unsigned.
    """
    if type(x) is np.ndarray and (flags := x.flags.num & FLAGS) & C_CONTIGUOUS:  # most calls, faster than below
        size, (begin, end) = x.size, memory.windows.span
        address = get_address(x) if size else 0
        is_ordinary = not begin <= address < end
        if is_ordinary and out is None:
            return (collective, options, x.dtype, size, flags), (address, address), (0, 0), True, False
        if is_ordinary and type(out) is np.ndarray and (out_flags := out.flags.num & FLAGS) & C_CONTIGUOUS:
            out_size, overlap = out.size, None
            out_address = get_address(out) if out_size else 0
            if not begin <= out_address < end:
                if out_address < address + x.nbytes and address < out_address + out.nbytes:
                    overlap = out_address - address
                one, other = (x.dtype, size, flags), (out.dtype, out_size, out_flags)
                return (collective, options, *one, *other, overlap), (address, out_address), (0, 0), True, False
    described, address, key = describe(memory, x)
    on_host = described[0] is not DEVICE
    if out is None:
        moves = not on_host and not (key and COLLECTIVES[collective].in_place)
        return (collective, options, *described), (address, address), (key, key), on_host, moves
    out_described, out_address, out_key = describe(memory, out)
    overlap = None
    if x is not None and out_address < address + x.nbytes and address < out_address + out.nbytes:
        overlap = out_address - address
    signature = (collective, options, *described, *out_described, overlap)
    if on_host and out_described[0] is not DEVICE:  # most calls
        return signature, (address, out_address), (key, out_key), True, False
    on_device = [key for kind, key in ((described[0], key), (out_described[0], out_key)) if kind is DEVICE]
    moves = not all(on_device) or collective == "gather"  # where others than the root have no `out`
    return signature, (address, out_address), (key, out_key), False, moves


def describe(memory: SymmetricMemory, x: Any) -> tuple[tuple, int, int]:
    """Return an array's part of a signature, its address, and the key of its window."""
    kind = type(x)
    if kind is np.ndarray:  # most calls
        flags, size = x.flags.num & FLAGS, x.size
        if not flags & C_CONTIGUOUS:
            raise Unsigned
        address = get_address(x) if size else 0
        begins, ends, keys = memory.windows.ranges
        nth = bisect_right(begins, address) - 1
        if nth < 0 or address >= ends[nth]:
            return (x.dtype, size, flags), address, 0
        key = keys[nth]
        return (x.dtype, size, flags, memory.kinds[key] if key in memory.kinds else memory.kind(key)), address, key
    if x is None:
        return (None,), 0, 0
    if is_a(x, "cupy", "ndarray"):  # the first call of a signature checks the rest
        if not x.flags.c_contiguous:
            raise Unsigned
        return describe_on_device(memory, cuda(x.device.id), x.dtype, x.size, x.data.ptr)
    torch = sys.modules.get("torch")
    try:
        if torch is not None and (kind is torch.Tensor or kind is torch.nn.Parameter) and x.is_cpu:
            return describe_tensor(memory, x, torch.strided)
        device, view = flat(x)
    except (ValueError, TypeError, RuntimeError):  # the agreement on the call reports why
        raise Unsigned from None
    if device is host():
        return describe(memory, view)
    return describe_on_device(memory, device, view.dtype, len(view), view.data.ptr)


def describe_on_device(
    memory: SymmetricMemory, device: Device, dtype: Any, size: int, address: int
) -> tuple[tuple, int, int]:
    key = memory.windows.key_at(address)
    home = (address, key) if key else None  # in symmetric memory, calls are bound to its address
    return (DEVICE, device, dtype, size, home), address, key


def describe_tensor(memory: SymmetricMemory, x: Any, strided: Any) -> tuple[tuple, int, int]:
    if x.layout is not strided or not x.is_contiguous() or x.is_conj() or x.is_neg():
        raise Unsigned
    address = x.data_ptr() if x.numel() else 0
    key = memory.windows.key_at(address)
    return (x.dtype, x.numel(), memory.kind(key)), address, key


def hashable(signature: Signature) -> Signature:
    """Return the signature with tuples for the options that were lists.

    Raises: Unsigned where that is not enough.
    """
    collective, options, *arrays = signature
    assert isinstance(options, tuple)
    try:
        options = tuple(tuple(option) if isinstance(option, list | np.ndarray) else option for option in options)
        hash(options)
    except TypeError:
        raise Unsigned from None
    return (collective, options, *arrays)


def address_of_result(x: Any) -> int:
    """Return the address of a new array."""
    if type(x) is np.ndarray:
        return get_address(x) if x.size else 0
    return x.data.ptr if is_a(x, "cupy", "ndarray") else address_of(flat(x)[1])
