"""The path of every call: sign it, look its binding up, run it; on a miss, resolve and bind it first.

Bound calls are cached by signature: the collective, its options, and of each array dtype, length and kind of memory,
but not its address.  A later call of the same signature runs the bound one on its own arrays.  At the first barrier of
a run the ranks compare what they have bound; where that differs, all of them resolve their calls again, together, which
reports a mismatch.  Arrays on devices are copied to persistent buffers, unless they are in symmetric memory: then the
call is bound to these arrays.
"""

from __future__ import annotations

import sys
import weakref
from functools import partial
from typing import Any

from collectives.arrays.addresses import address_of
from collectives.job.errors import LoneInputError
from collectives.job.launch import refuse_after_fork
from collectives.runtime.backends.bound import Bound, CallBinder, Resolved, telling
from collectives.runtime.call.packed import pack
from collectives.runtime.call.request import Request, Runs
from collectives.runtime.call.signature import Signature, Signed, Unsigned, hashable, sign
from collectives.runtime.chooser import Chooser
from collectives.runtime.comparator import Comparator, StartedOrder
from collectives.runtime.context import Context
from collectives.runtime.plan import FREED, LateMismatchError, MismatchError, Plan, run_now
from collectives.runtime.reports.call_log import CallSite, LogEntry, caller
from collectives.runtime.resolve import Resolver

MOST_BOUND = 4096  # signatures whose bound calls are cached
MOST_BOUND_ON_DEVICES = 256  # the same for arrays on devices


