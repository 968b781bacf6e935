"""Profile of some steps of a run: every rank's time by kind of work."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from typing import NamedTuple

from parallelism.buffers.tensor_collectives import ExposedTime
from parallelism.mesh import Mesh
from parallelism.pipeline.layer_times import now
from parallelism.pipeline.pipeline_parallel import PipelineParallel
from parallelism.pipeline.schedule.price import Span, Timeline, price
from parallelism.pipeline.stage import Batch
from parallelism.pipeline.trace import SpanRecorder, gather, measured, save_picture, save_trace
from parallelism.step.actions import Action
from parallelism.step.events import Listener
from training.reports.metrics import memory_mib
from training.settings.derived import picture_of
from training.settings.fields import TRACED, RunSettings

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

    `waits` add up the waits for other ranks, by the kind for which alone these count.
    In profiled steps, the device is synchronized where a kind begins and ends.
    """

    def __init__(
        self,
        pipeline: PipelineParallel,
        mesh: Mesh,
        config: RunSettings,
        first: int,
        waits: Mapping[str, Sequence[ExposedTime]],
    ):
        self.pipeline, self.mesh, self.config, self.waits, self.is_on = pipeline, mesh, config, waits, False
        last = config.max_iters
        is_traced = config.trace or (config.report and mesh.pp.size > 1)
        self.traced_step = min(first + TRACED - 1, last) if is_traced else None
        begin = min(first + TRACED, last)  # the last one of a short run
        self.profiled_steps = range(begin, min(begin + NUMBER, last + 1) if config.report else begin)
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

    def selects(self, iteration: int) -> bool:
        """Return whether a step is traced or profiled."""
        return iteration == self.traced_step or iteration in self.profiled_steps

    @contextmanager
    def observing(self, iteration: int) -> Iterator[None]:
        """Trace or profile the step in this context, if it is selected.  Collective."""
        tracing = self.tracing() if iteration == self.traced_step else nullcontext()
        profiling = self.profiling(iteration) if iteration in self.profiled_steps else nullcontext()
        with tracing, profiling:
            yield

    @contextmanager
    def tracing(self) -> Iterator[None]:
        """Measure the timeline of the step in this context, and predict it, on rank 0; write both.  Collective."""
        recorder = SpanRecorder(self.mesh.pp.rank)
        with self.pipeline.notifying(recorder):
            yield
        spans = gather(self.mesh.pp, recorder.spans)
        if self.mesh.comm.rank == 0:
            self.planned, self.happened = price(self.pipeline.schedule, measured(spans)), spans
            if path := self.config.trace:
                save_trace(path, spans)
                save_picture(picture_of(path), self.planned, spans)

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
