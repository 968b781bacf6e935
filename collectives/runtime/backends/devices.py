"""Calls on arrays of devices: bound to their addresses in symmetric memory, or to persistent buffers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, TypeGuard, cast

import numpy as np

from collectives.algorithms import Access
from collectives.arrays.addresses import address_of
from collectives.runtime.backends.bound import Bound
from collectives.runtime.backends.direct import direct_plan, program_binder
from collectives.runtime.backends.message_schedules import MessageBackend
from collectives.runtime.backends.native_mpi import NativeBackend
from collectives.runtime.call.call import Call
from collectives.runtime.call.operands import arrays_at, lent, moved
from collectives.runtime.chooser import Choice
from collectives.runtime.comparator import Comparator
from collectives.runtime.context import Context
from collectives.runtime.plan import Plan

if TYPE_CHECKING:
    from collectives.runtime.backends.channel import Channel
    from collectives.runtime.backends.on_device import DeviceProgram, KernelCalls, KernelProgram


class DeviceBackend:
    """Work on a device's stream, by kernels or between events; where ranks share no memory, messages.

    Arrays outside of symmetric memory are copied to persistent buffers, as the next call's may be at another address.
    """

    def __init__(self, context: Context, comparator: Comparator, messages: MessageBackend, native: NativeBackend):
        self.context, self.comparator = context, comparator
        self.messages, self.native = messages, native
        self.buffers = DeviceBuffers(context)

    def plan(self, call: Call, choice: Choice | None) -> Plan:
        if is_direct(choice):
            return direct_plan(self.context, call, choice)
        return (self.messages if choice else self.native).plan(call, choice)

    def bind(self, call: Call, choice: Choice | None) -> Bound:
        here, carrier = lent(call), self.carrier(call, choice)
        bind_plan = partial(self.plan_on, choice, carrier)
        if call.moves:
            is_shared = call.all_move and choice is not None and choice.shared is not None
            buffered = BufferedPlan(here, self.buffers.pair(call, is_shared), bind_plan)
            plan, plan_at = buffered.plan, buffered.on
        else:
            plan = bind_plan(here)
            plan_at = lambda addresses: plan  # noqa: E731  always the same
        compare = self.comparator.before_runs_of(call.binding)
        if carrier:
            compare = cast("DeviceProgram | KernelProgram", plan.rounds[0]).use
        return Bound(call, choice.row.name if choice else "mpi", lambda addresses, _: plan_at(addresses), compare)

    def plan_on(self, choice: Choice | None, carrier: Channel | KernelCalls | None, call: Call) -> Plan:
        """Make a plan of bound calls.  Collective."""
        if is_direct(choice):
            return direct_plan(self.context, call, choice, carrier)
        if choice is None:
            return self.native.plan(call, choice)
        return self.messages.plan(call, choice, self.messages.staging_on(call))

    def carrier(self, call: Call, choice: Choice | None) -> Channel | KernelCalls | None:
        """Return what compares calls bound on devices, if they do: kernels, or the hosts' channel.  Collective.

        Kernels are launched before other ranks' answers, and so only for calls that all ranks bind in the same way: not
        if one has an `out` of its own, or counts that the others do not know.
        """
        if choice is None or choice.shared is None or not is_direct(choice):
            return None
        if not choice.shared.has_barriers:
            return self.comparator.channel
        if call.send_counts is not None or {"root", "out"} <= set(call.spec.takes):
            return None
        if self.comparator.kernels is None:
            self.comparator.kernels = program_binder(self.context, choice.shared).kernel_calls()
        return self.comparator.kernels


def is_direct(choice: Choice | None) -> TypeGuard[Choice]:
    """Return whether ranks access each other's memory, in one program."""
    return choice is not None and choice.row.access >= Access.STAGED


class DeviceBuffers:
    """Persistent memory of a device for the two arrays of a call: calls run one after the other on its stream.

    A pair that is too short is replaced by a longer one.
    """

    def __init__(self, context: Context):
        self.context = context
        self.pairs: dict[tuple[str, bool], tuple[Any, Any]] = {}

    def pair(self, call: Call, is_shared: bool) -> tuple[Any, Any]:
        """Return buffers as long as a call's arrays.  Collective where ranks are to share them."""
        nbytes = max(0 if view is None else view.nbytes for view in (call.flat, call.operands.out))
        if is_shared:
            (nbytes,) = self.context.agreement.highest([nbytes])
        key = call.device.device_name, is_shared
        if key not in self.pairs or self.pairs[key][0].nbytes < nbytes:
            empty = partial(self.context.memory.empty, call.device) if is_shared else call.device.empty
            count = 1 << max(nbytes - 1, 0).bit_length()
            self.pairs[key] = empty(count, np.dtype(np.uint8)), empty(count, np.dtype(np.uint8))
        return self.pairs[key]


class BufferedPlan:
    """A plan on buffers, for calls whose arrays are anywhere on a device.

    `call` is one without its caller's arrays; `bind` makes a plan for one.
    """

    def __init__(self, call: Call, buffers: tuple[Any, Any], bind: Callable[[Call], Plan]):
        self.call, self.buffers = call, buffers
        self.on_buffers = moved(call, tuple(map(address_of, buffers)))
        self.is_read, self.is_written = (of(call.rank, call.root) for of in (call.spec.reads, call.spec.writes))
        self.plan = bind(self.on_buffers)
        self.before, self.after, self.plan.only = self.plan.before, self.plan.after, None

    def on(self, addresses: tuple[int, ...]) -> Plan:
        """Return the plan for a call's arrays at two addresses."""
        (x, out), here = arrays_at(self.call, addresses), self.on_buffers
        result, source = (x, here.x) if out is None else (out, here.out)
        self.plan.before = [*([(here.x, x)] if self.is_read else []), *self.before]
        self.plan.after = [*self.after, *([(result, source)] if self.is_written else [])]
        return self.plan