class Dispatcher:
    """The calls of one communicator, with a cache of bound ones."""

    def __init__(self, context: Context):
        self.context, self.calls, self.check = context, context.calls, context.check
        self.memory, self.windows, self.progress = context.memory.of_host, context.windows, context.progress
        self.order, self.chooser = StartedOrder(), Chooser(context)
        self.comparator = Comparator(context, self.order)
        self.resolver = Resolver(context, self.comparator, self.order, self.chooser)
        self.binder = CallBinder(context, self.comparator)
        self.bound: dict[Signature, Bound] = {}
        self.bound_on_devices: dict[Signature, Bound] = {}
        self.plans: weakref.WeakSet[Plan] = weakref.WeakSet()  # of the caller

    def run(
        self,
        collective: str,
        x: Any,
        out: Any,
        options: tuple,
        run: Runs = run_now,
        note: str = "",
        call_site: CallSite | None = None,
        at_once: bool = True,
    ) -> Any:
        """Run a collective once, and return the result's array.

        `options` are the values of its other arguments besides `out`, in the order of `OPTIONS`.  `run` runs a plan to
        its end, a bound call only if it does not end `at_once`; ranks must also agree in `note`; `call_site` is the
        line that makes the call, by default that which calls the library.
        """
        try:
            signed = sign(self.memory, collective, x, out, (*options, note) if note else options)
            signature, addresses, keys, on_host, _ = signed
            cache = self.bound if on_host else self.bound_on_devices
            try:
                bound = cache.get(signature)
            except TypeError:  # an option is a list
                bound = cache.get(hashable(signature))
        except Unsigned:
            return self.run_unsigned(Request(collective, x, out, options, run, note, call_site), at_once)
        if bound is None:
            return self.run_first(Request(collective, x, out, options, run, note, call_site), signed)
        call, calls = bound.entry, self.calls
        call.number = calls.number = number = calls.number + 1
        call.call_site = call_site = call_site or caller(sys._getframe(2))
        calls.record.ring.append((call, number, call_site))
        result = x if out is None else out
        if not bound.is_plain:
            result, addresses, keys = bound.locate(x, out, addresses, keys)
        try:
            program = bound.program
            if program is None:
                self.execute(bound, addresses, keys, run)
            else:
                if keys != program.keys:
                    program.lie_in(keys)
                if not at_once or self.progress.started or not program.launch(number * self.check, *addresses):
                    self.execute(bound, addresses, keys, run)
        except MismatchError as mismatch:
            calls.number -= 1
            calls.record.ring.pop()
            call.under_way = False
            request = Request(collective, x, out, options, run, note, call_site)
            return self.run_first(request, signed, compared=not isinstance(mismatch, LateMismatchError))
        return result

    def execute(self, bound: Bound, addresses: tuple[int, ...], keys: tuple[int, ...], run: Runs) -> None:
        """Run a bound call on arrays at two addresses in two windows, as a call that has been entered.

        Raises: MismatchError on all ranks if one of them would run another one; then nothing is done.
        """
        call, plan = bound.entry, bound.plan
        call.under_way = True  # so that its run is not counted again
        self.order.drain(run)
        number = call.number * self.check
        if bound.program is not None:
            bound.program.use(number, addresses, keys)
        else:
            if bound.comparing is None:
                self.comparator.compare(bound.number, number, run)
            else:
                bound.comparing.use(call, self.check)
            plan = bound.buffered.on(addresses) if bound.buffered else plan or bound.plan_at(addresses, self.progress)
            plan.prepare()
        assert plan is not None
        plan.entry = call
        run(plan)
        call.under_way = False

    def run_first(self, request: Request, signed: Signed, compared: bool = False) -> Any:
        """Resolve a call, cache its binding by signature, and run it."""
        with LogEntry(self.calls, request.collective) as call:
            call.call_site = request.call_site or call.call_site
            resolved = self.resolver.resolve(call, request, compared, moves=signed[-1])
            with telling(self.progress, call):
                bound = self.bind_call(call, signed, resolved)
            call.name = bound.entry.name
            o = resolved.operands
            addresses, keys = [tuple(map(of, (o.source, o.out))) for of in (address_of, self.windows.key_of)]
            self.execute(bound, addresses, keys, request.run)
        return o.result

    def run_unsigned(self, request: Request, at_once: bool) -> Any:
        """Run a call on fused arrays, or one without a signature."""
        packed, failure = pack(request, self.context.rank)
        if failure:
            self.refuse(request.collective, failure, request.run, request.call_site)
        if packed:
            result = packed.result(self.run(*packed.request, at_once))
            packed.end()
            return result
        plan = self.plan_once(request)
        request.run(plan)
        plan.free()
        return plan.result

    def bind_call(self, call: LogEntry, signed: Signed, resolved: Resolved) -> Bound:
        """Bind the calls of a signature, and cache the binding.  Collective."""
        bound = self.binder.bind_call(call, signed, resolved)
        cache, most = (self.bound, MOST_BOUND) if signed[3] else (self.bound_on_devices, MOST_BOUND_ON_DEVICES)
        if len(cache) >= most:
            del cache[next(iter(cache))]
        cache[hashable(signed[0])] = bound
        return bound

    def refuse(self, collective: str, failure: str, run: Runs = run_now, call_site: CallSite | None = None) -> None:
        """Refuse a call on all ranks.  Raises: InputError on each of them."""
        with LogEntry(self.calls, collective) as call:
            call.call_site = call_site or call.call_site
            self.refuse_call(call, failure, run)

    def refuse_call(self, call: LogEntry, failure: str, run: Runs = run_now) -> None:
        """Refuse a call that has been entered, as `refuse`."""
        if not self.check:
            raise LoneInputError(failure)
        self.context.agreement.check("", failure, (), call, partial(self.comparator.gate, run))

    def plan_once(self, request: Request) -> Plan:
        """Make a plan for one run, counted as this call.  Collective."""
        with LogEntry(self.calls, request.collective) as call:
            call.call_site = request.call_site or call.call_site
            resolved = self.resolver.resolve(call, request)
            with telling(self.progress, call):
                plan = self.binder.bind(resolved)
        call.name, call.under_way = plan.name, True  # until the plan has ended: its run is not counted again
        plan.entry = call
        return plan

    def plan(self, collective: str, x: Any, arguments: dict[str, Any]) -> Plan:
        """Make a plan to be run often."""
        with LogEntry(self.calls, f"plan {collective}") as call:
            resolved = self.resolver.agree(call, collective, x, arguments)
            with telling(self.progress, call):
                plan = self.binder.bind_short(resolved) or self.binder.bind(resolved)
        plan.entry = call.of_plan(plan.name)
        self.plans.add(plan)
        if plan.only:
            self.calls.record.expect_short_runs(plan.entry)
        return plan

    def free(self) -> None:
        """Free the bound calls, the plans and their memory, once started ones have ended.  Collective."""
        self.order.drain()
        for plan in list(self.plans):
            plan.join()
            plan.free(FREED)
        self.comparator.free()
        self.bound.clear()
        self.bound_on_devices.clear()
        self.binder.free()


refuse_after_fork(Dispatcher)
