"""Progress of plans: by the thread that waits, which also advances other started plans, or by a background thread."""

import math
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from itertools import count
from threading import get_ident
from typing import Any, NamedTuple, Protocol
from weakref import WeakValueDictionary

from mpi4py import MPI

from collectives.arrays.device import Device, Event
from collectives.job import system
from collectives.job.backoff import LONGEST_SLEEP_S, Backoff
from collectives.job.launch import at_exit_with, communication_error, dead_ranks, refuse_after_fork

SPIN_S = 5e-5  # of polling before a waiting thread gives up the core between polls
LATE_S = 5e-4  # a yield that returns later has gone to a computing process
NAP_S, MOST_NAPS = 2e-5, 256
YIELD_S = 1e-2  # of waiting before it sleeps
SLEPT_FRACTION = 1 / 64  # of the time waited so far, which bounds the delay
MOST_VAIN_SLEEPS = 64  # of a thread that was woken in vain, before it waits to be woken again


class Waitable(Protocol):
    """Something that a run waits for: messages, or other ranks' arrival."""

    def test(self) -> bool:
        """Advance without waiting; return whether it is complete."""

    def spin(self) -> bool:
        """Advance as `test` does, and possibly poll for a moment."""
        return self.test()

    @property
    def num_barriers(self) -> int:
        """A counter that grows with each barrier passed."""
        return 0


class Advanceable(Protocol):
    """A run that a thread can advance, as a plan's."""

    name: str
    words: str
    entry: Any
    device: Device
    in_background: bool
    rounds: Sequence[Any]

    def advance(self) -> bool:
        """Advance without waiting; return whether it has advanced."""

    def awaits(self) -> str:
        """Describe what it waits for."""

    @property
    def device_run(self) -> "tuple[int, Event | None]":
        """The number of runs queued on the device, and the event after the latest."""

    @property
    def is_under_way(self) -> bool: ...


class Wait(NamedTuple):
    """A waiting thread: for a plan to advance, or for the event in `words`."""

    thread: int
    plan: Advanceable | None
    words: str


class Progress:
    """Waits for requests, and keeps this process's other started plans moving meanwhile."""

    def __init__(self, oversubscribed: bool):
        self.oversubscribed = oversubscribed  # more ranks than cores: spinning delays other ranks
        self.started: list[Advanceable] = []
        self.background = Background(self.started)
        self.waits: dict[int, tuple[int, Advanceable | None, str]] = {}  # current ones, each by its own number
        self.on_devices: WeakValueDictionary[int, Advanceable] = WeakValueDictionary()  # plans whose work devices do
        self.queued: set[Advanceable] = set()  # plans that nobody has waited for, whose arrays a device may still use
        self.tell: Callable[[str], None] = lambda words: None  # tells other ranks that this one's device has failed
        self.times: Any = None  # the recorder of runs, while there is one; see `run_times`
        self.failure = ""  # of another rank's device, or the deaths of ranks
        self.deaths = dead_ranks  # names the ranks that have died
        self._num_waits = count()
        self._naps = 0

    def wait(
        self, awaited: Waitable, waiting: Advanceable | None = None, words: str = "", deadline_s: float = math.inf
    ) -> None:
        """Wait for something, of the plan `waiting` if given; `words` describe it, if it is not a collective.

        Raises: TimeoutError when the clock `time.monotonic` passes `deadline_s`.
        """
        number = next(self._num_waits)
        is_helper = self.background.is_helper
        if not is_helper:
            self.waits[number] = get_ident(), waiting, words
        others = [plan for plan in self.started if plan is not waiting]
        look = awaited.test if others else awaited.spin
        num_barriers, since_s = awaited.num_barriers, time.monotonic()
        try:
            while not look():
                if self.failure or (is_helper and self.background.ended):
                    raise communication_error(self.failure or "this process ends")
                for plan in others:
                    plan.advance()
                now_s = time.monotonic()
                if now_s > deadline_s:
                    raise TimeoutError
                if num_barriers != awaited.num_barriers:
                    num_barriers, since_s = awaited.num_barriers, now_s
                self.relax(now_s - since_s)
        finally:
            self.waits.pop(number, None)

    def release_queued(self) -> None:
        """Drop the references to plans whose work a device has done meanwhile."""
        for plan in [*self.queued]:
            event = plan.device_run[1]
            if event is None or plan.device.is_done(event):
                self.queued.discard(plan)

    @contextmanager
    def inside(self, waiting: Advanceable) -> Iterator[None]:
        """Record a wait inside MPI or CUDA."""
        number = next(self._num_waits)
        if not self.background.is_helper:
            self.waits[number] = get_ident(), waiting, ""
        try:
            yield
        finally:
            self.waits.pop(number, None)

    def relax(self, waited_s: float) -> None:
        """Give up the core to others, the more the longer a wait has made no progress."""
        if waited_s > YIELD_S:
            time.sleep(min(LONGEST_SLEEP_S, SLEPT_FRACTION * waited_s))
        elif self.oversubscribed or waited_s > SPIN_S:
            self.leave_core()

    def leave_core(self) -> None:
        """Give up the core to other ranks by a yield, or by sleeps after a late one; as `kernels.leave_core`."""
        if self._naps:
            self._naps -= 1
            time.sleep(NAP_S)
            return
        begin_s = time.monotonic()
        system.yield_core()
        self._naps = MOST_NAPS * (time.monotonic() - begin_s > LATE_S)


