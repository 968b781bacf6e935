"""Several small arrays as one: copied together, sent at once, copied back."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from collectives.arrays.device import Device
from collectives.arrays.views import flat, overlap, pointer
from collectives.runtime.arguments import Arguments, check_writable
from collectives.runtime.operands import split
from collectives.runtime.plan import Plan
from collectives.schedule.spec import COLLECTIVES, Chunks

# The collectives whose result is as long as what each rank gives.
TAKING = [name for name, spec in COLLECTIVES.items() if spec.in_place and spec.gives is not Chunks.NONE]


class Parts:
    """Arrays of one dtype on one device, checked as far as one rank can.

    >>> import numpy as np
    >>> print(Parts([np.zeros(3), np.zeros((2, 2))]))
    fuse([3, 4], float64, cpu)
    """

    def __init__(self, arrays: Sequence[Any]):
        self.arrays = list(arrays)
        if not self.arrays:
            raise ValueError("no arrays are given: pass at least one")
        devices, self.views = zip(*map(flat, self.arrays), strict=True)
        one_of([device.name for device in devices], "device", str)
        one_of([device.place for device in devices], "device", str)
        self.device: Device = devices[0]
        self.dtype = one_of([view.dtype for view in self.views], "dtype", str)
        self.lengths = [len(view) for view in self.views]
        in_order = sorted((view for view in self.views if len(view)), key=pointer)
        if any(overlap(*views) for views in pairwise(in_order)):
            raise ValueError("arrays overlap: pass each part of memory once")

    def __str__(self) -> str:
        return f"fuse({self.lengths}, {self.dtype}, {self.device.name})"


class Fused:
    """Arrays, and the flat buffer where a collective finds them one behind the other: for one call at a time."""

    def __init__(self, parts: Parts, buffer: Any):
        self.arrays, self.views, self.buffer = parts.arrays, parts.views, buffer
        self.places = split(buffer, parts.lengths)
        self.layout = str(parts)

    def check(self, a: Arguments) -> None:
        """Refuse what fused arrays cannot be in.

        Raises: ValueError with the remedy.
        """
        if a.collective not in TAKING:
            raise ValueError(f"takes no fused arrays: use {', '.join(TAKING)}, or call it for each array")
        if a.out is not None:
            raise ValueError("takes no out with fused arrays, which get the results themselves: leave it out")
        for index, view in enumerate(self.views if a.spec.writes(a.rank, a.root) else ()):
            check_writable(view, f"array {index}")

    def enclose(self, plan: Plan, a: Arguments) -> None:
        """Let a plan for the buffer begin with the arrays and end with them."""
        before = zip(self.places, self.views, strict=True) if a.spec.reads(a.rank, a.root) else ()
        after = zip(self.views, self.places, strict=True) if a.spec.writes(a.rank, a.root) else ()
        plan.enclose(before, after, self.arrays)


def one_of(values: Sequence[Any], what: str, name: Any) -> Any:
    """The value that all have in common."""
    different = [value for value in values if value != values[0]]
    if different:
        raise ValueError(
            f"arrays of {what} {name(values[0])} and {name(different[0])} do not go together: fuse those of each {what}"
        )
    return values[0]
