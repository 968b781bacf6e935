"""Work objects of torch's calls, and the threads that run asynchronous calls in order."""

import math
import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from datetime import timedelta
from typing import Any

import torch
from mpi4py import MPI
from torch.distributed import DistBackendError, Work
from torch.futures import Future

from collectives.arrays.packing import pack_tensors
from collectives.job.backoff import Backoff
from collectives.job.errors import CommunicationError, InputError
from collectives.runtime.backends.point_to_point import RecvMessage
from collectives.runtime.plan import Plan, Predecessor

Base: Any = Work  # declared with a C++ result and future
BUSY = 0.25  # share of time for which other threads compute, above which they need the core
FAILURES = (TimeoutError, InputError, CommunicationError, MPI.Exception)
IDLE_S = 1e-3  # a period without computation after which others are taken to be idle
HELD: set[Work] = set()  # referenced until they are waited for or asked for their future
Tensors = Sequence[torch.Tensor]
Runs = Callable[[Any], Any]  # of a plan
ErrorOf = Callable[[Exception, float], DistBackendError]  # takes the exception, and the time limit


class Finished(Base):
    """The work of a completed call."""

    def __init__(self, tensors: Tensors = ()):
        super().__init__()
        self.tensors = list(tensors)
        self.error: BaseException | None = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return self.is_completed() and self.error is None

    def exception(self) -> BaseException | None:
        return self.error

    def synchronize(self) -> None:
        self.wait()

    def result(self) -> list[torch.Tensor]:
        self.wait()
        return self.tensors

    def __repr__(self) -> str:
        return f"{type(self).__name__}(ended)"

    def get_future(self) -> Future:
        future: Future = Future()
        future.set_result(self.tensors)
        return future


class PlanWork(Finished):
    """The work of a started plan, which its caller's thread advances when it waits.

    `error_of` makes torch's kind of error.
    """

    def __init__(
        self, plan: Plan, tensors: Tensors, limit_s: float, error_of: ErrorOf, queue: "CallQueue | None" = None
    ):
        super().__init__(tensors)
        self.plan, self.limit_s, self.error_of, self.queue = plan, limit_s, error_of, queue
        self.pending: Pending | None = None  # completes the future, if one has been asked for in time

    def wait(self, timeout: timedelta | None = None) -> bool:
        self.wait_for_plan(timeout)
        if self.pending is not None:
            self.pending.wait(timeout)
        return True

    def wait_for_plan(self, timeout: timedelta | None = None) -> None:
        limit_s = min(self.limit_s, seconds(timeout))
        if self.error is None:
            self.attempt(lambda: self.plan.wait(limit_s), limit_s)
        if self.error is not None:
            raise self.error

    def is_completed(self) -> bool:
        return self.error is not None or bool(self.attempt(self.plan.done))

    def attempt(self, look: Callable[[], Any], limit_s: float = 0) -> Any:
        """Return the result of `look`; on a failure, store the error and return True."""
        try:
            return look()
        except FAILURES as error:
            self.error = self.error_of(error, limit_s)
            return True

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.plan!r})"

    def get_future(self) -> Future:
        if self.pending is None:
            if self.is_success():
                return super().get_future()
            assert self.queue is not None
            self.pending = Pending(self.follow, self.tensors, self.limit_s)
            self.queue.add(self.pending)
        return self.pending.future

    def follow(self, run: Runs) -> None:
        """Let a thread of the group wait, for the future."""
        self.attempt(lambda: run(Predecessor(self.plan)), self.limit_s)
        self.wait_for_plan()


class MessageWork(PlanWork):
    """The work of a message in flight: of a tensor's own memory, or of a copy if that has gaps."""

    def __init__(self, begin: Callable, tensor: torch.Tensor, peer: int | None, tag: int, limit_s: float):
        self.packing = pack_tensors([tensor.detach()])
        self.packing.load()
        plan = begin(self.packing.array.view(-1).view(torch.uint8), peer, tag, blocking=False)
        super().__init__(plan, [tensor], limit_s, self.as_torch)
        self.message, self.device = plan.rounds[0], tensor.device
        self.is_finished, self.after = False, None

    def as_torch(self, error: Exception, limit_s: float) -> DistBackendError:
        is_late = isinstance(error, TimeoutError)
        return DistBackendError(f"{self.plan.words} did not finish after {limit_s:g} s" if is_late else str(error))

    def wait(self, timeout: timedelta | None = None) -> bool:
        super().wait(timeout)
        self.finish()
        return True

    def is_completed(self) -> bool:
        is_over = super().is_completed()
        if is_over and self.error is None:
            self.finish()
        return is_over and is_past(self.after)

    def finish(self) -> None:
        """Finish a message that has arrived, perhaps in another thread; order later work on its stream after it."""
        if self.is_finished:
            follow(self.after, self.device)
            return
        if isinstance(self.message, RecvMessage):
            self.packing.store()
        self.is_finished, self.after = True, event_on(self.device)

    def get_future(self) -> Future:
        raise NotImplementedError("a message has no future, as over gloo: call wait() of its work")

    def _source_rank(self) -> int:
        return self.message.peer

    source_rank = _source_rank


