"""Trace of some steps: each rank's passes, collectives with their rounds, and operations of torch, in one file."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from collectives.job.system import write
from parallelism.data.replica import Replica
from parallelism.mesh import Mesh, replica_axes
from parallelism.pipeline.schedule.price import Span
from parallelism.pipeline.trace import clocks_ahead_s, trace_events
from parallelism.step.optimizer import Optimizer
from training.reports.memory_use import MemoryUse, memory_use
from training.reports.metrics import memory_mib
from training.reports.torch_events import Event, torch_events, with_counter

if TYPE_CHECKING:
    from collectives.runtime.reports.run_times import TimedRun

COLLECTIVES, TORCH, STREAMS = 10, 100, 200  # numbers of a rank's first threads of each kind, after those of its passes


class RankRecord(NamedTuple):
    """What a rank has recorded, by its own clock."""

    spans: list[Span]  # of passes, and waits between them
    events: list[Event]
    memory: MemoryUse


class RankTrace:
    """Records steps of this rank, for a file that Perfetto and Chrome open, with a process for each rank."""

    def __init__(self, mesh: Mesh, device: str, path: str):
        self.mesh, self.device, self.path = mesh, device, path
        self.axes = axes_by_label(mesh)
        self.runs: list[TimedRun] = []
        self.events: list[Event] = []
        self.spans: list[Span] = []
        self.held_bytes = 0  # the most before the first recorded step, as the profiler takes memory, too
        self.added_bytes = 0  # the most that torch allocates in a step

    @contextmanager
    def recording(self, spans: Sequence[Span]) -> Iterator[None]:
        """Record the step in this context, whose passes are in `spans` afterwards."""
        comm = self.mesh.comm
        self.held_bytes = self.held_bytes or round(memory_mib(self.device) * 2**20)
        snapshot = str(Path(self.path).with_suffix(f".memory-{comm.rank}.pickle"))
        from collectives.runtime.reports.run_times import recording  # which needs MPI, as few modules here do

        with torch_events(self.device, snapshot) as events, recording(comm.context.progress) as runs:
            yield
        events, most = with_counter(events, self.device)
        self.added_bytes = max(self.added_bytes, most)
        self.spans += spans
        self.runs += runs
        self.events += events

    def write(self, replica: Replica, optimizer: Optimizer) -> list[MemoryUse]:
        """Write the file on rank 0, and return all ranks' memory there.  Collective."""
        comm, memory = self.mesh.comm, memory_use(replica, optimizer, self.added_bytes, self.held_bytes)
        ahead_s = clocks_ahead_s(comm)
        events = [*run_events(self.runs, self.axes), *with_threads(self.events)]
        own = RankRecord(self.spans, [{**event, "pid": comm.rank} for event in events], memory)
        records = comm.gather_object(own)
        if records is None:
            return []
        together: list[Event] = []
        for record, ahead in zip(records, ahead_s, strict=True):
            together += shift_times(record.events, -1e6 * ahead)
        for ranks in self.mesh.layout.groups("pp"):
            spans = [span for rank in ranks for span in by_first_clock(rank, records[rank].spans, ahead_s[rank])]
            together += trace_events(spans)
        begin_us = min((event["ts"] for event in together if "ts" in event), default=0.0)
        memories = [record.memory for record in records]
        document = {"traceEvents": shift_times(together, -begin_us), "displayTimeUnit": "ms", "memory": memories}
        try:
            write(self.path, json.dumps(document, allow_nan=False))
        except OSError as error:  # training goes on
            print(f"{self.path} can't be written ({error.strerror}): the profile is lost", flush=True)
        return memories


def axes_by_label(mesh: Mesh) -> dict[str, str]:
    """Return the axes of each communicator of a mesh, by its label in the call log.  Collective."""
    several = [("dp", "pp"), ("dp", "sp"), replica_axes(mesh.shape), *((axis,) for axis in mesh.shape)]
    labels = {mesh.along(*axes).context.calls.label: " and ".join(axes) for axes in several}
    return {**labels, mesh.comm.context.calls.label: "all ranks"}


def shift_times(events: Iterable[Event], us: float) -> list[Event]:
    """Return events so many microseconds later; names have no time."""
    return [{**event, "ts": event["ts"] + us} if "ts" in event else event for event in events]


def by_first_clock(rank: int, spans: Sequence[Span], ahead_s: float) -> list[Span]:
    """Return a rank's spans by rank 0's clock, than which its own is ahead."""
    return [Span(rank, span.what, span.begin_s - ahead_s, span.end_s - ahead_s) for span in spans]


def run_events(runs: Sequence[TimedRun], axes: Mapping[str, str]) -> Iterator[Event]:
    """Yield the runs of collectives and messages, with the rounds of each, on as many threads as there are at once."""
    ends_s: list[float] = []
    for run in sorted(runs, key=lambda run: run.begin_s):
        nth = next((i for i, end_s in enumerate(ends_s) if end_s <= run.begin_s), len(ends_s))
        ends_s[nth : nth + 1] = [run.end_s]
        name = run.name if run.calls is None else f"{run.name} over {axes.get(run.calls, run.calls)}"
        yield {**event_of(name, "collective", run.begin_s, run.end_s, COLLECTIVES + nth), "args": {"bytes": run.nbytes}}
        for words, begin_s, end_s in run.rounds:
            yield event_of(words, "round", begin_s, end_s, COLLECTIVES + nth)
    for nth in range(len(ends_s)):
        yield thread_name(COLLECTIVES + nth, "collectives" + f", {nth + 1} at once" * (nth > 0))


def event_of(name: str, category: str, begin_s: float, end_s: float, thread: int) -> Event:
    times = {"ts": 1e6 * begin_s, "dur": 1e6 * (end_s - begin_s)}
    return {"ph": "X", "name": name, "cat": category, "tid": thread, **times}


def with_threads(events: Sequence[Event]) -> Iterator[Event]:
    """Yield torch's events with numbers and names of the threads, and streams of a GPU, that no others have."""
    numbers: dict[tuple[bool, int], int] = {}
    for event in events:
        if event["ph"] == "C":
            yield event
            continue
        on_gpu = event["pid"] != os.getpid()  # torch numbers devices as processes, and their streams as threads
        nth = sum(each == on_gpu for each, _ in numbers)
        number = numbers.setdefault((on_gpu, event["tid"]), (STREAMS if on_gpu else TORCH) + nth)
        yield {**event, "tid": number}
    for (on_gpu, thread), number in numbers.items():
        yield thread_name(
            number, f"GPU stream {thread}" if on_gpu else "torch" + f", thread {number - TORCH}" * (number > TORCH)
        )


def thread_name(thread: int, name: str) -> Event:
    return {"ph": "M", "name": "thread_name", "tid": thread, "args": {"name": name}}
