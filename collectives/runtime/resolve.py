"""The resolution of a call that no binding is cached of: the ranks check it, agree on it, and choose an algorithm."""

from __future__ import annotations

from typing import Any

from collectives import algorithms
from collectives.arrays.memory import Windows
from collectives.job.errors import LoneInputError
from collectives.runtime.agreement import NUM_FACTS
from collectives.runtime.backends.bound import Resolved
from collectives.runtime.backends.native_mpi import check_native
from collectives.runtime.call.arguments import REFUSALS, Arguments
from collectives.runtime.call.operands import Operands, call_facts, local_facts, operands_of
from collectives.runtime.call.packed import Fused
from collectives.runtime.call.request import Request, Runs
from collectives.runtime.chooser import Chooser
from collectives.runtime.comparator import Comparator, StartedOrder
from collectives.runtime.context import Context
from collectives.runtime.plan import run_now
from collectives.runtime.reports.call_log import LogEntry
from collectives.schedule.spec import spec_of


class Resolver:
    """The resolver of one communicator's calls."""

    def __init__(self, context: Context, comparator: Comparator, order: StartedOrder, chooser: Chooser):
        self.context, self.check, self.windows = context, context.check, context.windows
        self.agreement, self.comparator, self.order, self.chooser = context.agreement, comparator, order, chooser
        self.num_bound = 0

    def resolve(self, call: LogEntry, request: Request, compared: bool = False, moves: bool = False) -> Resolved:
        """Agree on a call; `compared`: the ranks have already found that their bindings differ."""
        run = None if compared else request.run
        return self.agree(call, request.collective, request.x, request.arguments, request.note, run, moves)

    def agree(
        self,
        call: LogEntry,
        collective: str,
        x: Any,
        arguments: dict[str, Any],
        note: str = "",
        run: Runs | None = run_now,
        moves: bool = False,
    ) -> Resolved:
        """Check a call, agree on it with the other ranks, and choose its algorithm.  Collective.

        `run` waits for the others; None if all are known to have arrived.  `moves`: the call will use buffers.

        Raises: InputError on every rank where one has wrong arguments, or not all make the same call.
        """
        if run is not None:
            self.order.drain(run)
        description = failure = ""
        facts = [0] * NUM_FACTS
        if isinstance(x, Fused) and x.buffer is None:
            self.allocate(x, call)
        fused = x if isinstance(x, Fused) else None
        algorithm = arguments.pop("algorithm", "auto")
        try:
            a = self.arguments(collective, fused.buffer if fused else x, algorithm, arguments)
            if fused:
                fused.check(collective, a.out, a.rank == a.root)
                note = f" of {fused}"
            description = call.describe(collective, a.describe(algorithm) + note, a.flat, a.lengths)
            operands = operands_of(a) if a.send_counts is None else None
            windows = Windows() if moves else self.windows
            facts = [*local_facts(a, operands, windows), not moves, self.num_bound + 1]
        except REFUSALS as error:
            failure = f"{collective}: {error}"
        if failure and not self.check:
            raise LoneInputError(failure)
        late = self.comparator.gate(run)
        if self.check:
            facts = self.agreement.check(description, failure, facts, call, lambda: late)
        elif late:
            raise LoneInputError(f"{late.latest()}: ranks run different collectives")
        self.num_bound, all_move = facts.pop(), not facts.pop()
        operands = operands or self.exchange_counts(a)
        choice = None
        if algorithm != "mpi":
            choice = self.chooser.choose(a, algorithm, call_facts(a.spec, facts, on_buffers=all_move))
        return Resolved(a, operands, choice, fused, self.num_bound, all_move)

    def allocate(self, fused: Fused, call: LogEntry) -> None:
        """Give fused arrays of a call a buffer that the ranks of a node can access, where possible.  Collective.

        Raises: InputError on every rank where arrays are incompatible, or ranks' lengths differ.
        """
        self.agreement.check(str(fused), fused.failure, call=call if self.check else None)
        fused.buffer = self.context.memory.empty(fused.device, len(fused), fused.dtype)

    def arguments(self, collective: str, x: Any, algorithm: str, arguments: dict[str, Any]) -> Arguments:
        """Check a call's arguments as far as one rank can."""
        takes = spec_of(collective).takes
        if strange := [name for name in arguments if name not in takes]:
            raise ValueError(f"takes no {strange[0]}: it takes {', '.join(takes)}")
        a = Arguments(collective, self.context.rank, self.context.size, x, **arguments)
        if algorithm == "mpi":
            check_native(a)
        elif algorithm != "auto":
            algorithms.check(algorithms.find(collective, algorithm), self.context.size, equal=a.send_counts is None)
        a.check_algorithm(algorithm)
        return a

    def exchange_counts(self, a: Arguments) -> Operands:
        """Exchange the counts of an all-to-all of uneven chunks.  Collective.

        Raises: InputError on every rank where one's counts or result do not fit.
        """
        assert a.send_counts is not None
        incoming, failure, operands = self.agreement.exchange(a.send_counts), "", None
        try:
            if a.recv_counts not in (None, incoming):
                raise ValueError(
                    f"{a.collective}: recv_counts={a.recv_counts}, but {incoming} is sent: pass that, or omit it"
                )
            a.recv_counts = incoming
            operands = operands_of(a)
        except REFUSALS as error:
            failure = str(error) or type(error).__name__
        self.agreement.check(f"counts of {a.collective}", failure)
        assert operands is not None
        return operands
