"""Timeline of a measured step: events for Perfetto and Chrome, and a picture beside the predicted step.

Ranks record spans by `time.perf_counter`; rank 0 gathers them.  Clocks of different hosts have different
origins: the offset is estimated from the fastest of several round trips.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from statistics import median
from typing import Any, NamedTuple

import numpy as np

import collectives
from collectives.schedule.draw import save, time_axis
from parallelism.pipeline.schedule.actions import needs, result
from parallelism.pipeline.schedule.picture import LABELS, WAIT, ScheduleGrid, action_of, figure, length, planned
from parallelism.pipeline.schedule.price import Costs, Span, Timeline, bubble
from parallelism.step.actions import BACKWARD, FORWARD, INPUTS, WEIGHTS, Action, StageMessage
from parallelism.step.events import Listener

ROUNDS = 20  # round trips
PASSES, REST = "passes", "all-reduce"  # a rank's lanes in a trace; communication that overlaps passes is on the second


class SpanRecorder(Listener):
    """Records the time spans of a rank's actions and waits for messages in `spans`."""

    def __init__(self, rank: int):
        self.rank = rank
        self.spans: list[Span] = []

    def before(self, action: Action, following: Action | None) -> None:
        self._begin_s = time.perf_counter()

    def after(self, action: Action) -> None:
        self.spans.append(Span(self.rank, str(action), self._begin_s, time.perf_counter()))

    def before_wait(self, message: StageMessage) -> None:
        self._begin_s = time.perf_counter()

    def after_wait(self, message: StageMessage) -> None:
        self.spans.append(Span(self.rank, f"wait for {message}", self._begin_s, time.perf_counter()))


def gather(comm: collectives.Communicator, spans: Sequence[Span]) -> list[Span]:
    """Gather all ranks' spans on rank 0, in its clock, relative to the earliest; others return none.  Collective."""
    ahead_s = clocks_ahead_s(comm)
    gathered = [(span, ahead_s[span.rank]) for own in comm.gather_object(spans) or [] for span in own]
    begin_s = min((span.begin_s - ahead for span, ahead in gathered), default=0)
    return [
        span._replace(begin_s=span.begin_s - ahead - begin_s, end_s=span.end_s - ahead - begin_s)
        for span, ahead in gathered
    ]


def clocks_ahead_s(comm: collectives.Communicator) -> list[float]:
    """Measure how far each rank's clock, that of its host, is ahead of rank 0's, in seconds, on rank 0.  Collective."""
    hosts = comm.host_names()
    first = [hosts.index(host) for host in hosts]
    ahead_s = {rank: clock_ahead_s(comm, rank) if rank else 0.0 for rank in dict.fromkeys(first)}
    return [ahead_s[rank] for rank in first]


def clock_ahead_s(comm: collectives.Communicator, rank: int) -> float:
    """Measure how far one rank's clock is ahead of rank 0's, in seconds, on rank 0."""
    theirs, trips = np.zeros(1), []
    for _ in range(ROUNDS):
        begin_s = time.perf_counter()
        if comm.rank == 0:
            comm.send(theirs, rank)
            comm.recv(theirs, rank)
            end_s = time.perf_counter()
            trips.append((end_s - begin_s, float(theirs[0]) - (begin_s + end_s) / 2))
        elif comm.rank == rank:
            comm.recv(theirs, 0)
            theirs[0] = time.perf_counter()
            comm.send(theirs, 0)
    return min(trips)[1] if trips else 0.0


class CompletedAction(NamedTuple):
    """An action, its time span, and its rank's previous action."""

    action: Action
    span: Span
    before: Span | None


def done(spans: Sequence[Span]) -> dict[Action, CompletedAction]:
    """Return the completed actions of a step, by the result that each produces."""
    index: dict[Action, CompletedAction] = {}
    latest: dict[int, Span] = {}  # by rank
    for span in sorted(spans, key=lambda span: span.begin_s):
        if action := action_of(span):
            index[result(action)] = CompletedAction(action, span, latest.get(span.rank))
            latest[span.rank] = span
    return index


def messages(spans: Sequence[Span]) -> Iterator[tuple[CompletedAction, CompletedAction]]:
    """Yield each message between ranks as a pair: the action that sends it, and the action that needs it."""
    index = done(spans)
    num_stages = 1 + max((action.stage for action in index), default=-1)
    for reader in index.values():
        for need in needs(reader.action, num_stages):
            maker = index.get(need)
            if maker and maker.span.rank != reader.span.rank:
                yield maker, reader


