"""A call that its caller does not wait for at once, as a run of its signature's binding."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from functools import partial
from threading import get_ident
from typing import TYPE_CHECKING, Any

from collectives.arrays.device import Device, host
from collectives.arrays.views import flat
from collectives.runtime.backends.bound import Bound
from collectives.runtime.call.call import Call
from collectives.runtime.call.checks import REFUSALS
from collectives.runtime.call.fused import Fused
from collectives.runtime.call.packed import pack
from collectives.runtime.call.signature import Signed, Unsigned, hashable, sign
from collectives.runtime.dispatch import Dispatcher
from collectives.runtime.plan import NOWHERE, MismatchError, Plan, Predecessor
from collectives.runtime.progress import Waitable
from collectives.runtime.reports.call_log import LogEntry

if TYPE_CHECKING:
    from collectives.runtime.backends.shared_memory import Program


class StartedCall(Plan):
    """A started call.  It begins when the previous one on its communicator has ended.

    All bound calls share one channel, where programs run one after the other, in the same order on all ranks.  If the
    ranks' bindings turn out to differ, or this rank has none, they resolve the call in its turn, by a thread that waits
    for the others.  A call without a signature is resolved each time.  `failure` says why its arguments are refused.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        call: Call,
        bound: Bound | None,
        ahead: Plan | None,
        failure: str = "",
    ):
        self.dispatcher, self.call, self.bound, self.ahead, self.failure = dispatcher, call, bound, ahead, failure
        device = host() if call.signed else device_of(call.x, call.out)
        super().__init__(call.entry.name, None, dispatcher.progress, device, [], keep=(call.x, call.out))
        if bound:
            self.locate_in(bound)
        self.entry = call.entry
        self.inner: Plan | None = None  # the plan whose messages it runs
        self.resolving = self.has_begun = False
        self.pinned = [key for key in call.signed[2] if key] if call.signed else []
        if self.pinned:
            dispatcher.windows.pin(self.pinned)

    def begin(self) -> None:
        if self.has_begun:
            raise RuntimeError(f"{self.name} has been started as a call, which runs once: make a plan, to run it often")
        self.has_begun = True
        super().begin()

    def _end(self) -> None:
        if self.pinned:
            self.dispatcher.windows.unpin(self.pinned)
            self.pinned = []
        super()._end()

    def locate_in(self, bound: Bound) -> None:
        call = self.call
        assert call.signed is not None
        self.result, self.addresses, self.keys = bound.locate(call.x, call.out, *call.signed[1:3])

    def release(self) -> None:
        """Drop the references to the arrays, once the run has ended and its result is not needed."""
        self.call, self.result, self.keep, self.inner = Call(self.call.collective), None, None, None

    def awaits(self) -> str:
        if self.ahead:
            return f"the end of {self.ahead.name}"
        words = self.inner.awaits() if self.inner else super().awaits()
        return f"where the ranks agree on it, {words}" if self.resolving else words

    def _run(self) -> Iterator[Waitable]:
        self.device.begin()
        use_stream = self.device.share_stream()
        if self.ahead is not None and self.ahead.is_under_way:
            yield Predecessor(self.ahead)
        self.ahead = None
        call = self.call
        if self.bound is None and call.signed and (bound := self.dispatcher.bound.get(call.signed[0])):
            self.take(bound)  # of the same call ahead of this one
        has_differed = False
        while self.bound is None or not (yield from self.attempt()):
            has_differed = self.bound is not None
            call.entry.name = call.collective  # as ranks compare it
            self.resolving = True
            resolve = partial(self.resolve, has_differed, use_stream)
            is_alone = self.dispatcher.context.size == 1
            binding = resolve() if is_alone else (yield from self._progress.background.finish(resolve))
            self.resolving = False
            if isinstance(binding, Plan):
                yield from self.follow(binding)
                break
            self.take(binding)
        host().copy_pairs(call.after)
        self.result, self.keep = call.result(self.result), None

    def take(self, bound: Bound) -> None:
        if self.bound is None:
            self.locate_in(bound)
        self.bound, self.name = bound, bound.entry.name
        self.call.entry.name = self.name

    def resolve(self, has_differed: bool, use_stream: Callable[[], None]) -> Bound | Plan:
        """Agree on the call and bind it, in its turn; start a plan of it if it has no signature.  Collective.

        `has_differed`: the ranks have already found that their bindings differ.  `use_stream` makes the stream of the
        caller this thread's.
        """
        use_stream()
        dispatcher, call = self.dispatcher, self.call
        dispatcher.order.turn = get_ident()
        try:
            if self.failure:
                dispatcher.refuse_call(call.entry, self.failure)
            self.inner = None if has_differed else dispatcher.comparator.comparison
            choice = dispatcher.resolve(call, compared=has_differed)
            self.inner = None
            return dispatcher.bind(call, choice) if call.signed else dispatcher.bind_plan(call, choice).start()
        finally:
            dispatcher.order.turn = None

    def follow(self, plan: Plan) -> Iterator[Waitable]:
        """Wait for the run of a plan, and take over its end."""
        self.inner, self.result = plan, plan.result
        self.name = self.call.entry.name = plan.name
        if plan.is_under_way:
            yield Predecessor(plan)
        self._last = self._event = plan.take_end()
        self._num_runs += 1

    def attempt(self) -> Generator[Waitable, None, bool]:
        """Run the binding, unless another rank would run a different one; return whether all have run it."""
        bound, dispatcher = self.bound, self.dispatcher
        assert bound is not None
        number, binding, own = self.call.entry.number * dispatcher.check, bound.number, bound.program
        program: Program | None = own or dispatcher.comparator.comparison.only
        arrays = (self.addresses, self.keys) if own else (NOWHERE, NOWHERE)
        self.inner = None
        if program is None:  # without Numba
            self.inner = comparison = dispatcher.comparator.comparison
            comparison.use(number, binding)
            try:
                yield from comparison._run()
            except MismatchError:
                return False
        else:
            self._round = program
            program.use(number, *arrays, binding)
            arrival = Comparison(program)
            if not arrival.test():
                yield arrival
            if arrival.has_failed:
                return False
        if bound.program is None:
            self.inner = plan = bound.rebind(self.addresses, bound.entry)
            plan.prepare()
            yield from plan._run()
        return True


