"""The choice of the back end that runs a call."""

from __future__ import annotations

from collectives.algorithms import Access
from collectives.arrays.device import host
from collectives.runtime.backends.bound import Backend, Bound
from collectives.runtime.backends.devices import DeviceBackend
from collectives.runtime.backends.direct import SharedMemoryBackend
from collectives.runtime.backends.message_schedules import MessageBackend
from collectives.runtime.backends.native_mpi import NativeBackend
from collectives.runtime.call.call import Call
from collectives.runtime.chooser import Choice
from collectives.runtime.comparator import Comparator
from collectives.runtime.context import Context
from collectives.runtime.lazy import Lazy
from collectives.runtime.plan import Plan


class Binder:
    """The back ends of one communicator."""

    def __init__(self, context: Context, comparator: Comparator):
        self.context, self.comparator = context, comparator
        self.native, self.messages = NativeBackend(context, comparator), MessageBackend(context, comparator)
        self.shared_memory = SharedMemoryBackend(context, comparator)
        self.devices = DeviceBackend(context, comparator, self.messages, self.native)

    @Lazy
    def short_messages(self) -> Backend:
        """Import the compiler."""
        from collectives.runtime.backends.short_messages import ShortMessageBackend

        return ShortMessageBackend(self.context, self.comparator)

    def backend(self, call: Call, choice: Choice | None) -> Backend:
        """Return the back end for a call.  Collective."""
        if call.device is not host():
            return self.devices
        if choice is None:
            return self.native
        if choice.row.access >= Access.STAGED:
            return self.shared_memory
        has_headers = self.comparator.by_messages and self.context.has_numba and call.fused is None
        if has_headers and self.comparator.headers.carry(call, choice.row):
            return self.short_messages
        return self.messages

    def plan(self, call: Call, choice: Choice | None) -> Plan:
        """Make a plan for the arrays of a call.  Collective."""
        plan = self.backend(call, choice).plan(call, choice)
        if call.fused is not None:
            plan.enclose(*call.fused.copies(call.collective, call.rank == call.root), call.fused.arrays)
        return plan

    def bind(self, call: Call, choice: Choice | None) -> Bound:
        """Bind the calls of a signature.  Collective."""
        return self.backend(call, choice).bind(call, choice)

    def free(self) -> None:
        self.messages.staging.clear()
        self.devices.buffers.pairs.clear()
