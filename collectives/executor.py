"""Runs a schedule over MPI: binds its moves to memory and persistent requests once, then starts and waits.

A run is cut into segments.  Of a move that needs a buffer beside the vector (a fold's arrivals, the host copy of
device memory), at most `WINDOW` segments are under way, so that the buffer stays in cache and folding one segment
overlaps moving the next.  Sender and receiver cut a run alike, so segment i meets segment i.
"""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from collectives.arrays import Device, as_bytes
from collectives.errors import CommunicationError
from collectives.schedule import Copy, Fold, Recv, Round, Send, show

SEGMENT_BYTES = 1 << 20
WINDOW = 2
SPINS = 100  # polls that only give up the core, before a waiting rank sleeps
LONGEST_SLEEP_S = 1e-3

Requests = Sequence[MPI.Request]


class Vector:
    """A working vector: flat arrays, each divided into chunks, counted through."""

    def __init__(self, *pieces: tuple[Any, Sequence[int]]):
        self.places = []  # for each chunk: its array, and where it begins and ends there
        for array, counts in pieces:
            ends = np.cumsum([0, *counts]).tolist()
            self.places += [(array, a, b) for a, b in pairwise(ends)]

    def view(self, run: range) -> Any:
        """The memory of a run, all of whose chunks lie in one array."""
        array, begin, _ = self.places[run.start]
        return array[begin : self.places[run.stop - 1][2]]


class Progress:
    """Waits for requests, and keeps this process's other started plans moving meanwhile."""

    def __init__(self, crowded: bool):
        self.crowded = crowded  # waiting ranks must give up the core
        self.started: list[Plan] = []

    def wait(self, requests: Requests, waiting: "Plan | None" = None, statuses: list[MPI.Status] | None = None) -> None:
        """Wait for requests, which belong to the plan `waiting` if to any."""
        others = [plan for plan in self.started if plan is not waiting]
        if not self.crowded and not others:
            MPI.Request.Waitall(requests, statuses)
            return
        spins = 0
        while not MPI.Request.Testall(requests, statuses):
            for plan in others:
                plan.advance()
            spins += 1
            if self.crowded:
                relax(spins)


def relax(spins: int) -> None:
    """Give up the core: at first for a moment, then for up to a millisecond."""
    if spins < SPINS:
        os.sched_yield()
    else:
        time.sleep(min(LONGEST_SLEEP_S, 1e-5 * 2 ** min(spins - SPINS, 10)))


class Lane:
    """One move of a round, segment by segment: at most `window` requests under way."""

    def __init__(self, requests: list[MPI.Prequest], window: int):
        self.requests, self.window = requests, window

    def before(self, index: int) -> None:
        """Make segment `index` ready to be started."""

    def after(self, index: int) -> None:
        """Use segment `index`, which has arrived or is sent."""


class StagedSend(Lane):
    """A send of device memory that MPI cannot read: each segment by way of host memory."""

    def __init__(self, requests, window, device: Device, segments: list[Any], staging: list[np.ndarray]):
        super().__init__(requests, window)
        self.device, self.segments, self.staging = device, segments, staging

    def before(self, index: int) -> None:
        self.device.copy(self.staging[index], as_bytes(self.segments[index]))


class StagedRecv(StagedSend):
    def before(self, index: int) -> None:
        pass

    def after(self, index: int) -> None:
        self.device.copy(as_bytes(self.segments[index]), self.staging[index])


class FoldLane(Lane):
    """Segments that arrive in `arrivals` (by way of host `staging`, where there is any) and are folded."""

    def __init__(self, requests, window, fold: Callable, segments, arrivals, staging, device: Device):
        super().__init__(requests, window)
        self.fold, self.segments, self.arrivals = fold, segments, arrivals
        self.staging, self.device = staging, device

    def after(self, index: int) -> None:
        if self.staging:
            self.device.copy(as_bytes(self.arrivals[index]), self.staging[index])
        self.fold(self.segments[index], self.arrivals[index])


