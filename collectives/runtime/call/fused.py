"""Several arrays as the one array of a collective."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from collectives.arrays.addresses import overlap, pointer
from collectives.arrays.device import Device
from collectives.arrays.packing import Packing
from collectives.arrays.views import flat, split
from collectives.runtime.call.checks import REFUSALS, check_writable
from collectives.runtime.plan import CopyPair
from collectives.schedule.spec import COLLECTIVES, Chunks

# The collectives whose result is as long as each rank's input.
TAKING = [name for name, spec in COLLECTIVES.items() if spec.in_place and spec.gives is not Chunks.NONE]


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
        packing = Packing(self.buffer, list(zip(self.views, split(self.buffer, self.lengths), strict=True)))
        before = packing.loads if spec.reads(rank, root=0) else []
        return before, [*packing.pairs] if spec.writes(rank, root=0) else []


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