class Starter:
    """Starts calls on one communicator, without waiting for the other ranks."""

    def __init__(self, dispatcher: Dispatcher):
        self.dispatcher = dispatcher

    def start(self, collective: str, x: Any, out: Any, options: tuple) -> Plan:
        """Start a collective, for the caller to wait for, without waiting for the other ranks."""
        return self.started_plan(Call.of(collective, x, out, options)).start()

    def begin_bound(self, call: Call) -> Plan | None:
        """Start a call if it has been bound, and the ranks need not agree on it."""
        call.signed = self.sign(call)
        is_bound = call.signed and call.signed[0] in self.dispatcher.bound
        return self.started_plan(call).start() if is_bound else None

    def started_plan(self, call: Call) -> StartedCall:
        """Make a plan for one run, counted as this call: a new one is agreed on when it runs."""
        order, failure = self.dispatcher.order, ""
        call.signed = call.signed or self.sign(call)
        if call.signed is None:
            packed, failure = pack(call, self.dispatcher.context.rank)
            if packed:
                call, call.signed = packed, self.sign(packed)
        bound = self.dispatcher.bound.get(call.signed[0]) if call.signed else None
        name = call.collective
        call.entry = bound.entry.plan_entry(bound.entry.name) if bound else LogEntry(self.dispatcher.calls, name)
        call.entry.enter(call_site=call.call_site)  # under way until it has ended: its run is not counted again
        plan = StartedCall(self.dispatcher, call, bound, order.latest(), failure)
        order.latest = weakref.ref(plan)
        return plan

    def sign(self, call: Call) -> Signed | None:
        """Return a call's signature, if there are bindings of it that run without further agreement."""
        is_native = call.argument("algorithm") == "mpi"  # waits inside MPI
        is_uneven = call.argument("send_counts") is not None  # ranks exchange counts first
        if is_native or is_uneven:
            return None
        options = (*call.options, call.note) if call.note else call.options
        try:
            signed = sign(self.dispatcher.memory, call.collective, call.x, call.out, options)
            return (hashable(signed[0]), *signed[1:]) if signed[3] else None
        except Unsigned:
            return None


def device_of(x: Any, out: Any) -> Device:
    """Return the device of a call's arrays; the host for arguments that will be refused."""
    try:
        return x.device if isinstance(x, Fused) else flat(x)[0]
    except (AttributeError, *REFUSALS):
        return host() if out is None else device_of(out, None)


@dataclass
class Comparison(Waitable):
    """A program's run, which ends with a failure where ranks run different ones."""

    program: Program
    has_failed: bool = False

    @property
    def num_barriers(self) -> int:
        return self.program.num_barriers

    def test(self) -> bool:
        return self._look(self.program.test)

    def spin(self) -> bool:
        return self._look(self.program.spin)

    def _look(self, look: Callable[[], bool]) -> bool:
        try:
            return look()
        except MismatchError:
            self.has_failed = True
            return True