class BoundRound(NamedTuple):
    """A round's requests: `plain` ones need nothing before or after; `lanes` do."""

    number: int
    moves: Round
    copies: list[tuple[Any, Any]]
    plain: list[MPI.Prequest]
    lanes: list[Lane]
    fold_late: bool  # a fold writes what a plain send reads: all sends first

    def run(self, device: Device) -> Iterator[Requests]:
        """Start and use the round's requests; yields those to wait for before going on."""
        for target, source in self.copies:
            device.copy(target, source)
        first = [lane.requests[i] for lane in self.lanes for i in launch(lane, range(lane.window))]
        start(device, self.plain + first)
        if all(len(lane.requests) == 1 for lane in self.lanes):
            yield self.plain + first
            for lane in self.lanes:
                lane.after(0)
            return
        if self.fold_late:
            yield self.plain
        for index in range(max(len(lane.requests) for lane in self.lanes)):
            for lane in self.lanes:
                if index < len(lane.requests):
                    yield lane.requests[index : index + 1]
                    lane.after(index)
                    following = launch(lane, range(index + lane.window, index + lane.window + 1))
                    start(device, [lane.requests[i] for i in following])
        yield self.plain

    def requests(self) -> list[MPI.Prequest]:
        return self.plain + [request for lane in self.lanes for request in lane.requests]


def launch(lane: Lane, indices: range) -> range:
    """Make those of the lane's segments ready that there are."""
    indices = range(indices.start, min(indices.stop, len(lane.requests)))
    for index in indices:
        lane.before(index)
    return indices


def start(device: Device, requests: list[MPI.Prequest]) -> None:
    """Start requests once the device is done with the memory that they read or overwrite."""
    if device.is_async:
        device.synchronize()
    if requests:
        MPI.Prequest.Startall(requests)


