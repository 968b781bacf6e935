"""Calls on several arrays, or on one that is not contiguous: packed before a call, and written back after it."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from collectives.arrays.device import host
from collectives.arrays.views import is_a, numpy_view
from collectives.runtime.call.call import Call
from collectives.runtime.call.checks import REFUSALS, check_writable
from collectives.runtime.call.fused import Fused
from collectives.schedule.spec import spec_of


def is_strided(x: Any) -> bool:
    """Return whether `x` is a host array that is not C-contiguous."""
    if isinstance(x, np.ndarray):
        return not x.flags.c_contiguous and not isinstance(x, np.ma.MaskedArray)
    if not is_a(x, "torch", "Tensor") or x.device.type != "cpu":
        return False
    return x.layout is sys.modules["torch"].strided and not x.is_contiguous()


def pack_strided(call: Call, rank: int) -> Call:
    """Return a call on copies of its strided arrays; results are written back.

    Raises: ValueError where results cannot be written back.
    """
    spec = spec_of(call.collective)
    gets = spec.writes(rank, call.argument("root"))
    arrays, after, owners = {"x": call.x, "out": call.out}, [], []
    for name, is_written in (("x", gets and spec.in_place and call.out is None), ("out", gets)):
        array = arrays[name]
        if not is_strided(array):
            continue
        view, packed = numpy_view(array), contiguous(array)
        if is_written:
            check_result(view, name)
            after.append((view, numpy_view(packed)))
        owners.append((packed, array))
        arrays[name] = packed
    return call.on(**arrays, after=after, owners=owners)


def contiguous(array: Any) -> Any:
    """Return a contiguous copy, of the same library."""
    return np.ascontiguousarray(array) if isinstance(array, np.ndarray) else array.detach().contiguous()


def check_result(view: Any, name: str) -> None:
    """Refuse a read-only result, or one whose elements overlap or seem to, as those of an expanded tensor.

    Raises: ValueError.
    """
    check_writable(view, name)
    if not view.size:
        return
    extent = view.itemsize
    for stride, length in sorted(
        (abs(stride), length) for stride, length in zip(view.strides, view.shape, strict=True)
    ):
        if stride < extent and length > 1:
            raise ValueError(f"{name} has several elements in one place (strides {view.strides}): pass a copy of it")
        extent += stride * (length - 1)


def pack_fused(call: Call, fused: Fused, rank: int) -> Call:
    """Return a call on a buffer with copies of fused arrays; results are copied back.

    Raises: ValueError where they cannot be in it.
    """
    is_root = call.argument("root") == rank
    fused.check(call.collective, call.out, is_root)
    fused.buffer = fused.device.empty(len(fused), fused.dtype)
    before, after = fused.copies(call.collective, is_root)
    fused.device.copy_pairs(before)
    return call.on(
        fused.buffer, call.out, note=f"{call.note} of {fused}", after=after, owners=[(fused.buffer, fused.arrays)]
    )


def pack(call: Call, rank: int) -> tuple[Call | None, str]:
    """Return a call on fused or strided arrays of the host as one on contiguous arrays, None for others.

    If its arrays are wrong, return why.
    """
    fused = call.fused
    if fused is not None and fused.failure:
        return None, fused.failure
    try:
        if fused is not None:
            return pack_fused(call, fused, rank) if fused.device is host() else None, ""
        if is_strided(call.x) or is_strided(call.out):
            return pack_strided(call, rank), ""
    except REFUSALS as error:
        return None, f"{call.collective}: {error}"
    return None, ""
