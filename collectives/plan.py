"""A collective bound once and run often, and the waiting for it, which keeps the other started ones moving."""

import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

from mpi4py import MPI

from collectives.arrays import Device
from collectives.errors import CommunicationError
from collectives.schedule import Round, show

SPINS = 1000  # polls that only give up the core, before a waiting rank sleeps
LONGEST_SLEEP_S = 1e-3

CopyPair = tuple[Any, Any]  # target, source


class Waitable(Protocol):
    """What a run waits for: messages, or other ranks' arrival."""

    def test(self) -> bool:
        """Move on without waiting; whether it is over."""

    def wait(self) -> None:
        """Return when it is over."""


class Step(Protocol):
    """Some rounds of a schedule, bound."""

    @property
    def moves(self) -> Round: ...

    @property
    def number(self) -> int: ...

    def run(self, device: Device) -> Iterator[Waitable]: ...

    def requests(self) -> Sequence[MPI.Prequest]: ...


class Progress:
    """Waits for requests, and keeps this process's other started plans moving meanwhile."""

    def __init__(self, crowded: bool):
        self.crowded = crowded  # waiting ranks must give up the core
        self.started: list[Plan] = []

    def wait(self, awaited: Waitable, waiting: "Plan | None" = None) -> None:
        """Wait for something, which belongs to the plan `waiting` if to any."""
        others = [plan for plan in self.started if plan is not waiting]
        if not self.crowded and not others:
            awaited.wait()
            return
        spins = 0
        while not awaited.test():
            for plan in others:
                plan.advance()
            spins += 1
            if self.crowded:
                relax(spins)


def relax(spins: int) -> None:
    """Give up the core: at first for a moment, then for up to a millisecond."""
    if spins < SPINS:
        os.sched_yield()
    else:
        time.sleep(min(LONGEST_SLEEP_S, 1e-5 * 2 ** min(spins - SPINS, 10)))


class Plan:
    """A collective bound to memory once and run as often as wanted: `plan()`, or `plan.start()` and `plan.wait()`.

    Each run works on what the arrays hold then, and returns the result's array.  A started plan moves on whenever
    this process waits for another one, of the same communicator or of its parts, or asks `done()`.  `free()` gives
    the requests back.
    """

    def __init__(
        self,
        name: str,
        result: Any,
        progress: Progress,
        device: Device,
        rounds: Sequence[Step],
        only: Waitable | None = None,
    ):
        self.name, self.result = name, result
        self._only = only  # all of the rounds, where nothing is to be done before or after
        self.device, self.rounds = device, rounds
        self.before: list[CopyPair] = []  # ahead of the rounds
        self.after: list[CopyPair] = []
        self.divide: tuple[Any, int] | None = None
        self._progress = progress
        self._steps: Iterator[Waitable] | None = None
        self._waiting_for: Waitable | None = None
        self._round: Step | None = None
        self._freed = False

    def enclose(self, before: Iterable[CopyPair], after: Iterable[CopyPair], result: Any) -> None:
        """Add copies ahead of all else and after it; runs return `result` then."""
        self.before, self.after = [*before, *self.before], [*self.after, *after]
        self.result, self._only = result, None

    def __call__(self) -> Any:
        """Run the collective; returns the result's array."""
        if self._only and not self._progress.started and self._only.test():
            return self.result  # nothing else to see to: the short way for small arrays
        self.start()
        return self.wait()

    def start(self) -> "Plan":
        """Begin a run; ends with `wait()`, or when `done()` says so."""
        if self._freed:
            raise RuntimeError(f"{self.name} has been freed: make a new plan")
        if self._steps is not None:
            raise RuntimeError(f"{self.name} is under way already: wait() before the next start()")
        self._steps = self._run()
        self._progress.started.append(self)
        self._next()
        return self

    def wait(self) -> Any:
        """Wait for the end of the run; returns the result's array."""
        while self._steps is not None:
            assert self._waiting_for is not None
            try:
                self._progress.wait(self._waiting_for, waiting=self)
            except MPI.Exception as error:
                raise self._failure(error) from error
            self._next()
        return self.result

    def done(self) -> bool:
        """Move the run on without waiting; whether it has ended."""
        self.advance()
        return self._steps is None

    def advance(self) -> None:
        while self._steps is not None:
            assert self._waiting_for is not None
            try:
                if not self._waiting_for.test():
                    return
            except MPI.Exception as error:
                raise self._failure(error) from error
            self._next()

    def free(self) -> None:
        """Give the persistent requests back to MPI.  The plan cannot be run after."""
        if self._steps is not None:
            raise RuntimeError(f"{self.name} is under way: wait() before free()")
        self._freed, self._only = True, None
        if not self.device.mpi_reads:
            self.device.synchronize()  # copies out of the host memory that goes with the plan
        for bound in self.rounds:
            for request in bound.requests():
                request.Free()
        self.rounds = []

    def __del__(self) -> None:
        if self.rounds and self._steps is None and not sys.is_finalizing() and not MPI.Is_finalized():
            self.free()

    def _next(self) -> None:
        assert self._steps is not None
        try:
            awaited = next(self._steps, None)
        except MPI.Exception as error:
            raise self._failure(error) from error
        if awaited is None:
            self._end()
        else:
            self._waiting_for = awaited

    def _end(self) -> None:
        self._steps = None
        self._progress.started.remove(self)

    def _run(self) -> Iterator[Waitable]:
        device = self.device
        device.begin()
        for target, source in self.before:
            device.copy(target, source)
        for bound in self.rounds:
            self._round = bound
            yield from bound.run(device)
        if self.divide:
            device.divide(*self.divide)
        for target, source in self.after:
            device.copy(target, source)
        device.end()

    def _failure(self, error: MPI.Exception) -> CommunicationError:
        self._end()
        where = f", round {self._round.number}: {', '.join(map(show, self._round.moves))}" if self._round else ""
        return CommunicationError(f"{self.name}{where}: {error}")
