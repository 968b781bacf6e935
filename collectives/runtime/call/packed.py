"""Calls on several arrays, or on one that is not contiguous: packed before a call, and written back after it."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from collectives.arrays.addresses import overlap, pointer
from collectives.arrays.device import Device, host
from collectives.arrays.views import flat, is_a, numpy_view
from collectives.runtime.call.arguments import REFUSALS, check_writable
from collectives.runtime.call.operands import split
from collectives.runtime.call.request import Request
from collectives.runtime.plan import CopyPair
from collectives.schedule.spec import COLLECTIVES, Chunks, spec_of

# The collectives whose result is as long as each rank's input.
TAKING = [name for name, spec in COLLECTIVES.items() if spec.in_place and spec.gives is not Chunks.NONE]


@dataclass
class PackedCall:
    """A call on contiguous arrays in place of the caller's; `owners` maps each to the array that it replaces."""

    request: Request
    after: list[CopyPair] = field(default_factory=list)
    owners: list[tuple[Any, Any]] = field(default_factory=list)

    def result(self, array: Any) -> Any:
        """Return the caller's array if the call's result replaces it."""
        return next((owner for packed, owner in self.owners if packed is array), array)

    def end(self) -> None:
        host().copy_pairs(self.after)


def is_strided(x: Any) -> bool:
    """Return whether `x` is a host array that is not C-contiguous."""
    if isinstance(x, np.ndarray):
        return not x.flags.c_contiguous and not isinstance(x, np.ma.MaskedArray)
    if not is_a(x, "torch", "Tensor") or x.device.type != "cpu":
        return False
    return x.layout is sys.modules["torch"].strided and not x.is_contiguous()


def pack_strided(request: Request, rank: int) -> PackedCall:
    """Copy the strided arrays of a call; results are written back.

    Raises: ValueError where results cannot be written back.
    """
    spec, root = spec_of(request.collective), request.arguments.get("root", 0)
    gets = spec.writes(rank, root)
    call = PackedCall(request)
    for name, is_written in (("x", gets and spec.in_place and request.out is None), ("out", gets)):
        array = getattr(request, name)
        if not is_strided(array):
            continue
        view, packed = numpy_view(array), contiguous(array)
        if is_written:
            check_result(view, name)
            call.after.append((view, numpy_view(packed)))
        call.owners.append((packed, array))
        call.request = call.request._replace(**{name: packed})
    return call


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


class Fused:
    """Arrays of one dtype on one device as the one array of a collective, for one call at a time.

    `failure` says why they cannot be fused, if so: the collective that takes them refuses them on all ranks.

    >>> print(Fused([np.zeros(3), np.zeros((2, 2))]))
    fuse([3, 4], float64, cpu)
    """

    def __init__(self, arrays: Sequence[Any]):
        self.failure = ""
        self.buffer: Any = None  # the arrays for a collective, one behind the other
        try:
            if not isinstance(arrays, Iterable):
                raise ValueError(f"{arrays!r} is not a list of arrays: pass one, as fuse([x, y])")
            self.arrays = list(arrays)
            self.device, self.dtype, self.views = flat_views(self.arrays)
        except REFUSALS as error:
            self.failure = f"fuse: {error}"
            return
        self.lengths = [len(view) for view in self.views]

    def __str__(self) -> str:
        return "" if self.failure else f"fuse({self.lengths}, {self.dtype}, {self.device.name})"

    def __len__(self) -> int:
        return sum(self.lengths)

    def check(self, collective: str, out: Any, is_root: bool) -> None:
        """Refuse a call that cannot take fused arrays.

        Raises: ValueError with the remedy.
        """
        if collective not in TAKING:
            raise ValueError(f"takes no fused arrays: use {', '.join(TAKING)}, or call it for each array")
        if out is not None:
            raise ValueError("takes no out with fused arrays, which get the results themselves: omit it")
        spec, rank = COLLECTIVES[collective], 0 if is_root else 1
        for index, view in enumerate(self.views if spec.writes(rank, root=0) else ()):
            check_writable(view, f"array {index}")

    def copies(self, collective: str, is_root: bool) -> tuple[list[CopyPair], list[CopyPair]]:
        """Return the copies to the buffer ahead of a collective, and those from it after."""
        spec, rank = COLLECTIVES[collective], 0 if is_root else 1
        parts = split(self.buffer, self.lengths)
        before = zip(parts, self.views, strict=True) if spec.reads(rank, root=0) else ()
        after = zip(self.views, parts, strict=True) if spec.writes(rank, root=0) else ()
        return list(before), list(after)


def flat_views(arrays: Sequence[Any]) -> tuple[Device, np.dtype, Sequence[Any]]:
    """Return the device and dtype of arrays, and flat views of them.

    Raises: ValueError where there are none, they overlap, or devices or dtypes differ.
    """
    if not arrays:
        raise ValueError("no arrays are given: pass at least one")
    devices, views = zip(*map(flat, arrays), strict=True)
    one_of([device.name for device in devices], "device")
    one_of([device.device_name for device in devices], "device")
    dtype = one_of([view.dtype for view in views], "dtype")
    in_order = sorted((view for view in views if len(view)), key=pointer)
    if any(overlap(*pair) for pair in pairwise(in_order)):
        raise ValueError("arrays overlap: pass each part of memory once")
    return devices[0], dtype, views


def one_of(values: Sequence[Any], what: str) -> Any:
    """Return the value that is the same for all."""
    different = [value for value in values if value != values[0]]
    if different:
        raise ValueError(
            f"cannot fuse arrays of different {what}s ({values[0]}, {different[0]}): "
            f"fuse those of each {what} separately"
        )
    return values[0]


def pack_fused(request: Request, rank: int) -> PackedCall:
    """Copy fused arrays to a buffer; results are copied back.

    Raises: ValueError where they cannot be in it.
    """
    fused: Fused = request.x
    is_root = request.arguments.get("root") == rank
    fused.check(request.collective, request.out, is_root)
    fused.buffer = fused.device.empty(len(fused), fused.dtype)
    before, after = fused.copies(request.collective, is_root)
    fused.device.copy_pairs(before)
    packed = request._replace(x=fused.buffer, note=f"{request.note} of {fused}")
    return PackedCall(packed, after, [(fused.buffer, fused.arrays)])


def pack(request: Request, rank: int) -> tuple[PackedCall | None, str]:
    """Return a call on fused or strided arrays of the host as one on contiguous arrays, None for others.

    If its arrays are wrong, return why.
    """
    fused = request.x if isinstance(request.x, Fused) else None
    if fused is not None and fused.failure:
        return None, fused.failure
    try:
        if fused is not None:
            return pack_fused(request, rank) if fused.device is host() else None, ""
        if is_strided(request.x) or is_strided(request.out):
            return pack_strided(request, rank), ""
    except REFUSALS as error:
        return None, f"{request.collective}: {error}"
    return None, ""