def measured(spans: Sequence[Span]) -> Costs:
    """Return the measured costs: medians of each stage's actions, and of messages between consecutive stages.

    Messages count only if they were waited for.  If no backward pass is split, `inputs` has all of their time.
    """
    actions = done(spans).values()
    stages = range(1 + max((each.action.stage for each in actions), default=-1))

    def typical(stage: int, kind: str) -> float:
        times = [length(each.span) for each in actions if each.action.stage == stage and each.action.kind == kind]
        return median(times or [0.0])

    travels: dict[int, list[float]] = {pair: [] for pair in stages[:-1]}
    for maker, reader in messages(spans):
        if reader.before is None or reader.before.end_s <= maker.span.end_s:
            pair = min(maker.action.stage, reader.action.stage)
            travels[pair].append(max(0.0, reader.span.begin_s - maker.span.end_s))
    return Costs(
        [typical(stage, FORWARD) for stage in stages],
        [typical(stage, INPUTS) or typical(stage, BACKWARD) for stage in stages],
        [typical(stage, WEIGHTS) for stage in stages],
        [median(times or [0.0]) for times in travels.values()],
    )


def happened(name: str, num_ranks: int, spans: Sequence[Span]) -> ScheduleGrid:
    """Return the measured spans as a grid to draw; its bubble is the time without actions."""
    grid = ScheduleGrid(name, num_ranks, spans)
    _, unit, scale = time_axis(grid.end_s)
    idle = bubble(filter(action_of, spans), num_ranks, grid.end_s)
    return grid._replace(title=f"{name}, as it happened: {grid.end_s * scale:.4g} {unit}, bubble {idle:.1%}")


def save_picture(path: str, timeline: Timeline, spans: Sequence[Span]) -> None:
    """Draw the predicted and the measured step on the same time axis, as PNG."""
    schedule = timeline.schedule
    save(figure([planned(timeline), happened(schedule.name, schedule.num_ranks, spans)]), path)


def trace_events(spans: Sequence[Span]) -> list[dict[str, Any]]:
    """Return spans in Chrome's trace event format: one process per rank, one arrow per message."""
    return [*names(spans), *events(spans), *arrows(spans)]


def names(spans: Sequence[Span]) -> Iterator[dict[str, Any]]:
    for rank in sorted({span.rank for span in spans}):
        yield {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}}
        yield {"ph": "M", "name": "process_sort_index", "pid": rank, "args": {"sort_index": rank}}
    for rank, lane in sorted({(span.rank, lane_of(span)) for span in spans}):
        named = {"name": (PASSES, REST)[lane]}
        yield {"ph": "M", "name": "thread_name", "pid": rank, "tid": lane, "args": named}


def lane_of(span: Span) -> int:
    """Return the lane of a span: actions and waits between them on one, overlapping communication on the other."""
    return 0 if action_of(span) or span.what.split()[0] == WAIT else 1


def events(spans: Sequence[Span]) -> Iterator[dict[str, Any]]:
    """Yield the events of the spans, in microseconds."""
    for span in spans:
        action = action_of(span)
        yield {
            "ph": "X",
            "name": span.what,
            "cat": LABELS[action.kind] if action else span.what.split()[0],
            "pid": span.rank,
            "tid": lane_of(span),
            "ts": 1e6 * span.begin_s,
            "dur": 1e6 * length(span),
            "args": {"stage": action.stage, "micro-batch": action.micro_batch} if action else {},
        }


def arrows(spans: Sequence[Span]) -> Iterator[dict[str, Any]]:
    """Yield arrows from the middle of a sending action, as they must start within it, to the begin of the receiver."""
    for number, (maker, reader) in enumerate(messages(spans)):
        common = {"name": "message", "cat": "message", "id": f"{spans[0].rank}.{number}", "tid": 0}
        middle_s = (maker.span.begin_s + maker.span.end_s) / 2
        yield {"ph": "s", "pid": maker.span.rank, "ts": 1e6 * middle_s, **common}
        yield {"ph": "f", "bp": "e", "pid": reader.span.rank, "ts": 1e6 * reader.span.begin_s, **common}
