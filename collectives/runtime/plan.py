"""A collective bound once and run often."""

import math
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import copy
from typing import Any, Protocol

from mpi4py import MPI

from collectives.arrays.device import DEVICE_ERRORS, Device, Event
from collectives.job.errors import CommunicationError, InputError, RankFailure
from collectives.job.launch import communication_error, keep_in_flight, refuse_after_fork
from collectives.runtime.progress import Progress, Waitable
from collectives.runtime.reports.call_log import LogEntry
from collectives.schedule.moves import Round, show

FAILURES = (MPI.Exception, CommunicationError)
NOWHERE = (0, 0)  # the addresses and windows of no arrays
FREED = "this communicator has been freed: make another one, or free it later"


Runs = Callable[[Any], Any]  # of a plan, to its end


def run_now(plan: "Plan") -> None:
    """Run a plan to its end."""
    if not plan.run_only():
        plan.begin()
        plan.wait()


def nothing() -> None:
    pass


CopyPair = tuple[Any, Any]  # target, source


class Step(Protocol):
    """Some rounds of a schedule, bound: all of them, or one, which then has a number and moves."""

    number: int = 0
    moves: Round = ()

    def run(self, device: Device) -> Iterator[Waitable]: ...

    def requests(self) -> Sequence[MPI.Prequest]:
        """Return its persistent requests, which are freed with the plan."""
        return ()

    def in_flight(self) -> Sequence[MPI.Request]:
        """Return the requests that may be in flight during a run."""
        return self.requests()

    def windows(self) -> Sequence[Any]:
        """Return the windows of symmetric memory in which it accesses arrays of this rank and others."""
        return ()

    def awaits(self) -> str:
        """Describe the outstanding operations."""
        return describe(self.number, self.moves) if self.moves else "on its way"


def describe(number: int, moves: Round) -> str:
    return f"round {number}: {', '.join(dict.fromkeys(map(show, moves)))}"


class MismatchError(CommunicationError):
    """Ranks reached the same barrier from different calls.  No rank has done anything yet."""


class LateMismatchError(MismatchError):
    """A mismatch in an earlier call, found by this rank's device; other ranks may not know of it."""


