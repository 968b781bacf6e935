"""Profile of some steps of a run: every rank's time by kind of work."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from parallelism.pipeline.layer_times import now
from parallelism.step.events import Listener
from training.config import TRACED
from training.device import memory_mib

if TYPE_CHECKING:
    from parallelism.pipeline.schedule.price import Span, Timeline
    from parallelism.pipeline.stage import Batch
    from parallelism.step.actions import Action
    from training.run import TrainingRun

NUMBER = 5  # of profiled steps, after the traced one
AXES = ("tp", "sp", "ep", "dp", "pp")
COMPUTING, ALL_RANKS, BUBBLE, OPTIMIZER, INPUT, OTHER = "computing", "all", "bubble", "optimizer", "input", "other"
WAITS = (*AXES, ALL_RANKS, BUBBLE)
KINDS = (COMPUTING, *WAITS, OPTIMIZER, INPUT, OTHER)


class ProfiledStep(NamedTuple):
    """A rank's step: its seconds, the seconds of each of `KINDS`, and the rank's peak memory so far."""

    iteration: int
    rank: int
    step_s: float
    seconds: dict[str, float]
    memory_mib: float

    @property
    def comm_s(self) -> float:
        """Seconds of all waits for other ranks."""
        return sum(self.seconds[kind] for kind in WAITS)


class StepProfiler(Listener):
    """Profiles some steps of a run on this rank, by the host's clock; rank 0 gathers all ranks' in `steps`.

    Waits for other ranks count for their axis only.  In profiled steps, the device is synchronized where a kind begins
    and ends.
    """

    def __init__(self, run: TrainingRun):
        self.run, self.is_on = run, False
        self.steps: list[ProfiledStep] = []
        self.planned: Timeline | None = None  # of the traced step
        self.happened: list[Span] = []
        self.seconds: dict[str, float] = {}
        self.input_s = 0.0  # wait for the latest step's input

    def inputs(self, batches: Generator[list[Batch], None, None]) -> Generator[list[Batch], None, None]:
        """Yield batches, and time the wait for each."""
        with closing(batches):
            while True:
                begin_s = time.perf_counter()
                batch = next(batches, None)
                self.input_s = time.perf_counter() - begin_s
                if batch is None:
                    return
                yield batch

    def wants(self, iteration: int) -> bool:
        """Return whether to profile a step: some after the traced one, or else the last one of a short run."""
        config, number = self.run.config, iteration - self.run.first + 1
        is_early = number <= TRACED
        return bool(config.report) and (iteration == config.max_iters if is_early else number <= TRACED + NUMBER)

    @contextmanager
    def profiling(self, iteration: int) -> Iterator[None]:
        """Profile the step in this context, if it is selected.  Collective."""
        if not self.wants(iteration):
            yield
            return
        before, self.seconds, self.is_on = self.exposed(), dict.fromkeys(KINDS, 0.0), True
        begin_s = now(self.run.config.device)
        model = self.run.model
        with model.notifying(self, model.listeners.index(model.times) + 1):  # so that actions begin and end within its
            yield
        step_s, self.is_on = self.input_s + now(self.run.config.device) - begin_s, False
        self.seconds |= {axis: after - before[axis] for axis, after in self.exposed().items()}
        self.seconds[INPUT] += self.input_s
        self.seconds[OTHER] = step_s - sum(self.seconds.values())
        comm, device = self.run.mesh.comm, self.run.config.device
        own = ProfiledStep(iteration, comm.rank, step_s, self.seconds, memory_mib(device))
        self.steps += comm.gather_object(own) or []

    @contextmanager
    def timing(self, kind: str) -> Iterator[None]:
        """Count the time in this context as one kind."""
        begin = self.mark() if self.is_on else None
        yield
        if begin:
            self.seconds[kind] += self.since(begin)

    def before(self, action: Action, following: Action | None) -> None:
        self._action = self.mark()

    def after(self, action: Action) -> None:
        self.seconds[COMPUTING] += self.since(self._action)

    def mark(self) -> tuple[float, float]:
        """Return the current time, and the total time spent waiting for other ranks, in seconds."""
        return now(self.run.config.device), self.waited_s

    def since(self, mark: tuple[float, float]) -> float:
        """Return the seconds since a mark, without waits for other ranks."""
        now_s, waited_s = self.mark()
        return now_s - mark[0] - (waited_s - mark[1])

    @property
    def waited_s(self) -> float:
        """Seconds that this rank has waited for other ranks since the run began, of whatever kind."""
        return sum(self.exposed().values())

    def exposed(self) -> dict[str, float]:
        """Return the seconds that this rank has waited for other ranks since the run began, by kind."""
        run = self.run
        own = run.replica.own
        axes: dict[str, Any] = {
            "tp": run.tp_collectives,
            "sp": run.sp,
            "ep": run.exchange,
            "dp": run.replica,
            "pp": own.tied,
        }
        of_all = run.clip.exposed_s + run.guard.exposed_s + run.sum_time.exposed_s
        bubble_s = run.model.times.exposed_s if run.mesh.pp.size > 1 else 0.0
        by_axis = {axis: each.exposed_s if each else 0.0 for axis, each in axes.items()}
        return {**by_axis, ALL_RANKS: of_all, BUBBLE: bubble_s}

    def keep(self, planned: Timeline, happened: list[Span]) -> None:
        self.planned, self.happened = planned, happened
