"""A call that its caller does not wait for at once, as a run of its signature's binding."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from collectives.arrays.device import host
from collectives.runtime.checks.call_log import Call
from collectives.runtime.plan import MismatchError, Plan
from collectives.runtime.progress import Waitable

if TYPE_CHECKING:
    from collectives.runtime.resolve import Bound, Request, Resolver
    from collectives.runtime.shared_memory import Program
    from collectives.runtime.signature import Signed


NOWHERE = (0, 0)  # the addresses and windows of no arrays


class StartedCall(Plan):
    """A started call.  It begins when the previous one on its communicator has ended.

    All bound calls share one channel, where programs run one after the other, in the same order on all ranks.  If the
    ranks' bindings turn out to differ, or this rank has none, they resolve the call in its turn.
    """

    def __init__(
        self, resolver: Resolver, request: Request, signed: Signed, bound: Bound | None, call: Call, ahead: Plan | None
    ):
        self.resolver, self.request, self.signed, self.bound, self.ahead = resolver, request, signed, bound, ahead
        super().__init__(call.name, None, resolver.progress, host(), [])
        if bound:
            self.place_in(bound)
        self.call = self.entered = call
        self.keep = request.x, request.out
        self.inner: Plan | None = None  # the plan whose messages it runs

    def place_in(self, bound: Bound) -> None:
        self.result, self.addresses, self.keys = bound.place(self.request.x, self.request.out, *self.signed[1:3])

    def release(self) -> None:
        """Drop the references to the arrays, once the run has ended and its result is not needed."""
        self.request, self.result, self.keep = self.request._replace(x=None, out=None), None, None
        self.before, self.after = [], []

    def awaits(self) -> str:
        if self.ahead:
            return f"the end of {self.ahead.name}"
        return self.inner.awaits() if self.inner else super().awaits()

    def _run(self) -> Iterator[Waitable]:
        if self.ahead is not None and self.ahead.is_under_way:
            yield Predecessor(self.ahead)
        self.ahead = None
        while not (yield from self.attempt()):
            self.entered.name = self.request.collective  # as ranks compare it
            resolved = self.resolver.resolve(self.entered, self.request, compared=True)
            with self.resolver.telling(self.entered):
                bound = self.resolver.bind_call(self.entered, self.signed, resolved)
            if self.bound is None:
                self.place_in(bound)
            self.bound = bound
            self.entered.name = bound.call.name
        self.device.copy_pairs(self.after)
        self.keep = None

    def attempt(self) -> Generator[Waitable, None, bool]:
        """Run the binding, unless another rank would run a different one; return whether all have run it."""
        bound, resolver = self.bound, self.resolver
        number, binding = (self.entered.number * resolver.check, bound.number) if bound else (0, 0)
        own = bound.program if bound else None
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
        if bound is None:
            return False
        if bound.program is None:
            self.inner = plan = resolver.plan_at(bound, self.addresses)
            plan.prepare()
            yield from plan._run()
        return True


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
