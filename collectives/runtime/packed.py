"""Calls on host arrays that are not contiguous: packed before a call, and written back after it."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from collectives.arrays.device import host
from collectives.arrays.views import is_a, numpy_view
from collectives.runtime.arguments import check_writable
from collectives.schedule.spec import spec_of

if TYPE_CHECKING:
    from collectives.runtime.fuse import Fused
    from collectives.runtime.plan import CopyPair
    from collectives.runtime.resolve import Request


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
        for target, source in self.after:
            host().copy(target, source)


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


def pack_fused(request: Request, rank: int) -> PackedCall:
    """Copy fused arrays to a buffer; results are copied back.

    Raises: ValueError where they cannot be in it.
    """
    fused: Fused = request.x
    is_root = request.arguments.get("root") == rank
    fused.check(request.collective, request.out, is_root)
    fused.buffer = fused.device.empty(len(fused), fused.dtype)
    before, after = fused.copies(request.collective, is_root)
    for target, source in before:
        fused.device.copy(target, source)
    packed = request._replace(x=fused.buffer, note=f"{request.note} of {fused}")
    return PackedCall(packed, after, [(fused.buffer, fused.arrays)])
