"""The binding of calls of one signature, on which all ranks have agreed, and the failure to bind one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import mul
from textwrap import shorten
from typing import TYPE_CHECKING, Any, Protocol

from collectives.job.errors import CommunicationError, InputError
from collectives.runtime.call.call import Call
from collectives.runtime.call.signature import address_of_result
from collectives.runtime.chooser import Choice
from collectives.runtime.plan import FAILURES, Plan, Runs
from collectives.runtime.progress import Progress
from collectives.runtime.reports.call_log import LogEntry

if TYPE_CHECKING:
    from collectives.runtime.backends.shared_memory import Program

LONGEST_WORDS = 500  # of an error that is sent to other ranks
MOST_PLANS = 8  # addresses for which plans of one signature are kept
Addresses = tuple[int, ...]  # of a call's two arrays, 0 for none
Rebind = Callable[[Addresses, LogEntry], Plan]
Compare = Callable[[LogEntry, int, Runs], None]


class Backend(Protocol):
    """A way to run collectives.  A `choice` of None stands for the MPI library's own."""

    def plan(self, call: Call, choice: Choice | None) -> Plan:
        """Make a plan for the arrays of a call.  Collective."""

    def bind(self, call: Call, choice: Choice | None) -> Bound:
        """Bind the calls of a signature, for any arrays like theirs.  Collective."""


class Bound:
    """The binding of calls of one signature; its number is unique, and the same on all ranks.

    `rebind` returns the plan for arrays at two addresses, given the entry of these calls in the call log.  Where the
    plan is one `program`, that takes any addresses, and compares the ranks' bindings at its first barrier.  For others
    `compare` does: given the entry, the number of the run, and how this rank waits, it raises MismatchError on all
    ranks if one of them would run another binding.
    """

    def __init__(
        self,
        call: Call,
        name: str,
        rebind: Rebind,
        compare: Compare | None = None,
        program: Program | None = None,
    ):
        o = call.operands
        self.number, self.entry = call.binding, call.entry.plan_entry(f"{call.collective} {name}")
        self.entry.number = call.entry.number
        self.rebind, self.compare, self.program = rebind, compare, program
        self.has_result = o.result is not None
        self.returns_x = o.result is call.x and call.x is not call.out  # on ranks without a result, for any `out`
        self.has = o.source is not None, o.out is not None
        is_new = self.has_result and o.result is not call.x and o.result is not call.out
        self.new: Callable[[Any], Any] | None = o.new if is_new else None
        self.is_plain = self.has_result and self.new is None and all(self.has)

    def locate(self, x: Any, out: Any, addresses: Addresses, keys: tuple) -> tuple[Any, Addresses, tuple]:
        """Return the result's array, and the addresses and windows of a call's two arrays, 0 for none."""
        result = x if out is None or self.returns_x else out
        if self.new is not None and out is None:
            result = self.new(x)
            addresses, keys = (addresses[0], address_of_result(result)), (keys[0], 0)
        elif not all(self.has):
            addresses, keys = (tuple(map(mul, self.has, pair)) for pair in (addresses, keys))
        return result if self.has_result else None, addresses, keys

    def prepare(self, number: int, addresses: Addresses, keys: tuple[int, ...], run: Runs) -> Plan:
        """Return the plan of a run on arrays at two addresses in two windows, which the ranks have compared or will.

        Raises: MismatchError on all ranks if one of them would run another binding; then nothing is done.
        """
        if self.program is not None:
            self.program.use(number, addresses, keys)
        elif self.compare is not None:
            self.compare(self.entry, number, run)
        plan = self.rebind(addresses, self.entry)
        plan.prepare()
        return plan


class PlansByAddress:
    """The plans of one signature's calls, each for arrays at two addresses; the first ones go when there are many."""

    def __init__(self, progress: Progress, bind: Callable[[Addresses], Plan]):
        self.progress, self.bind = progress, bind
        self.plans: dict[Addresses, Plan] = {}

    def __call__(self, addresses: Addresses, entry: LogEntry) -> Plan:
        if addresses not in self.plans:
            if len(self.plans) == MOST_PLANS:
                del self.plans[next(iter(self.plans))]
            with telling(self.progress, entry):
                self.plans[addresses] = self.bind(addresses)
        return self.plans[addresses]


@contextmanager
def telling(progress: Progress, entry: LogEntry) -> Iterator[None]:
    """Bind a call's resources; an error on this rank is sent to the others, which would wait in vain.

    Raises: CommunicationError.
    """
    try:
        yield
    except (InputError, *FAILURES):  # raised on all ranks, or sent to the others already
        raise
    except Exception as error:
        words = f"{entry.latest()}: {shorten(f'{type(error).__name__}: {error}', LONGEST_WORDS)}"
        progress.tell(words)
        raise CommunicationError(words) from error
