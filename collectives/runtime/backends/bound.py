"""Bindings of calls on which the ranks agree, each by the backend that its algorithm and its memory need."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from operator import mul
from textwrap import shorten
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard, cast

from collectives.algorithms import Access, Algorithm
from collectives.arrays.addresses import address_of
from collectives.arrays.device import host
from collectives.job.errors import CommunicationError, InputError
from collectives.runtime.backends.binding import Binder, MessageBinder
from collectives.runtime.backends.device_buffers import BufferedPlan, DeviceBuffers
from collectives.runtime.backends.messages import StagingBuffers
from collectives.runtime.backends.native_mpi import native_plan
from collectives.runtime.call.arguments import Arguments
from collectives.runtime.call.operands import Operands, operands_of
from collectives.runtime.call.packed import Fused
from collectives.runtime.call.signature import Signed, address_of_result
from collectives.runtime.chooser import Choice
from collectives.runtime.comparator import Comparator
from collectives.runtime.context import Context
from collectives.runtime.plan import FAILURES, NOWHERE, Plan
from collectives.runtime.progress import Progress
from collectives.runtime.reports.call_log import LogEntry

if TYPE_CHECKING:
    from collectives.runtime.backends.channel import Channel
    from collectives.runtime.backends.headers import Headers
    from collectives.runtime.backends.on_device import DeviceProgram, KernelCalls, KernelProgram
    from collectives.runtime.backends.shared_memory import Program

MOST_PLANS = 8  # addresses for which messages of one signature are bound
LONGEST_WORDS = 500  # of an error that is sent to other ranks


class Resolved(NamedTuple):
    """A call on which the ranks agree: its arguments on this rank, and its algorithm."""

    a: Arguments
    operands: Operands
    choice: Choice | None  # None for the MPI library's own
    fused: Fused | None
    number: int  # of its binding: the same on all ranks
    all_move: bool = False  # whether all ranks' arrays are copied to buffers


class Bound:
    """The binding of calls of one signature.

    `number` is unique, and the same on all ranks.  A direct program takes any addresses of arrays; a schedule of
    messages is bound to them, by `rebind`.  `new` makes a call's result, where that is a new array.
    """

    def __init__(self, number: int, call: LogEntry, plan: Plan | None, resolved: Resolved):
        a, o = resolved.a, resolved.operands
        self.number, self.entry, self.plan = number, call, plan
        self.program: Program | None = plan.only if plan and a.device is host() else None
        self.rebind: Callable[[tuple[int, ...]], Plan] | None = None
        self.buffered: BufferedPlan | None = None  # takes any arrays on devices
        self.comparing: DeviceProgram | KernelProgram | None = None  # on a device: compares at the first barrier
        self.plans: dict[tuple[int, ...], Plan] = {}  # plans by addresses
        self.has_result = o.result is not None
        self.returns_x = o.result is a.x and a.x is not a.out  # on ranks without a result, for any `out`
        self.has = o.source is not None, o.out is not None
        is_new = self.has_result and o.result is not a.x and o.result is not a.out
        self.new: Callable[[Any], Any] | None = o.new if is_new else None
        self.is_plain = self.has_result and self.new is None and all(self.has)

    def locate(self, x: Any, out: Any, addresses: tuple, keys: tuple) -> tuple[Any, tuple, tuple]:
        """Return the result's array, and the addresses and windows of a call's two arrays, 0 for none."""
        result = x if out is None or self.returns_x else out
        if self.new is not None and out is None:
            result = self.new(x)
            addresses, keys = (addresses[0], address_of_result(result)), (keys[0], 0)
        elif not all(self.has):
            addresses, keys = (tuple(map(mul, self.has, pair)) for pair in (addresses, keys))
        return result if self.has_result else None, addresses, keys

    def plan_at(self, addresses: tuple[int, ...], progress: Progress) -> Plan:
        """Return the plan of a schedule of messages for arrays at two addresses."""
        plan = self.plans.get(addresses)
        if plan is None:
            assert self.rebind is not None
            if len(self.plans) == MOST_PLANS:
                del self.plans[next(iter(self.plans))]
            with telling(progress, self.entry):
                plan = self.plans[addresses] = self.rebind(addresses)
        return plan


@contextmanager
def telling(progress: Progress, call: LogEntry) -> Iterator[None]:
    """Bind a call's resources; an error on this rank is sent to the others, which would wait in vain.

    Raises: CommunicationError.
    """
    try:
        yield
    except (InputError, *FAILURES):  # raised on all ranks, or sent to the others already
        raise
    except Exception as error:
        words = f"{call.latest()}: {shorten(f'{type(error).__name__}: {error}', LONGEST_WORDS)}"
        progress.tell(words)
        raise CommunicationError(words) from error


class CallBinder:
    """The binder of one communicator's calls."""

    def __init__(self, context: Context, comparator: Comparator):
        self.context, self.comparator = context, comparator
        self.binder, self.buffers = Binder(context), DeviceBuffers(context)
        self.staging: dict[str, StagingBuffers] = {}  # of calls, which run one after the other, by device

    def bind(self, resolved: Resolved, staging: StagingBuffers | None = None) -> Plan:
        """Make a plan for the arrays of a call.  Collective."""
        a, o, choice, fused, *_ = resolved
        if choice is None:
            plan = native_plan(a, o, self.context.mpi, self.context.progress)
        else:
            plan = self.binder.plan(a, o, choice, staging)
        if fused:
            plan.enclose(*fused.copies(a.collective, a.rank == a.root), fused.arrays)
        return plan

    def bind_short(self, resolved: Resolved) -> Plan | None:
        """Make a plan of a short collective between nodes, as one program; None for others.  Collective."""
        a, o, choice, fused, *_ = resolved
        if fused or not self.carries(choice, a):
            return None
        from collectives.runtime.backends.headers import Headers  # it imports the compiler

        headers = Headers(self.context)
        plan = self.plan_with_headers(headers, a, choice.row, binding=1)
        plan.only.use(0, (address_of(o.source), address_of(o.out)), NOWHERE)
        plan.only.messages += headers.arrivals.values()
        plan.result, plan.keep = o.result, (o.source, o.out)
        return plan

    def plan_with_headers(self, headers: Headers, a: Arguments, row: Algorithm, binding: int) -> Plan:
        """Make a plan whose only step is a program of messages with headers.  Collective."""
        from collectives.runtime.backends.message_programs import with_headers  # it imports the compiler

        program = with_headers(headers, a, row, binding)
        return Plan(f"{a.collective} {row.name}", None, self.context.progress, host(), [program], only=program)

    def carries(self, choice: Choice | None, a: Arguments) -> TypeGuard[Choice]:
        """Return whether the vector of an agreed call travels along with the headers by which nodes compare calls."""
        if choice is None or not self.comparator.by_messages or not self.context.has_numba:
            return False
        return self.comparator.headers.carry(a, choice.row, choice.facts)

    def bind_moved(self, resolved: Resolved, staging: StagingBuffers, a: Arguments) -> Plan:
        """Make a plan like that of a call for other device arrays, which compares calls where possible.  Collective."""
        resolved = resolved._replace(a=a, operands=operands_of(a))
        if (carrier := self.where_devices_compare(resolved)) is None:
            return self.bind(resolved, staging)
        assert resolved.choice is not None
        return self.binder.direct(a, resolved.operands, resolved.choice, carrier, resolved.number)

    def where_devices_compare(self, resolved: Resolved) -> Channel | KernelCalls | None:
        """Return what compares calls bound on devices: kernels, or the hosts' channel.  Collective.

        Kernels are launched before other ranks' answers, and so only for calls that all ranks bind in the same way: not
        if one has an `out` of its own, or counts that the others do not know.
        """
        a, choice = resolved.a, resolved.choice
        if choice is None or choice.shared is None or choice.row.access < Access.STAGED:
            return None
        if not choice.shared.has_barriers:
            return self.comparator.channel
        if a.send_counts is not None or {"root", "out"} <= set(a.spec.takes):
            return None
        if self.comparator.kernels is None:
            self.comparator.kernels = self.binder.programs(choice.shared).kernel_calls()
        return self.comparator.kernels

    def bind_call(self, call: LogEntry, signed: Signed, resolved: Resolved) -> Bound:
        """Bind the calls of a signature.  Collective."""
        o, choice, number = resolved.operands, resolved.choice, resolved.number
        a = resolved.a.lent(None if o.out is o.source else o.out)  # so that no array of the caller's is kept alive
        collective = a.collective
        plan = rebind = buffered = None
        *_, on_host, moves = signed
        staging = self.staging.setdefault(a.device.device_name, StagingBuffers(a.device))
        if choice is not None and choice.row.access >= Access.STAGED and on_host:
            plan = self.binder.direct(a, operands_of(a), choice, self.comparator.channel, number)
        elif self.carries(choice, a):
            plan = self.plan_with_headers(self.comparator.headers, a, choice.row, number)
        elif on_host:
            messages = choice and MessageBinder(self.context, collective, choice, self.binder, staging)
            rebind = partial(self.rebind, a, messages)
        elif moves:
            is_shared = resolved.all_move and choice is not None and choice.shared is not None
            buffers = self.buffers.pair(a, o, is_shared)
            buffered = BufferedPlan(a, buffers, partial(self.bind_moved, resolved, staging))
        else:
            plan = self.bind_moved(resolved, staging, a)
        name = f"{collective} {choice.row.name if choice else 'mpi'}"
        bound = Bound(number, call.of_plan(name), plan, resolved)
        bound.rebind, bound.buffered = rebind, buffered
        device_plan = buffered.plan if buffered else plan
        if device_plan and not on_host and self.where_devices_compare(resolved):
            bound.comparing = cast("DeviceProgram | KernelProgram", device_plan.rounds[0])
        bound.entry.number = call.number
        return bound

    def rebind(self, a: Arguments, messages: MessageBinder | None, addresses: tuple[int, ...]) -> Plan:
        """Make a plan like that of `a` for arrays at two other addresses."""
        a = a.moved(addresses)
        operands = operands_of(a)
        if messages is None:
            return native_plan(a, operands, self.context.mpi, self.context.progress)
        return messages.plan(a, operands)

    def free(self) -> None:
        self.staging.clear()
        self.buffers.pairs.clear()