class Binder:
    """Turns moves over chunks into requests over memory."""

    def __init__(self, mpi: MPI.Comm, tag: int, device: Device, op: str, segment_bytes: int):
        self.mpi, self.tag, self.device, self.op = mpi, tag, device, op
        self.segment_bytes = segment_bytes
        self.buffers: dict[tuple[str, int], Any] = {}  # reused from round to round

    def bind(self, number: int, moves: Round, vector: Vector) -> BoundRound:
        folds = [m.run for m in moves if isinstance(m, Fold)]
        clashes = [(fold, m.run) for m in moves if isinstance(m, Send) for fold in folds if overlap(fold, m.run)]
        fold_late = bool(clashes) and self.device.mpi_reads
        # Sends by way of host memory leave in step with the folds into the same run, but not into another.
        at_once = fold_late or any(fold != sent for fold, sent in clashes)
        copies = [(vector.view(m.run), vector.view(m.source)) for m in moves if isinstance(m, Copy)]
        plain: list[MPI.Prequest] = []
        lanes: list[Lane] = []
        for place, move in enumerate(moves):
            if isinstance(move, Copy):
                continue
            if not move.run:  # a message without contents: a signal
                plain.append(self.request(move, np.empty(0, np.uint8)))
                continue
            segments = self.cut(vector.view(move.run))
            if self.device.mpi_reads and not isinstance(move, Fold):
                plain += [self.request(move, segment) for segment in segments]
            elif segments:
                lanes.append(self.lane(move, segments, place, at_once))
        sources = [m.source for m in moves if isinstance(m, Recv | Fold)]
        assert not lanes or len(set(sources)) == len(sources), "lanes would mix up two messages of one rank"
        return BoundRound(number, moves, copies, plain, lanes, fold_late)

    def cut(self, view: Any) -> list[Any]:
        step = max(1, self.segment_bytes // view.dtype.itemsize)
        return [view[i : i + step] for i in range(0, len(view), step)]

    def lane(self, move: Send | Recv | Fold, segments: list[Any], place: int, at_once: bool) -> Lane:
        device = self.device
        slots = len(segments) if at_once else WINDOW  # `at_once`: all must have left before the first is folded
        staging, arrivals = [], []
        if not device.mpi_reads:
            staging = [as_bytes(s) for s in self.slots("host", place, segments, slots)]
        if isinstance(move, Fold):
            arrivals = self.slots("device", place, segments, slots)
        wires = staging or arrivals
        requests = [self.request(move, wire) for wire in wires]
        match move:
            case Send():
                return StagedSend(requests, slots, device, segments, staging)
            case Recv():
                return StagedRecv(requests, slots, device, segments, staging)
            case Fold(source, _):
                return FoldLane(requests, slots, self.folder(source), segments, arrivals, staging, device)

    def slots(self, kind: str, place: int, segments: list[Any], slots: int) -> list[Any]:
        """A buffer for each segment; segment i shares its memory with segment i + slots."""
        longest, dtype = len(segments[0]), segments[0].dtype
        need = longest * min(slots, len(segments))
        buffer = self.buffers.get((kind, place))
        if buffer is None or len(buffer) < need:
            on_host = kind == "host"
            buffer = self.device.host(need * dtype.itemsize).view(dtype) if on_host else self.device.empty(need, dtype)
            self.buffers[kind, place] = buffer
        begins = [i % slots * longest for i in range(len(segments))]
        return [buffer[b : b + len(s)] for b, s in zip(begins, segments, strict=True)]

    def folder(self, source: int) -> Callable[[Any, Any], None]:
        """Fold what came from `source`: the lower rank's operand stands on the left."""
        fold, op = self.device.fold, self.op
        if source < self.mpi.rank:
            return lambda own, arrived: fold(op, arrived, own, own)
        return lambda own, arrived: fold(op, own, arrived, own)

    def request(self, move: Send | Recv | Fold, wire: Any) -> MPI.Prequest:
        buffer = [as_bytes(wire), MPI.BYTE]
        if isinstance(move, Send):
            return self.mpi.Send_init(buffer, move.to, self.tag)
        return self.mpi.Recv_init(buffer, move.source, self.tag)


def overlap(a: range, b: range) -> bool:
    return a.start < b.stop and b.start < a.stop


class Plan:
    """A collective bound to memory once and run as often as wanted: `plan()`, or `plan.start()` and `plan.wait()`.

    Each run works on what the arrays hold then, and returns the result's array.  A started plan moves on whenever
    this process waits for another one, of the same communicator or of its parts, or asks `done()`.  `free()` gives
    the requests back.
    """

    def __init__(self, name: str, result: Any, progress: Progress, device: Device, rounds: list[BoundRound]):
        self.name, self.result = name, result
        self.device, self.rounds = device, rounds
        self.before: list[tuple[Any, Any]] = []  # copies (target, source) ahead of the rounds
        self.after: list[tuple[Any, Any]] = []
        self.divide: tuple[Any, int] | None = None
        self._progress = progress
        self._steps: Iterator[Requests] | None = None
        self._waiting_for: Requests = ()
        self._round: BoundRound | None = None
        self._freed = False

    def __call__(self) -> Any:
        """Run the collective; returns the result's array."""
        self.start()
        return self.wait()

    def start(self) -> "Plan":
        """Begin a run; ends with `wait()`, or when `done()` says so."""
        if self._freed:
            raise RuntimeError(f"{self.name} has been freed: make a new plan")
        if self._steps is not None:
            raise RuntimeError(f"{self.name} is under way already: wait() before the next start()")
        self._steps = self._run()
        self._progress.started.append(self)
        self._next()
        return self

    def wait(self) -> Any:
        """Wait for the end of the run; returns the result's array."""
        while self._steps is not None:
            try:
                self._progress.wait(self._waiting_for, waiting=self)
            except MPI.Exception as error:
                raise self._failure(error) from error
            self._next()
        return self.result

    def done(self) -> bool:
        """Move the run on without waiting; whether it has ended."""
        self.advance()
        return self._steps is None

    def advance(self) -> None:
        while self._steps is not None:
            try:
                if not MPI.Request.Testall(self._waiting_for):
                    return
            except MPI.Exception as error:
                raise self._failure(error) from error
            self._next()

    def free(self) -> None:
        """Give the persistent requests back to MPI.  The plan cannot be run after."""
        if self._steps is not None:
            raise RuntimeError(f"{self.name} is under way: wait() before free()")
        self._freed = True
        if not self.device.mpi_reads:
            self.device.synchronize()  # copies out of the host memory that goes with the plan
        for bound in self.rounds:
            for request in bound.requests():
                request.Free()
        self.rounds = []

    def __del__(self) -> None:
        if self.rounds and self._steps is None and not MPI.Is_finalized():
            self.free()

    def _next(self) -> None:
        assert self._steps is not None
        try:
            requests = next(self._steps, None)
        except MPI.Exception as error:
            raise self._failure(error) from error
        if requests is None:
            self._end()
        else:
            self._waiting_for = requests

    def _end(self) -> None:
        self._steps = None
        self._progress.started.remove(self)

    def _run(self) -> Iterator[Requests]:
        device = self.device
        device.begin()
        for target, source in self.before:
            device.copy(target, source)
        for bound in self.rounds:
            self._round = bound
            yield from bound.run(device)
        for target, source in self.after:
            device.copy(target, source)
        if self.divide:
            device.divide(*self.divide)
        device.end()

    def _failure(self, error: MPI.Exception) -> CommunicationError:
        self._end()
        where = f", round {self._round.number}: {', '.join(map(show, self._round.moves))}" if self._round else ""
        return CommunicationError(f"{self.name}{where}: {error}")
