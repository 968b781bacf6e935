"""Profile of some steps of a run: every rank's time by kind of work."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from typing import NamedTuple

from parallelism.buffers.tensor_collectives import ExposedTime
from parallelism.mesh import Mesh
from parallelism.pipeline.layer_times import now
from parallelism.pipeline.pipeline_parallel import PipelineParallel
from parallelism.pipeline.schedule.price import Span, Timeline, price
from parallelism.pipeline.stage import Batch
from parallelism.pipeline.trace import SpanRecorder, gather, measured, save_picture
from parallelism.step.actions import BACKWARD, FORWARD, INPUTS, WEIGHTS, Action
from parallelism.step.events import Listener
from parallelism.step.optimizer import Optimizer
from training.reports.memory_use import MemoryUse
from training.reports.metrics import memory_mib
from training.reports.rank_trace import RankTrace
from training.settings.derived import picture_of
from training.settings.fields import NUMBER_TRACED, TRACED, RunSettings

NUMBER = 5  # of profiled steps, after the traced one, and of those in a table
AXES = ("tp", "sp", "ep", "dp", "pp")
ALL_RANKS, BUBBLE, OPTIMIZER, INPUT, OTHER = "all", "bubble", "optimizer", "input", "other"
PASSES = {FORWARD: "forward", BACKWARD: "backward", INPUTS: "backward", WEIGHTS: "backward"}  # by the kind of an action
WAITS = (*AXES, ALL_RANKS, BUBBLE)
KINDS = (*dict.fromkeys(PASSES.values()), *WAITS, OPTIMIZER, INPUT, OTHER)


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
    """Profiles steps of a run on this rank, by the host's clock; for a report, rank 0 gathers all ranks' in `steps`.

    `waits` add up the waits for other ranks, by the kind for which alone these count.  In profiled steps, the device is
    synchronized where a kind begins and ends: on CPUs all steps are profiled but the first, which sets up, elsewhere
    those of a report or of a table that is asked for.  `latest` has this rank's last ones, for `gathered`.
    """

    def __init__(
        self,
        pipeline: PipelineParallel,
        mesh: Mesh,
        config: RunSettings,
        first: int,
        waits: Mapping[str, Sequence[ExposedTime]],
        optimizer: Optimizer,
    ):
        self.pipeline, self.mesh, self.config, self.waits, self.is_on = pipeline, mesh, config, waits, False
        self.optimizer = optimizer
        last = config.max_iters
        self.trace = RankTrace(mesh, config.device, config.profile) if config.profile else None
        number = NUMBER_TRACED if config.profile else 1 if config.report and mesh.pp.size > 1 else 0
        begin = min(first + TRACED - 1, last)
        self.traced_steps = range(begin, min(begin + number, last + 1))
        begin = min(first + TRACED - 1 + max(number, 1), last)  # the last one of a short run
        self.profiled_steps = range(begin, min(begin + NUMBER, last + 1) if config.report else begin)
        self.first, self.last = first, last
        self.steps: list[ProfiledStep] = []
        self.latest: deque[ProfiledStep] = deque(maxlen=NUMBER)
        self.planned: Timeline | None = None  # of the traced step
        self.happened: list[Span] = []
        self.memory: list[MemoryUse] = []  # of all ranks in the traced steps, on rank 0
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

    def selects(self, iteration: int) -> bool:
        """Return whether a step is traced, or profiled for a report: it is not like others."""
        return iteration in self.traced_steps or iteration in self.profiled_steps

    def is_profiled(self, iteration: int) -> bool:
        """Return whether a step is profiled for a report or a table."""
        interval = self.config.times_interval
        if self.selects(iteration):
            return iteration in self.profiled_steps
        if self.config.device == "cpu":
            return iteration > self.first or iteration == self.last
        return interval > 0 and min(-iteration % interval, self.last - iteration) < NUMBER

    def gathered(self) -> list[ProfiledStep]:
        """Return all ranks' latest profiled steps, each once, on rank 0; none on others.  Collective."""
        of_ranks = self.mesh.comm.gather_object([*self.latest]) or []
        self.latest.clear()
        return [step for own in of_ranks for step in own]

    @contextmanager
    def observing(self, iteration: int) -> Iterator[None]:
        """Trace or profile the step in this context, if it is selected.  Collective."""
        tracing = self.tracing(iteration) if iteration in self.traced_steps else nullcontext()
        profiling = self.profiling(iteration) if self.is_profiled(iteration) else nullcontext()
        with tracing, profiling:
            yield

    @contextmanager
    def tracing(self, iteration: int) -> Iterator[None]:
        """Trace the step in this context; of the first one, predict a pipeline's timeline, too.  Collective."""
        recorder = SpanRecorder(self.mesh.pp.rank)
        self.latest.clear()  # a table is of steps in a row
        with self.pipeline.notifying(recorder), self.trace.recording(recorder.spans) if self.trace else nullcontext():
            yield
        if iteration == self.traced_steps[0] and self.mesh.pp.size > 1:
            self.predict(recorder.spans)
        if iteration == self.traced_steps[-1] and self.trace:
            self.memory = self.trace.write(self.pipeline.replica, self.optimizer)
            self.trace = None  # its events take memory

    def predict(self, spans: Sequence[Span]) -> None:
        """Predict the timeline of a pipeline's step from the measured one, on rank 0, and draw both.  Collective."""
        gathered = gather(self.mesh.pp, spans)
        if self.mesh.comm.rank == 0:
            self.planned, self.happened = price(self.pipeline.schedule, measured(gathered)), gathered
            if path := self.config.profile:
                save_picture(picture_of(path), self.planned, gathered)

    @contextmanager
    def profiling(self, iteration: int) -> Iterator[None]:
        """Profile the step in this context.  Collective."""
        before, self.seconds, self.is_on = self.exposed(), dict.fromkeys(KINDS, 0.0), True
        device, pipeline = self.config.device, self.pipeline
        begin_s = now(device)
        with pipeline.notifying(self, pipeline.listeners.index(pipeline.times) + 1):  # actions begin and end within its
            yield
        step_s, self.is_on = self.input_s + now(device) - begin_s, False
        self.seconds |= {axis: after - before[axis] for axis, after in self.exposed().items()}
        self.seconds[INPUT] += self.input_s
        self.seconds[OTHER] = step_s - sum(self.seconds.values())
        comm = self.mesh.comm
        self.latest.append(ProfiledStep(iteration, comm.rank, step_s, self.seconds, memory_mib(device)))
        if iteration in self.profiled_steps:
            self.steps += comm.gather_object(self.latest[-1]) or []

    def take_memory(self) -> list[MemoryUse]:
        """Return all ranks' memory in the traced steps, on rank 0, once."""
        memory, self.memory = self.memory, []
        return memory

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
        self.seconds[PASSES[action.kind]] += self.since(self._action)

    def mark(self) -> tuple[float, float]:
        """Return the current time, and the total time spent waiting for other ranks, in seconds."""
        return now(self.config.device), self.waited_s

    def since(self, mark: tuple[float, float]) -> float:
        """Return the seconds since a mark, without waits for other ranks."""
        now_s, waited_s = self.mark()
        return now_s - mark[0] - (waited_s - mark[1])

    @property
    def waited_s(self) -> float:
        """Seconds that this rank has waited for other ranks since the run began, of whatever kind."""
        return sum(self.exposed().values())

    @property
    def waited_cpu_s(self) -> float:
        """Seconds of this thread's CPU time in these waits."""
        return sum(each.exposed_cpu_s for waits in self.waits.values() for each in waits)

    def exposed(self) -> dict[str, float]:
        """Return the seconds that this rank has waited for other ranks since the run began, by kind."""
        return {kind: sum(each.exposed_s for each in waits) for kind, waits in self.waits.items()}
