"""Persistent buffers for arrays on devices that are not in symmetric memory."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from collectives.arrays.addresses import address_of
from collectives.runtime.call.arguments import Arguments
from collectives.runtime.call.operands import Operands
from collectives.runtime.context import Context
from collectives.runtime.plan import Plan


class DeviceBuffers:
    """Persistent memory of a device for the two arrays of a call: calls run one after the other on its stream.

    A pair that is too short is replaced by a longer one.
    """

    def __init__(self, context: Context):
        self.context = context
        self.pairs: dict[tuple[str, bool], tuple[Any, Any]] = {}

    def pair(self, a: Arguments, o: Operands, is_shared: bool) -> tuple[Any, Any]:
        """Return buffers as long as a call's arrays.  Collective where ranks are to share them."""
        nbytes = max(0 if view is None else view.nbytes for view in (a.flat, o.out))
        if is_shared:
            (nbytes,) = self.context.agreement.highest([nbytes])
        key = a.device.device_name, is_shared
        if key not in self.pairs or self.pairs[key][0].nbytes < nbytes:
            empty = partial(self.context.memory.empty, a.device) if is_shared else a.device.empty
            count = 1 << max(nbytes - 1, 0).bit_length()
            self.pairs[key] = empty(count, np.dtype(np.uint8)), empty(count, np.dtype(np.uint8))
        return self.pairs[key]


class BufferedPlan:
    """A plan on buffers, for calls whose arrays are anywhere on a device.

    `a` is a call without its caller's arrays; `bind` makes a plan for one.
    """

    def __init__(self, a: Arguments, buffers: tuple[Any, Any], bind: Callable[[Arguments], Plan]):
        self.call, self.buffers = a, buffers
        self.on_buffers = a.moved(tuple(map(address_of, buffers)))
        self.is_read, self.is_written = (of(a.rank, a.root) for of in (a.spec.reads, a.spec.writes))
        self.plan = bind(self.on_buffers)
        self.before, self.after, self.plan.only = self.plan.before, self.plan.after, None

    def on(self, addresses: tuple[int, ...]) -> Plan:
        """Return the plan for a call's arrays at two addresses."""
        (x, out), here = self.call.arrays_at(addresses), self.on_buffers
        result, source = (x, here.x) if out is None else (out, here.out)
        self.plan.before = [*([(here.x, x)] if self.is_read else []), *self.before]
        self.plan.after = [*self.after, *([(result, source)] if self.is_written else [])]
        return self.plan
