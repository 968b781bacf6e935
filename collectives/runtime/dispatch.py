"""The path of every call: sign, look the binding up, run; on a miss, check, agree, choose and bind first.

Bound calls are cached by signature: the collective, its options, and of each array dtype, length and kind of memory,
but not its address.  A later call of the same signature runs the bound one on its own arrays.  At the first barrier of
a run the ranks compare what they have bound; where that differs, all of them resolve their calls again, together, which
reports a mismatch.  Arrays on devices are copied to persistent buffers, unless they are in symmetric memory: then the
call is bound to these arrays.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

from collectives.arrays.addresses import address_of
from collectives.arrays.device import host
from collectives.arrays.memory import Windows
from collectives.job.errors import LoneInputError
from collectives.job.launch import refuse_after_fork
from collectives.runtime.agreement import NUM_FACTS
from collectives.runtime.backends.binder import Binder
from collectives.runtime.backends.bound import Addresses, Bound, telling
from collectives.runtime.backends.native_mpi import check_native
from collectives.runtime.call.call import Call
from collectives.runtime.call.checks import REFUSALS
from collectives.runtime.call.fused import Fused
from collectives.runtime.call.operands import call_facts, local_facts, operands_of
from collectives.runtime.call.packed import pack
from collectives.runtime.call.signature import Signature, Unsigned, hashable, sign
from collectives.runtime.chooser import Choice, Chooser
from collectives.runtime.comparator import Comparator, StartedOrder
from collectives.runtime.context import Context
from collectives.runtime.plan import FREED, LateMismatchError, MismatchError, Plan, Runs, run_now
from collectives.runtime.reports.call_log import CallSite, LogEntry, caller

MOST_BOUND = 4096  # signatures whose bound calls are cached
MOST_BOUND_ON_DEVICES = 256  # the same for arrays on devices


class Dispatcher:
    """The calls of one communicator, with a cache of bound ones."""

    def __init__(self, context: Context):
        self.context, self.calls, self.check = context, context.calls, context.check
        self.memory, self.windows, self.progress = context.memory.of_host, context.windows, context.progress
        self.order, self.chooser = StartedOrder(), Chooser(context)
        self.comparator = Comparator(context, self.order)
        self.binder = Binder(context, self.comparator)
        self.bound: dict[Signature, Bound] = {}
        self.bound_on_devices: dict[Signature, Bound] = {}
        self.num_bound = 0
        self.plans: weakref.WeakSet[Plan] = weakref.WeakSet()  # of the caller

    # --- a hit ---

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

        `options` are the values of its other arguments besides `out`, in the order of the collective's row.  `run` runs
        a plan to its end, a bound call only if it does not end `at_once`; ranks must also agree in `note`; `call_site`
        is the line that makes the call, by default that which calls the library.
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
            return self.run_unsigned(Call.of(collective, x, out, options, run, note, call_site), at_once)
        if bound is None:
            return self.run_first(Call.of(collective, x, out, options, run, note, call_site, signed))
        entry, calls = bound.entry, self.calls
        entry.number = calls.number = number = calls.number + 1
        entry.call_site = line = call_site or caller(sys._getframe(2))
        calls.record.ring.append((entry, number, line))
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
            entry.under_way = False
            call = Call.of(collective, x, out, options, run, note, call_site, signed)
            return self.run_first(call, compared=not isinstance(mismatch, LateMismatchError))
        return result

    def execute(self, bound: Bound, addresses: Addresses, keys: tuple[int, ...], run: Runs) -> None:
        """Run a bound call on arrays at two addresses in two windows, as a call that has been entered.

        Raises: MismatchError on all ranks if one of them would run another one; then nothing is done.
        """
        entry = bound.entry
        entry.under_way = True  # so that its run is not counted again
        self.order.drain(run)
        plan = bound.prepare(entry.number * self.check, addresses, keys, run)
        plan.entry = entry
        run(plan)
        entry.under_way = False

    # --- a miss ---

    def run_first(self, call: Call, compared: bool = False) -> Any:
        """Resolve a call, cache its binding by signature, and run it."""
        with self.entry_of(call) as entry:
            bound = self.bind(call, self.resolve(call, compared))
            entry.name, o = bound.entry.name, call.operands
            addresses, keys = [tuple(map(of, (o.source, o.out))) for of in (address_of, self.windows.key_of)]
            self.execute(bound, addresses, keys, call.run)
        return o.result

    def run_unsigned(self, call: Call, at_once: bool) -> Any:
        """Run a call on fused or strided arrays, or one without a signature."""
        packed, failure = pack(call, self.context.rank)
        if failure:
            self.refuse(call.collective, failure, call.run, call.call_site)
        if packed:
            arguments = packed.collective, packed.x, packed.out, packed.options
            result = self.run(*arguments, packed.run, packed.note, packed.call_site, at_once)
            host().copy_pairs(packed.after)
            return packed.result(result)
        with self.entry_of(call) as entry:
            plan = self.bind_plan(call, self.resolve(call))
        entry.name, entry.under_way = plan.name, True  # until the plan has ended: its run is not counted again
        plan.entry = entry
        call.run(plan)
        plan.free()
        return plan.result

    def plan(self, collective: str, x: Any, arguments: Mapping[str, Any]) -> Plan:
        """Make a plan to be run often."""
        call = Call(collective, x, arguments)
        with self.entry_of(call, f"plan {collective}") as entry:
            plan = self.bind_plan(call, self.resolve(call))
        plan.entry = entry.plan_entry(plan.name)
        self.plans.add(plan)
        if plan.only:
            self.calls.record.expect_short_runs(plan.entry)
        return plan

    def entry_of(self, call: Call, name: str = "") -> LogEntry:
        """Give a call its entry in the log, to be entered."""
        call.entry = LogEntry(self.calls, name or call.collective, call_site=call.call_site)
        return call.entry

    def resolve(self, call: Call, compared: bool = False) -> Choice | None:
        """Check a call, agree on it with the other ranks, and choose its algorithm, None for MPI's own.  Collective.

        `compared`: the ranks have already found that their bindings differ.

        Raises: InputError on every rank where one has wrong arguments, or not all make the same call.
        """
        if not compared:
            self.order.drain(call.run)
        if call.fused is not None and call.x is call.fused:
            self.allocate(call, call.fused)
        description, failure, facts = self.check_call(call)
        if failure and not self.check:
            raise LoneInputError(failure)
        late = self.comparator.gate(None if compared else call.run)
        if self.check:
            facts = self.context.agreement.check(description, failure, facts, call.entry, late)
        elif late:
            raise LoneInputError(f"{late.latest()}: ranks run different collectives")
        self.num_bound, call.all_move = facts.pop(), not facts.pop()
        call.binding, call.facts = self.num_bound, call_facts(call.spec, facts, on_buffers=call.all_move)
        if call.send_counts is not None:
            self.exchange_counts(call)
        return None if call.algorithm == "mpi" else self.chooser.choose(call)

    def allocate(self, call: Call, fused: Fused) -> None:
        """Give fused arrays of a call a buffer that the ranks of a node can access, where possible.  Collective.

        Raises: InputError on every rank where arrays are incompatible, or ranks' lengths differ.
        """
        if fused.buffer is None:
            entry, late = call.entry if self.check else None, self.comparator.gate()
            self.context.agreement.check(str(fused), fused.failure, entry=entry, late=late)
            fused.buffer = self.context.memory.empty(fused.device, len(fused), fused.dtype)
        call.x = fused.buffer

    def check_call(self, call: Call) -> tuple[str, str, list[int]]:
        """Check a call as far as one rank can; return its description, why it is refused, and its facts."""
        try:
            call.check(self.context.rank, self.context.size)
            if call.algorithm == "mpi":
                check_native(call)
            call.check_algorithm()
            if call.fused is not None:
                call.fused.check(call.collective, call.out, call.rank == call.root)
            description = call.entry.describe(call.collective, call.describe(), call.flat, call.lengths)
            operands = None
            if call.send_counts is None:
                operands = call.operands = operands_of(call)
            windows = Windows() if call.moves else self.windows
            return description, "", [*local_facts(call, operands, windows), not call.moves, self.num_bound + 1]
        except REFUSALS as error:
            return "", f"{call.collective}: {error}", [0] * NUM_FACTS

    def exchange_counts(self, call: Call) -> None:
        """Exchange the counts of an all-to-all of uneven chunks, and find its operands.  Collective.

        Raises: InputError on every rank where one's counts or result do not fit.
        """
        agreement, failure = self.context.agreement, ""
        incoming = agreement.exchange(call.send_counts or ())
        try:
            if call.recv_counts not in (None, incoming):
                raise ValueError(
                    f"{call.collective}: recv_counts={call.recv_counts}, but {incoming} is sent: pass that, or omit it"
                )
            call.recv_counts = incoming
            call.operands = operands_of(call)
        except REFUSALS as error:
            failure = str(error) or type(error).__name__
        agreement.check(f"counts of {call.collective}", failure)

    def bind(self, call: Call, choice: Choice | None) -> Bound:
        """Bind the calls of a signature, and cache the binding.  Collective."""
        assert call.signed is not None
        with telling(self.progress, call.entry):
            bound = self.binder.bind(call, choice)
        on_host = call.signed[3]
        cache, most = (self.bound, MOST_BOUND) if on_host else (self.bound_on_devices, MOST_BOUND_ON_DEVICES)
        if len(cache) >= most:
            del cache[next(iter(cache))]
        cache[hashable(call.signed[0])] = bound
        return bound

    def bind_plan(self, call: Call, choice: Choice | None) -> Plan:
        """Make a plan for the arrays of a call.  Collective."""
        with telling(self.progress, call.entry):
            return self.binder.plan(call, choice)

    # --- refusals, and the end ---

    def agreed(self, name: str) -> AbstractContextManager[None]:
        """Run a block whose ValueError or OSError on any rank becomes an InputError on every rank.  Collective."""
        return self.context.agreed(name, self.comparator.gate)

    def compare(self, description: str, failure: str = "", call_site: CallSite | None = None) -> None:
        """Raise InputError on every rank where one has a failure, or descriptions differ.  Collective."""
        with LogEntry(self.calls, "compare", call_site=call_site) as entry:
            self.context.agreement.check(description, failure, entry=entry, late=self.comparator.gate())

    def refuse(self, collective: str, failure: str, run: Runs = run_now, call_site: CallSite | None = None) -> None:
        """Refuse a call on all ranks.  Raises: InputError on each of them."""
        with LogEntry(self.calls, collective, call_site=call_site) as entry:
            self.refuse_call(entry, failure, run)

    def refuse_call(self, entry: LogEntry, failure: str, run: Runs = run_now) -> None:
        """Refuse a call that has been entered, as `refuse`."""
        if not self.check:
            raise LoneInputError(failure)
        self.context.agreement.check("", failure, entry=entry, late=self.comparator.gate(run))

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
