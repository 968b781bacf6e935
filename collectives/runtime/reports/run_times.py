"""Times of this process's runs of plans and of their rounds, while they are recorded."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from collectives.arrays.device import Device, Event, host
from collectives.runtime.progress import Advanceable, Progress, Waitable


class TimedRound(NamedTuple):
    """A round of messages, or the barriers of a program that were passed in one go; by `time.perf_counter`."""

    words: str
    begin_s: float
    end_s: float


@dataclass
class TimedRun:
    """A run of a collective, or of a message.

    `calls` is its communicator's label in the call log, None for a message; `nbytes` are those of its array.
    """

    name: str
    calls: str | None
    nbytes: int
    begin_s: float
    end_s: float = 0.0
    rounds: list[TimedRound] = field(default_factory=list)


class RunTimes(Advanceable):
    """A recorder of the runs of a process's plans, in the order of their ends.

    It stands among the started plans while it records, so that no call takes the fast path, in which nothing is noted.
    """

    name = words = "run times"
    entry = None
    in_background = is_under_way = False
    rounds = ()
    device_run: tuple[int, Event | None] = (0, None)

    def __init__(self) -> None:
        self.device = host()
        self.runs: list[TimedRun] = []
        self.under_way: dict[int, TimedRun] = {}  # by the identity of their plans

    def advance(self) -> bool:
        return False

    def awaits(self) -> str:
        return "nothing"

    def begin(self, plan: Any) -> None:
        calls = plan.entry.calls.label if plan.entry else None
        self.under_way[id(plan)] = TimedRun(plan.words or plan.name, calls, 0, time.perf_counter())

    def end(self, plan: Any) -> None:
        if run := self.under_way.pop(id(plan), None):
            run.end_s, run.name = time.perf_counter(), plan.words or plan.name  # as agreed on meanwhile
            run.nbytes = plan.entry.nbytes if plan.entry else 0
            self.runs.append(run)

    def run(self, plan: Any, step: Any, words: str, device: Device) -> Iterator[Waitable]:
        """Run a step of a plan, and note its time if it is the round in `words`, else those between its barriers."""
        run = self.under_way.get(id(plan))
        rounds = run.rounds if run else []
        begin_s, num_barriers = time.perf_counter(), getattr(step, "num_barriers", 0)
        noted = NotedWaits(rounds, num_barriers)
        for noted.of in step.run(device):
            yield noted
        if words:
            rounds.append(TimedRound(words, begin_s, time.perf_counter()))
        else:
            noted.note(getattr(step, "num_barriers", 0))


class NotedWaits(Waitable):
    """The waits of a step, each `of` something, in which it notes when a program has passed barriers."""

    of: Waitable

    def __init__(self, rounds: list[TimedRound], num_barriers: int):
        self.rounds, self.first, self.passed, self.since_s = rounds, num_barriers, num_barriers, time.perf_counter()

    def test(self) -> bool:
        return self.look(self.of.test)

    def spin(self) -> bool:
        return self.look(self.of.spin)

    @property
    def num_barriers(self) -> int:
        return self.of.num_barriers

    def look(self, look: Callable[[], bool]) -> bool:
        is_over = look()
        self.note(self.of.num_barriers)
        return is_over

    def note(self, num_barriers: int) -> None:
        """Note the barriers that a program has passed since the last time."""
        if num_barriers > self.passed:
            now_s, begin, end = time.perf_counter(), self.passed - self.first + 1, num_barriers - self.first
            words = f"barrier {end}" if begin == end else f"barriers {begin} to {end}"
            self.rounds.append(TimedRound(words, self.since_s, now_s))
            self.passed, self.since_s = num_barriers, now_s


@contextmanager
def recording(progress: Progress) -> Iterator[list[TimedRun]]:
    """Record the runs of all communicators that share this progress, in this context."""
    times = progress.times = RunTimes()
    progress.started.append(times)
    try:
        yield times.runs
    finally:
        progress.started.remove(times)
        progress.times = None
