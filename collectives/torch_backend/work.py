"""What a call returns to wait for, and the thread that runs a group's asynchronous calls in their order."""

import math
import queue
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch.distributed import Work
from torch.futures import Future

from collectives.runtime.plan import Plan
from collectives.torch_backend.order import Order, device_of

Base: Any = Work  # declared with a C++ result and future
SHORTEST_SLEEP_S, LONGEST_SLEEP_S = 2e-5, 1e-3
BUSY = 0.25  # part of a moment that others compute, above which they need the core
IDLE_S = 1e-3  # for how long nobody is taken to compute

Run = Callable[[Plan, float], None]  # runs a plan, which must end so many seconds after its call was made


def at_once(made_s: float, plan: Plan, limit_s: float) -> None:
    """Run a plan of a call that was made at that time."""
    if not plan.run_only():
        plan.begin()
        plan.wait(max(0, made_s + limit_s - time.monotonic()))


class Finished(Base):
    """Of a call that is over."""

    def __init__(self, tensors: Sequence[torch.Tensor] = ()):
        super().__init__()
        self.tensors = list(tensors)

    def wait(self, timeout: timedelta | None = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def exception(self) -> BaseException | None:
        return None

    def synchronize(self) -> None:
        self.wait()

    def result(self) -> list[torch.Tensor]:
        self.wait()
        return self.tensors

    def get_future(self) -> Future:
        future: Future = Future()
        future.set_result(self.tensors)
        return future


class Pending(Finished):
    """Of a call that the group's thread runs."""

    def __init__(self, run: Callable[[Run], Any], tensors: Sequence[torch.Tensor]):
        super().__init__(tensors)
        self.run = run
        device = device_of(tensors)
        self.order = device and Order(device)
        self.future: Future = Future(devices=[device] if device else None)
        self.over = threading.Event()
        self.made_s = time.monotonic()
        self.awaited = False
        self.error: BaseException | None = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        self.awaited = True
        limit_s = seconds(timeout)
        if not self.over.wait(None if limit_s == math.inf else limit_s):
            raise torch.distributed.DistBackendError(f"not over after {limit_s:g} s")
        if self.error is not None:
            raise self.error
        return True

    def is_completed(self) -> bool:
        return self.over.is_set()

    def is_success(self) -> bool:
        return self.over.is_set() and self.error is None

    def exception(self) -> BaseException | None:
        return self.error

    def get_future(self) -> Future:
        return self.future

    def execute(self) -> None:
        try:
            if self.order:
                self.order.run(partial(self.run, self.gently))
            else:
                self.run(self.gently)
        except Exception as error:  # raised where it is waited for
            self.error = error
        self.over.set()

    def set_future(self) -> None:
        """Run the future's continuations, too, which may wait for other calls."""
        if self.error is None:
            self.future.set_result(self.tensors)
        else:
            self.future.set_exception(self.error)

    def gently(self, plan: Plan, limit_s: float) -> None:
        """Run a plan and leave the core to who computes, until somebody waits, or nobody computes.

        C++ that waits for the future does not say so: what shows is that this process's other threads do nothing.
        """
        self.move(plan, limit_s)
        if plan.device.is_async:  # and any thread may have ended the plan, on its own stream
            plan.device.synchronize()

    def move(self, plan: Plan, limit_s: float) -> None:
        deadline_s, sleep_s = self.made_s + limit_s, SHORTEST_SLEEP_S
        plan.begin()
        while not self.awaited:
            if plan.done():
                return
            if time.monotonic() > deadline_s:
                raise TimeoutError
            computed_s = others_s()
            time.sleep(sleep_s)
            if others_s() - computed_s > BUSY * sleep_s:
                sleep_s = min(2 * sleep_s, LONGEST_SLEEP_S)
            elif ended_within(plan, IDLE_S):
                return
            else:
                sleep_s = SHORTEST_SLEEP_S
        plan.wait(max(0, deadline_s - time.monotonic()))


def others_s() -> float:
    """How long this process's other threads have computed."""
    return time.process_time() - time.thread_time()


def ended_within(plan: Plan, limit_s: float) -> bool:
    """Wait for a plan, for so many seconds at most; whether it has ended."""
    try:
        plan.wait(limit_s)
    except TimeoutError:
        return False
    return True


def seconds(timeout: timedelta | None) -> float:
    """torch's time limit; none, or one below 0, is no limit of its own."""
    limit_s = math.inf if timeout is None else timeout.total_seconds()
    return limit_s if limit_s > 0 else math.inf


class Line:
    """Runs calls one after the other, in threads of its own; while it is free, a caller may run one himself.

    One thread has the turn to run a call.  It gives that up before it sets the call's future, so that a continuation
    may wait for calls behind its own: while all threads are in continuations, one more is started.
    """

    def __init__(self) -> None:
        self.calls: queue.SimpleQueue[Pending | None] = queue.SimpleQueue()
        self.threads: list[threading.Thread] = []
        self.turn, self.counting = threading.Lock(), threading.Lock()
        self.running = threading.Lock()  # held by the thread that runs a call, one of these or a caller's
        self.num_free = 0  # threads that are in no continuation
        self.latest: Pending | None = None

    @property
    def free(self) -> bool:
        return self.latest is None or self.latest.over.is_set()

    def add(self, pending: Pending) -> None:
        self.latest = pending
        self._have_free(0)
        self.calls.put(pending)

    def _have_free(self, change: int) -> None:
        """Count a thread that enters a continuation or leaves it; start one where none is free."""
        with self.counting:
            self.num_free += change
            if self.num_free == 0:
                self.num_free = 1
                self.threads.append(threading.Thread(target=self._run, name="collectives group", daemon=True))
                self.threads[-1].start()

    def _run(self) -> None:
        while pending := self._execute_next():
            self._have_free(-1)
            pending.set_future()
            del pending
            self._have_free(1)

    def _execute_next(self) -> Pending | None:
        """Run the next call; returns it, or None at the end."""
        with self.turn:
            pending = self.calls.get()
            if pending is None:
                self.calls.put(None)  # for the other threads
            else:
                with self.running:
                    pending.execute()
            return pending

    def end(self) -> None:
        """Return when all calls are over, and what follows them."""
        if self.threads:
            self.calls.put(None)
            for thread in self.threads:
                thread.join()
            self.calls, self.threads, self.num_free = queue.SimpleQueue(), [], 0
