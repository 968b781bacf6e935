"""A call that its caller does not wait for at once, as a run of its signature's binding."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from functools import partial
from threading import get_ident
from typing import TYPE_CHECKING

from collectives.arrays.device import Device, host
from collectives.arrays.views import flat
from collectives.runtime.call.arguments import REFUSALS
from collectives.runtime.call.packed import Fused, PackedCall
from collectives.runtime.plan import MismatchError, Plan
from collectives.runtime.progress import Waitable
from collectives.runtime.reports.call_log import Call

if TYPE_CHECKING:
    from collectives.runtime.backends.shared_memory import Program
    from collectives.runtime.call.signature import Signed
    from collectives.runtime.resolve import Bound, Request, Resolver


NOWHERE = (0, 0)  # the addresses and windows of no arrays


class StartedCall(Plan):
    """A started call.  It begins when the previous one on its communicator has ended.

    All bound calls share one channel, where programs run one after the other, in the same order on all ranks.  If the
    ranks' bindings turn out to differ, or this rank has none, they resolve the call in its turn, by a thread that waits
    for the others.  A call that is not `signed` is resolved each time.  `failure` says why its arguments are refused.
    """

    def __init__(
        self,
        resolver: Resolver,
        request: Request,
        signed: Signed | None,
        bound: Bound | None,
        call: Call,
        ahead: Plan | None,
        packed: PackedCall | None = None,
        failure: str = "",
    ):
        self.resolver, self.request, self.signed, self.bound, self.ahead = resolver, request, signed, bound, ahead
        self.packed, self.failure = packed, failure
        super().__init__(call.name, None, resolver.progress, host() if signed else device_of(request), [])
        if bound:
            self.place_in(bound)
        self.call = self.entered = call
        self.keep = request.x, request.out
        self.inner: Plan | None = None  # the plan whose messages it runs
        self.resolving = False
        self.pinned = [key for key in signed[2] if key] if signed else []
        if self.pinned:
            resolver.windows.pin(self.pinned)

    def _end(self) -> None:
        if self.pinned:
            self.resolver.windows.unpin(self.pinned)
            self.pinned = []
        super()._end()

    def place_in(self, bound: Bound) -> None:
        assert self.signed is not None
        self.result, self.addresses, self.keys = bound.place(self.request.x, self.request.out, *self.signed[1:3])

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
        if self.bound is None and self.signed and (bound := self.resolver.bound.get(self.signed[0])):
            self.take(bound)  # of the same call ahead of this one
        has_differed = False
        while self.bound is None or not (yield from self.attempt()):
            has_differed = self.bound is not None
            self.entered.name = self.request.collective  # as ranks compare it
            self.resolving = True
            resolve = partial(self.resolve, has_differed, use_stream)
            is_alone = self.resolver.context.size == 1
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
            self.place_in(bound)
        self.bound, self.name = bound, bound.call.name
        self.entered.name = self.name

    def resolve(self, has_differed: bool, use_stream: Callable[[], None]) -> Bound | Plan:
        """Agree on the call and bind it, in its turn; start a plan of it if it has no signature.  Collective.

        `has_differed`: the ranks have already found that their bindings differ.  `use_stream` makes the stream of the
        caller this thread's.
        """
        use_stream()
        resolver, call = self.resolver, self.entered
        resolver.turn = get_ident()
        try:
            if self.failure:
                resolver.refuse_call(call, self.failure)
            self.inner = None if has_differed else resolver.comparison
            resolved = resolver.resolve(call, self.request, compared=has_differed)
            self.inner = None
            with resolver.telling(call):
                if self.signed:
                    return resolver.bind_call(call, self.signed, resolved)
                return resolver.bind(resolved).start()
        finally:
            resolver.turn = None

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
        bound, resolver = self.bound, self.resolver
        assert bound is not None
        number, binding, own = self.entered.number * resolver.check, bound.number, bound.program
        program: Program | None = own or resolver.comparison.only
        places = (self.addresses, self.keys) if own else (NOWHERE, NOWHERE)
        self.inner = None
        if program is None:  # without Numba
            self.inner = comparison = resolver.comparison
            comparison.use(number, binding)
            try:
                yield from comparison._run()
            except MismatchError:
                return False
        else:
            self._round = program
            program.use(number, *places, binding)
            arrival = Comparison(program)
            if not arrival.test():
                yield arrival
            if arrival.has_failed:
                return False
        if bound.program is None:
            self.inner = plan = resolver.plan_at(bound, self.addresses)
            plan.prepare()
            yield from plan._run()
        return True


def device_of(request: Request) -> Device:
    """Return the device of a call's arrays; the host for arguments that will be refused."""
    try:
        return request.x.device if isinstance(request.x, Fused) else flat(request.x)[0]
    except (AttributeError, *REFUSALS):
        return host() if request.out is None else device_of(request._replace(x=request.out, out=None))


class Predecessor(Waitable):
    """A started call that another one waits for: by its `run`, as for a plan, or as a step of its own run.

    Its errors are raised only for its own caller.
    """

    def __init__(self, plan: Plan):
        self.plan, self.device = plan, plan.device

    def test(self) -> bool:
        return not self.plan.is_under_way

    run_only = test

    def begin(self) -> None:
        """Do nothing: it has begun already."""

    def wait(self, limit_s: float = math.inf) -> None:
        self.plan.join(time.monotonic() + limit_s)

    def done(self) -> bool:
        self.plan.advance()
        return self.test()


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
