"""Short collectives between nodes, each as one program of the interpreter."""

from __future__ import annotations

from typing import Any

from collectives.arrays.addresses import address_of
from collectives.runtime.backends.bound import Bound
from collectives.runtime.backends.headers import Headers
from collectives.runtime.backends.message_programs import with_headers
from collectives.runtime.call.call import Call
from collectives.runtime.call.operands import lent
from collectives.runtime.chooser import Choice
from collectives.runtime.comparator import Comparator
from collectives.runtime.context import Context
from collectives.runtime.plan import NOWHERE, Plan


class ShortMessageBackend:
    """Programs whose messages carry short vectors along with the headers that compare calls."""

    def __init__(self, context: Context, comparator: Comparator):
        self.context, self.comparator = context, comparator

    def plan(self, call: Call, choice: Choice | None) -> Plan:
        headers, o = Headers(self.context), call.operands
        plan = self.plan_with(headers, call, choice, keep=(o.source, o.out))
        plan.only.use(0, (address_of(o.source), address_of(o.out)), NOWHERE)
        plan.only.messages += headers.arrivals.values()
        return plan

    def bind(self, call: Call, choice: Choice | None) -> Bound:
        assert choice is not None
        plan = self.plan_with(self.comparator.headers, lent(call), choice)
        return Bound(call, choice.row.name, lambda addresses, entry: plan, program=plan.only)

    def plan_with(self, headers: Headers, call: Call, choice: Choice | None, keep: Any = None) -> Plan:
        assert choice is not None
        program, name = with_headers(headers, call, choice.row), f"{call.collective} {choice.row.name}"
        result, progress = call.operands.result, self.context.progress
        return Plan(name, result, progress, call.device, [program], only=program, keep=keep)