class Plan:
    """A collective bound to memory once and run any number of times: `plan()`, or `plan.start()` and `plan.wait()`.

    Each run works on the current contents of the arrays, and returns the result's array.  A started plan advances while
    this process computes, by a thread (see Background), and whenever the process waits for another plan of the same
    communicator or of one split from it, or calls `done()`.  `free()` frees the requests.
    """

    def __init__(
        self,
        name: str,
        result: Any,
        progress: Progress,
        device: Device,
        rounds: Sequence[Step],
        *,
        only: Any = None,
        before: Iterable[CopyPair] = (),
        after: Iterable[CopyPair] = (),
        divide: tuple[Any, int] | None = None,
        prepare: Callable[[], None] = nothing,
        keep: Any = None,
        words: str = "",
        may_block: bool = False,
    ):
        self.name, self.result = name, result
        self.entry: LogEntry | None = None  # as which runs are logged, if they are
        self.words = words  # description of a plan that is not a collective
        self.only = only  # a program of all rounds, if there is no work before or after
        self.device, self.rounds = device, rounds
        self.keep = keep  # memory of the rounds
        self.prepare = prepare  # called before a run, where several plans share rounds
        self.before, self.after = list(before), list(after)  # copies before the rounds, and after them
        self.divide = divide  # an array and its divisor, after the rounds
        self.may_block = may_block or device.is_async  # inside CUDA or MPI
        self.at_end: Callable[[], None] = nothing  # called at the end of a run, by the thread that advanced it
        self._progress = progress
        self._steps: Iterator[Waitable] | None = None
        self._waiting_for: Waitable | None = None
        self._round: Step | None = None
        self._refusal = ""  # of a run, once it is freed
        self._to_wait = False  # for the end of a run, by `wait` or `done`
        self._failure: Exception | None = None  # of the latest run
        self._last: Event | None = None  # of a run
        self._event: Event | None = None
        self._num_runs = 0  # that were queued on a device; the event is after the latest
        if device.is_async:
            progress.on_devices[id(self)] = self
        self._stepping = threading.Lock()  # held by the thread that advances the run
        self.in_background = False  # advanced by the background thread
        self._is_inside = False  # the thread that advances the run may block

    def __repr__(self) -> str:
        state = ", freed" if self._refusal else ", running" if self.is_under_way else ""
        return f"{type(self).__name__}({self.words or self.name}{state})"

    def enclose(self, before: Iterable[CopyPair], after: Iterable[CopyPair], result: Any) -> None:
        """Add copies before all other work and after it; runs return `result` then."""
        self.before, self.after = [*before, *self.before], [*self.after, *after]
        self.result, self.only = result, None

    def __call__(self, limit_s: float = math.inf) -> Any:
        """Run the collective; returns the result's array.  `limit_s` is as in `wait`."""
        if not self.run_only():
            self.begin()
            return self.wait(limit_s)
        entry = self.entry
        if entry:  # counted only
            calls = entry.calls
            calls.number = entry.number = calls.number + 1
        return self.result

    def run_only(self) -> bool:
        """Run it on the fast path, if there is one and the other ranks arrive at once; return whether it has ended."""
        try:
            return bool(self.only) and not (self._to_wait or self._progress.started) and self.only.spin()
        except MismatchError:
            raise
        except (CommunicationError, *DEVICE_ERRORS) as error:
            self._leave()
            raise self._failed(error) from error

    def start(self) -> "Plan":
        """Start a run, which advances while this process computes; it ends with `wait()`, or when `done()` is true."""
        if self._progress.queued:
            self._progress.release_queued()
        self.begin()
        if self._steps is not None:
            self.in_background = True
            self._progress.background.attend()
        return self

    def begin(self) -> None:
        """Start a run for which this process waits next: no thread advances it."""
        if self._refusal:
            raise RuntimeError(self._refusal)
        if self._to_wait:
            raise RuntimeError(f"{self.name} has been started: wait() before the next start()")
        if self.entry and not self.entry.under_way:
            self.entry.enter(depth=3)  # past start() or __call__()
        with self._stepping:  # another thread may still have this plan on its list, from the last run
            self._steps, self._to_wait, self._failure = self._run(), True, None
            self._progress.started.append(self)
            if self._progress.times:
                self._progress.times.begin(self)
            self._next()

    def wait(self, limit_s: float = math.inf) -> Any:
        """Wait for the end of the run; returns the result's array.

        Raises: TimeoutError after `limit_s` seconds; the run continues then.
        """
        self.join(time.monotonic() + limit_s)
        self._finish()
        return self.result

    def join(self, deadline_s: float = math.inf) -> None:
        """Wait for the end of the run; its error is raised by `wait`."""
        self.in_background = False
        with self._stepping:
            while self._steps is not None:
                assert self._waiting_for is not None
                try:
                    self._progress.wait(self._waiting_for, self, self.words, deadline_s)
                except FAILURES as error:
                    self._fail(error)
                else:
                    self._next()

    @property
    def is_under_way(self) -> bool:
        return self._steps is not None

    def done(self) -> bool:
        """Advance the run, and others that this process has started, without waiting; return whether it has ended."""
        self.advance()
        if self._steps is not None:
            for other in [*self._progress.started]:
                if other is not self:
                    other.advance()
            return False
        self._finish()
        return True

    def advance(self) -> bool:
        """Advance the run without waiting, unless another thread does; return whether it has advanced."""
        has_moved = False
        if not self._stepping.acquire(blocking=False):
            return has_moved
        try:
            while self._steps is not None:
                assert self._waiting_for is not None
                if not self._waiting_for.test():
                    break
                self._next()
                has_moved = True
        except FAILURES as error:
            self._fail(error)
        finally:
            self._stepping.release()
        return has_moved

    def awaits(self) -> str:
        """Describe the operations for which a run is waiting now."""
        if self.device.is_async and (self._is_inside or self._steps is None):
            return "its device to finish its work"
        return self._round.awaits() if self._round else "on its way"

    @property
    def device_run(self) -> tuple[int, Event | None]:
        """The number of runs queued on the device, and the event after the latest."""
        return self.only.device_run if self.only else (self._num_runs, self._event)

    def free(self, refusal: str = "") -> None:
        """Free the persistent MPI requests.  The plan cannot be run after: `refusal` says why."""
        if self._steps is not None:
            raise RuntimeError(f"{self.name} is running: wait() before free()")
        self._refusal, self.only = refusal or f"{self.name} has been freed: make a new plan", None
        with self._stepping:  # a thread that drops the plan last may free it at the same time
            rounds, self.rounds = self.rounds, []
        requests = [request for bound in rounds for request in bound.requests()]
        if requests and not self.device.mpi_reads:
            self.device.synchronize()  # copies out of host memory that is freed with the plan
        for request in requests:
            request.Free()

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:  # this module may be gone
        if self.rounds and not is_finalizing() and not MPI.Is_finalized():
            if self._steps is None:
                self.free()
            else:
                self._leave()

    def _next(self) -> None:
        assert self._steps is not None
        try:
            awaited = self._step()
        except Exception as error:  # any error ends the run, and must reach its caller
            self._fail(error)
            return
        if awaited is None:
            self._end()
        else:
            self._waiting_for = awaited

    def _step(self) -> Waitable | None:
        """Advance to the run's next wait."""
        assert self._steps is not None
        if not self.may_block:
            return next(self._steps, None)
        with self._progress.inside(self):
            self._is_inside = True
            try:
                return next(self._steps, None)
            finally:
                self._is_inside = False

    def _end(self) -> None:
        self._steps = None
        self.in_background = False
        if self._last is not None and self.device.is_async:
            self._progress.queued.add(self)
        self._progress.started.remove(self)
        if self._progress.times:
            self._progress.times.end(self)
        if self.entry:
            self.entry.under_way = False
        self.at_end()

    def _run(self) -> Iterator[Waitable]:
        if not (self.rounds or self.before or self.after or self.divide):
            return  # as of a single rank: its device has nothing to wait for
        device, times = self.device, self._progress.times
        device.begin()
        device.copy_pairs(self.before)
        for bound in self.rounds:
            self._round = bound
            words = describe(bound.number, bound.moves) if times and bound.moves else ""
            yield from times.run(self, bound, words, device) if times else bound.run(device)
        if self.divide:
            device.divide(*self.divide)
        device.copy_pairs(self.after)
        self._last = self._event = device.record()
        self._num_runs += 1

    def take_end(self) -> Event | None:
        """Return the event at the end of the latest run, if that has not been waited for.

        Raises: the run's error, if it has failed, each time.
        """
        self._to_wait = False
        failure, self._failure = self._failure, copy(self._failure)  # without the traceback, which has arrays
        if failure is not None:
            try:
                raise failure
            finally:
                del failure  # the error's traceback has this frame: arrays would live until Python collects the cycle
        last, self._last = self._last, None
        if last is not None:
            self._progress.queued.discard(self)
        return last

    def _finish(self) -> None:
        """Raise the run's error, if it has failed, else order the caller's current stream after it."""
        if (last := self.take_end()) is None:
            return
        try:
            self.device.end(last)
        except DEVICE_ERRORS as error:
            raise self._failed(error) from error

    def _leave(self) -> None:
        """End a run whose messages may still be in flight."""
        keep_in_flight(request for bound in self.rounds for request in bound.in_flight())

    def _fail(self, error: Exception) -> None:
        """End the run with an error, raised by `wait` or `done`."""
        self._leave()
        if not isinstance(error, MismatchError | InputError):
            error, cause = self._failed(error), error
            error.__cause__ = cause
        self._failure = error
        self._end()

    def _failed(self, error: Exception) -> CommunicationError:
        """Make the error of a run; other ranks are told of a device's at once, as they would wait in vain."""
        moves = self._round.moves if self._round else ()
        where = f", round {self._round.number}: {', '.join(map(show, moves))}" if self._round and moves else ""
        if isinstance(error, MPI.Exception | RankFailure):
            why = self._progress.failure or self._progress.deaths() or error
            return communication_error(f"{self.name}{where}: {why}")
        if self.device.is_async and not isinstance(error, CommunicationError | InputError):
            self._progress.tell(f"{self.entry.latest() if self.entry else self.name}: {error}")
        return CommunicationError(f"{self.name}{where}: {error}")


refuse_after_fork(Plan)


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