refuse_after_fork(Progress)


class InThread(Waitable):
    """The end of a function that a thread of its own runs, since it waits for other ranks."""

    def __init__(self, function: Callable[[], Any], helpers: "dict[int, threading.Thread]"):
        self.helpers = helpers
        self.future: Future[Any] = Future()
        self.thread = threading.Thread(target=self._run, args=(function,), name="collectives new call", daemon=True)
        self.thread.start()

    def test(self) -> bool:
        return self.future.done()

    def _run(self, function: Callable[[], Any]) -> None:
        self.helpers[get_ident()] = self.thread
        try:
            self.future.set_result(function())
        except BaseException as error:  # raised by `future.result`
            self.future.set_exception(error)
        finally:
            del self.helpers[get_ident()]


class Background:
    """A thread that advances the plans of a list, and sleeps while none advances, or there are none.

    Its work releases Python's lock: messages, NumPy's loops over long arrays, compiled programs.  A plan that the
    process itself waits for is left to the waiting thread.  A wake takes a core from the ranks, so a thread that finds
    nothing to do when it wakes, as the process has waited at once, looks again each millisecond for a while: meanwhile
    nothing wakes it.  MPI must allow calls from several threads; else there is no
    background thread, and plans advance only when their process waits or calls `done()`.

    `helpers` are further threads, each of which agrees on a started call with the other ranks.  Their waits are not
    those of the process, and end with it.
    """

    def __init__(self, plans: Sequence[Advanceable]):
        self.plans = plans
        self.allowed = MPI.Query_thread() == MPI.THREAD_MULTIPLE
        self.thread: threading.Thread | None = None
        self.starting = threading.Lock()
        self.helpers: dict[int, threading.Thread] = {}
        self.work = threading.Event()
        self.ended = False

    @property
    def is_helper(self) -> bool:
        """Whether the calling thread is one of them."""
        return get_ident() in self.helpers

    def attend(self) -> None:
        """Wake the thread: there is work to do."""
        if self.allowed and self.thread is None:
            self.begin()
        self.work.set()

    def begin(self) -> None:
        """Start the thread, unless another one of the program's has just done so."""
        with self.starting:
            if self.thread is None:
                self.thread = threading.Thread(target=self._run, name="collectives", daemon=True)
                self.thread.start()
                at_exit_with(self, Background.end)  # before mpi4py ends MPI

    def end(self) -> None:
        self.ended = True
        self.work.set()
        for thread in filter(None, [self.thread, *self.helpers.values()]):
            thread.join()

    def finish(self, function: Callable[[], Any]) -> "Generator[Waitable, None, Any]":
        """Advanceable a function that waits for other ranks, and return its result: by a thread, if MPI allows it."""
        if not self.allowed:
            return function()
        waiting = InThread(function, self.helpers)
        if not waiting.test():
            yield waiting
        return waiting.future.result()

    def pause(self) -> None:
        """End the thread, until another plan is started."""
        self.end()
        self.work.clear()
        self.thread, self.ended = None, False

    def _run(self) -> None:
        backoff, vain_sleeps = Backoff(), 0
        while True:
            self.work.wait()
            if self.ended:
                return
            plans = [plan for plan in self.plans if plan.in_background]
            if not plans and vain_sleeps:
                vain_sleeps -= 1
                time.sleep(LONGEST_SLEEP_S)
                continue
            if not plans:
                vain_sleeps = MOST_VAIN_SLEEPS
                self.work.clear()
                if not any(plan.in_background for plan in self.plans):
                    continue
                self.work.set()  # one was added in between
            vain_sleeps = 0
            have_advanced = [plan.advance() for plan in plans]
            if any(have_advanced):
                backoff.reset()
            backoff.sleep()
