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
from collectives.runtime.backends.bound import Bound, telling
from collectives.runtime.call.arguments import REFUSALS
from collectives.runtime.call.packed import Fused, PackedCall, pack
from collectives.runtime.call.request import Request
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
    for the others.  A call that is not `signed` is resolved each time.  `failure` says why its arguments are refused.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        request: Request,
        signed: Signed | None,
        bound: Bound | None,
        call: LogEntry,
        ahead: Plan | None,
        packed: PackedCall | None = None,
        failure: str = "",
    ):
        self.dispatcher, self.request, self.signed, self.bound, self.ahead = dispatcher, request, signed, bound, ahead
        self.packed, self.failure = packed, failure
        super().__init__(call.name, None, dispatcher.progress, host() if signed else device_of(request), [])
        if bound:
            self.locate_in(bound)
        self.entry = self.entered = call
        self.keep = request.x, request.out
        self.inner: Plan | None = None  # the plan whose messages it runs
        self.resolving = self.has_begun = False
        self.pinned = [key for key in signed[2] if key] if signed else []
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
        assert self.signed is not None
        self.result, self.addresses, self.keys = bound.locate(self.request.x, self.request.out, *self.signed[1:3])

    def release(self) -> None:
        """Drop the references to the arrays, once the run has ended and its result is not needed."""
        self.request, self.result, self.keep = self.request._replace(x=None, out=None), None, None
        self.inner = None

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
        if self.bound is None and self.signed and (bound := self.dispatcher.bound.get(self.signed[0])):
            self.take(bound)  # of the same call ahead of this one
        has_differed = False
        while self.bound is None or not (yield from self.attempt()):
            has_differed = self.bound is not None
            self.entered.name = self.request.collective  # as ranks compare it
            self.resolving = True
            resolve = partial(self.resolve, has_differed, use_stream)
            is_alone = self.dispatcher.context.size == 1
            binding = resolve() if is_alone else (yield from self._progress.background.finish(resolve))
            self.resolving = False
            if isinstance(binding, Plan):
                yield from self.follow(binding)
                break
            self.take(binding)
        if self.packed:
            self.packed.end()
            self.result = self.packed.result(self.result)
        self.keep = self.packed = None

    def take(self, bound: Bound) -> None:
        if self.bound is None:
            self.locate_in(bound)
        self.bound, self.name = bound, bound.entry.name
        self.entered.name = self.name

    def resolve(self, has_differed: bool, use_stream: Callable[[], None]) -> Bound | Plan:
        """Agree on the call and bind it, in its turn; start a plan of it if it has no signature.  Collective.

        `has_differed`: the ranks have already found that their bindings differ.  `use_stream` makes the stream of the
        caller this thread's.
        """
        use_stream()
        dispatcher, call = self.dispatcher, self.entered
        dispatcher.order.turn = get_ident()
        try:
            if self.failure:
                dispatcher.refuse_call(call, self.failure)
            self.inner = None if has_differed else dispatcher.comparator.comparison
            resolved = dispatcher.resolver.resolve(call, self.request, compared=has_differed)
            self.inner = None
            with telling(dispatcher.progress, call):
                if self.signed:
                    return dispatcher.bind_call(call, self.signed, resolved)
                return dispatcher.binder.bind(resolved).start()
        finally:
            dispatcher.order.turn = None

    def follow(self, plan: Plan) -> Iterator[Waitable]:
        """Wait for the run of a plan, and take over its end."""
        self.inner, self.result = plan, plan.result
        self.name = self.entered.name = plan.name
        if plan.is_under_way:
            yield Predecessor(plan)
        self._last = self._event = plan.take_end()
        self._num_runs += 1

    def attempt(self) -> Generator[Waitable, None, bool]:
        """Run the binding, unless another rank would run a different one; return whether all have run it."""
        bound, dispatcher = self.bound, self.dispatcher
        assert bound is not None
        number, binding, own = self.entered.number * dispatcher.check, bound.number, bound.program
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
            self.inner = plan = bound.plan_at(self.addresses, self._progress)
            plan.prepare()
            yield from plan._run()
        return True


class Starter:
    """Starts calls on one communicator, without waiting for the other ranks."""

    def __init__(self, dispatcher: Dispatcher):
        self.dispatcher = dispatcher

    def start(self, collective: str, x: Any, out: Any, options: tuple) -> Plan:
        """Start a collective, for the caller to wait for, without waiting for the other ranks."""
        return self.plan_later(Request(collective, x, out, options)).start()

    def sign(self, request: Request) -> Signed | None:
        """Return a call's signature, if there are bindings of it that run without further agreement."""
        is_native = request.options[-1] == "mpi"  # waits inside MPI
        is_uneven = request.arguments.get("send_counts") is not None  # ranks exchange counts first
        if is_native or is_uneven:
            return None
        options = (*request.options, request.note) if request.note else request.options
        try:
            signed = sign(self.dispatcher.memory, request.collective, request.x, request.out, options)
            return (hashable(signed[0]), *signed[1:]) if signed[3] else None
        except Unsigned:
            return None

    def begin_bound(self, request: Request) -> Plan | None:
        """Start a call if it has been bound, and the ranks need not agree on it."""
        signed = self.sign(request)
        return self.plan_later(request, signed).start() if signed and signed[0] in self.dispatcher.bound else None

    def plan_later(self, request: Request, signed: Signed | None = None) -> StartedCall:
        """Make a plan for one run, counted as this call: a new one is agreed on when it runs."""
        order = self.dispatcher.order
        signed, packed, failure = signed or self.sign(request), None, ""
        if signed is None:
            packed, failure = pack(request, self.dispatcher.context.rank)
            if packed:
                request, signed = packed.request, self.sign(packed.request)
        bound = self.dispatcher.bound.get(signed[0]) if signed else None
        call = bound.entry.of_plan(bound.entry.name) if bound else LogEntry(self.dispatcher.calls, request.collective)
        call.enter(call_site=request.call_site)  # under way until it has ended: its run is not counted again
        plan = StartedCall(self.dispatcher, request, signed, bound, call, order.latest(), packed, failure)
        order.latest = weakref.ref(plan)
        return plan


def device_of(request: Request) -> Device:
    """Return the device of a call's arrays; the host for arguments that will be refused."""
    try:
        return request.x.device if isinstance(request.x, Fused) else flat(request.x)[0]
    except (AttributeError, *REFUSALS):
        return host() if request.out is None else device_of(request._replace(x=request.out, out=None))


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