class Pending(Finished):
    """The work of a call that a thread of the group runs; on a device it is complete when the event `after` is.

    `execute` makes the call, with a function to run its plans; they must end `limit_s` seconds after it was queued.
    `inputs` are the tensors that it reads.
    """

    def __init__(self, execute: Callable[[Runs], Any], tensors: Tensors, limit_s: float, inputs: Tensors = ()):
        super().__init__(tensors)
        self.execute, self.inputs = execute, inputs
        self.device = next((tensor.device for tensor in tensors if tensor.is_cuda), None)
        self.before, self.after = event_on(self.device), None
        self.stream: Any = None
        self.ran: Future = Future(devices=[self.device] if self.device else None)
        self.future: Future = self.ran.then(lambda _: self.value())  # what a callback raises is an error to C++, too
        self.over = over = threading.Event()
        self.future.add_done_callback(lambda _: over.set())  # before other continuations, which may take long
        self.deadline_s = time.monotonic() + limit_s
        self.awaited = self.has_run = False

    def wait(self, timeout: timedelta | None = None) -> bool:
        self.awaited = True
        HELD.discard(self)
        limit_s = seconds(timeout)
        if not self.over.wait(None if limit_s == math.inf else limit_s):
            raise DistBackendError(f"not finished after {limit_s:g} s")
        if self.error is not None:
            raise self.error
        follow(self.after, self.device)
        return True

    def is_completed(self) -> bool:
        if self.has_run:
            self.over.wait()  # until the thread that has run it sets the future, at once
        return self.over.is_set() and is_past(self.after)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({'ended' if self.over.is_set() else 'running'})"

    def get_future(self) -> Future:
        HELD.discard(self)
        return self.future

    def run(self) -> None:
        try:
            if self.before is None:
                self.execute(self.run_plan)
            else:
                self.run_on_stream()
        except Exception as error:  # raised where it is waited for
            self.error = error
        self.has_run = True

    def run_on_stream(self) -> None:
        """Run it after the earlier work on its caller's stream; the host does not wait for the device."""
        self.stream = torch.cuda.Stream(self.device)
        with torch.cuda.stream(self.stream):
            self.stream.wait_event(self.before)
            self.execute(self.run_plan)
            self.after = self.stream.record_event()
        for tensor in (*self.tensors, *self.inputs):
            tensor.record_stream(self.stream)  # its memory is not reused before then

    def set_future(self) -> None:
        """End the work and its future, whose value C++ reads after `wait`.

        This runs the future's continuations, too, which may wait for other calls; they follow this one on the device.
        """
        with torch.cuda.stream(self.stream) if self.stream else nullcontext():
            self.ran.set_result(self.tensors)  # whose events on devices the next future takes over

    def value(self) -> list[torch.Tensor]:
        if self.error is not None:
            raise self.error
        return self.tensors

    def run_plan(self, plan: Plan) -> None:
        """Run a plan and leave the core to computing threads, until one waits for it, or none computes.

        C++ code that waits for the future does not tell; but then this process's other threads are idle.
        """
        plan.begin()
        backoff = Backoff()
        while not self.awaited:
            if plan.done():
                return
            if time.monotonic() > self.deadline_s:
                raise TimeoutError
            computed_s = others_s()
            slept_s = backoff.sleep()
            if others_s() - computed_s > BUSY * slept_s:
                continue
            with suppress(TimeoutError):
                plan.wait(IDLE_S)
                return
            backoff.reset()
        plan.wait(max(0, self.deadline_s - time.monotonic()))


def event_on(device: torch.device | None) -> Any:
    """Return an event after the current stream's work by now; None if there are no streams."""
    return torch.cuda.current_stream(device).record_event() if device is not None and device.type == "cuda" else None


def follow(event: Any, device: torch.device | None) -> None:
    """Order the current stream after an event, if there is one."""
    if event is not None:
        torch.cuda.current_stream(device).wait_event(event)


def is_past(event: Any) -> bool:
    return event is None or event.query()


def others_s() -> float:
    """Return the seconds for which this process's other threads have computed."""
    return time.process_time() - time.thread_time()


def seconds(timeout: timedelta | None) -> float:
    """Return torch's time limit in seconds; none, or one below 0, means no limit of its own."""
    limit_s = math.inf if timeout is None else timeout.total_seconds()
    return limit_s if limit_s > 0 else math.inf


class CallQueue:
    """A queue that runs calls one after the other, in its own threads; while it is empty, a caller may run one itself.

    One thread at a time may run a call.  It gives up its turn before it sets the call's future, so that a continuation
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
    def is_empty(self) -> bool:
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
        while True:
            with self.turn:
                pending = self.calls.get()
                if pending is None:
                    self.calls.put(None)  # for the other threads
                    return
                with self.running:
                    pending.run()
            self._have_free(-1)
            pending.set_future()
            del pending
            self._have_free(1)

    def end(self) -> None:
        """Return when all calls and their continuations are complete."""
        if self.threads:
            self.calls.put(None)
            for thread in self.threads:
                thread.join()
            self.calls, self.threads, self.num_free = queue.SimpleQueue(), [], 0
