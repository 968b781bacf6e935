"""The comparison of calls that ranks have bound: before any of them has an effect, all ranks learn whether they differ.

The number of a call and that of its binding are compared where ranks meet anyway: at the first barrier of a program in
shared memory, in the headers of messages between nodes, or at the barrier of a kernel.  Other calls are preceded by a
comparison of its own: a program of one barrier or of headers, or where ranks lack Numba, an all-reduce of two numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from threading import get_ident
from typing import TYPE_CHECKING, Any

import numpy as np

from collectives.arrays.device import host
from collectives.runtime.context import Context
from collectives.runtime.lazy import Lazy
from collectives.runtime.plan import NOWHERE, MismatchError, Plan, Predecessor, Runs, run_now
from collectives.runtime.progress import Progress, Waitable
from collectives.runtime.reports.call_log import LogEntry

if TYPE_CHECKING:
    from collectives.runtime.backends.channel import Channel
    from collectives.runtime.backends.headers import Headers
    from collectives.runtime.backends.on_device import KernelCalls


class ProgramComparison(Plan):
    """A comparison of calls by a program without work."""

    def __init__(self, program: Any, progress: Progress):
        super().__init__("agreement", None, progress, host(), [program], only=program)

    def use(self, number: int, binding: int) -> None:
        self.only.use(number, NOWHERE, NOWHERE, binding)


class KeyComparison(Plan):
    """A comparison of calls where not all ranks have Numba: an all-reduce of their keys.  Creating it is collective."""

    def __init__(self, context: Context):
        self.keys = np.zeros(2, np.int64)
        plan = context.agreement.bind_plan("all_reduce", self.keys, op="max")
        super().__init__("agreement", None, context.progress, host(), plan.rounds)
        plan.rounds = []  # which this plan frees
        self.key = 0

    def use(self, number: int, binding: int) -> None:
        self.key = binding << 32 | number if binding else 0

    def _run(self) -> Iterator[Waitable]:
        self.keys[:] = self.key, -self.key
        yield from super()._run()
        highest, negated = self.keys.tolist()
        if highest != -negated:
            raise MismatchError("ranks have bound different collectives")


class StartedOrder:
    """The order of started calls: each begins when the `latest` before it has ended."""

    def __init__(self) -> None:
        self.latest: Callable[[], Plan | None] = lambda: None
        self.turn: int | None = None  # the thread that resolves a started call

    def drain(self, run: Runs = run_now) -> None:
        """Wait for the started calls, unless for one of them, in its turn: programs on one channel run one by one."""
        latest = self.latest()
        if latest is not None and latest.is_under_way and self.turn != get_ident():
            run(Predecessor(latest))


class Comparator:
    """The comparisons of one communicator's calls."""

    def __init__(self, context: Context, order: StartedOrder):
        self.context, self.order = context, order
        self.by_messages = len(context.topology.nodes) > 1 or not context.has_numba  # whether these compare calls
        self.kernels: KernelCalls | None = None  # once there are calls that devices compare

    def compare(self, binding: int, number: int, run: Runs) -> None:
        """Wait for the other ranks, and compare all bindings' numbers; 0 without a binding.  Collective.

        Raises: MismatchError on all ranks where these or the numbers of calls differ.
        """
        self.comparison.use(number, binding)
        run(self.comparison)

    def before_runs_of(self, binding: int) -> Callable[[LogEntry, int, Runs], None]:
        """Return the comparison that precedes each run of a binding."""
        return lambda entry, number, run: self.compare(binding, number, run)

    def gate(self, run: Runs | None = run_now) -> LogEntry | None:
        """Tell ranks that would run a bound call that this one has to agree first.  Collective.

        `run` waits for the others; None if all are known to have arrived.  Returns the earlier call in which this
        rank's device has found a mismatch, if any.
        """
        if self.kernels:
            self.kernels.gate()
        if run is not None:
            self.order.drain(run)
            with suppress(MismatchError):
                self.compare(0, 0, run)
        return self.kernels.settle() if self.kernels else None

    @Lazy
    def headers(self) -> Headers:
        """Make the headers by which ranks of several nodes compare calls.  Collective."""
        from collectives.runtime.backends.headers import Headers  # it imports the compiler

        return Headers(self.context)

    @Lazy
    def comparison(self) -> ProgramComparison | KeyComparison:
        """Make a plan that only compares calls.  Collective."""
        if not self.context.has_numba:
            return KeyComparison(self.context)
        if self.by_messages:
            from collectives.runtime.backends.message_programs import only_headers  # it imports the compiler

            return ProgramComparison(only_headers(self.headers), self.context.progress)
        from collectives.runtime.backends.shared_memory import ProgramBinder  # it imports the compiler

        return ProgramComparison(ProgramBinder(self.context).gate(self.channel), self.context.progress)

    @Lazy
    def channel(self) -> Channel:
        """Make the channel of all calls, which run one after the other.  Collective."""
        from collectives.runtime.backends.channel import Channel

        context = self.context
        others = [rank for rank in range(context.size) if rank != context.rank]
        channel = Channel(context.memory.of_host, context.world_ranks, [context.rank, *others])
        context.agreement.highest([0])  # all have cleared their slots
        return channel

    def free(self) -> None:
        """Free what compares, once no call runs.  Collective."""
        if self.kernels:
            late = self.gate()
            self.context.agreement.check("free", "", late=late)  # after which all mismatches have been reported
        if "headers" in self.__dict__:
            self.headers.free()
        self.kernels = None
        for name in ("comparison", "headers", "channel"):
            self.__dict__.pop(name, None)
