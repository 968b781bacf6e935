"""Bind a schedule's moves to memory and persistent requests, and run them round by round.

A run is cut into segments.  Of a move that needs a buffer beside the vector (a reduction's arrivals, the host copy of
device memory), at most `WINDOW` segments are in flight, so that the buffer stays in cache and the reduction of one
segment overlaps the transfer of the next.  On a device, a segment's request waits for the copies and reductions queued
before it, not for those of the next segment.  Sender and receiver cut a run in the same way, so that segments match.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from collectives.arrays.addresses import as_bytes
from collectives.arrays.device import Device, Event
from collectives.arrays.memory import size_class
from collectives.arrays.ops import Op
from collectives.runtime.backends.vector import Vector
from collectives.runtime.plan import CopyPair
from collectives.runtime.progress import Waitable
from collectives.schedule.moves import MESSAGES, Copy, Move, Recv, RecvReduce, Round, Send, show

SEGMENT_BYTES = 1 << 20
WINDOW = 2
LARGEST_MESSAGE_BYTES = 1 << 30
LARGEST_POWER_BYTES = 1 << 16  # of staging buffers: longer ones are in steps of an eighth
TAGS = MESSAGES  # of a plan


@dataclass
class Messages(Waitable):
    """Messages in flight."""

    requests: Sequence[MPI.Request]
    statuses: list[MPI.Status] | None = None

    def test(self) -> bool:
        return MPI.Request.Testall(self.requests, self.statuses)


@dataclass
class Lane:
    """One move of a round, segment by segment: at most `window` requests in flight.

    `copies[i]` are the copies between segment i and the memory that its request reads, if it `sends`, or else writes;
    `reduce` reduces a segment that has arrived.
    """

    requests: list[MPI.Prequest]
    window: int
    device: Device
    copies: list[list[CopyPair]]
    sends: bool
    reduce: Callable[[int], None] | None = None
    ready: dict[int, Event] = field(default_factory=dict)  # after which the device is done with a segment's memory

    def launch(self, indices: range) -> range:
        """Queue copies of segments to be sent, and an event for each; return those of `indices` that exist."""
        indices = range(indices.start, min(indices.stop, len(self.requests)))
        for index in indices:
            if self.sends:
                self.device.copy_pairs(self.copies[index])
            self.ready[index] = self.device.record()
        return indices

    def start(self, index: int) -> None:
        """Start a launched segment once it is ready: segments launched later need not be."""
        self.ready.pop(index).synchronize()
        self.requests[index].Start()

    def end(self, index: int) -> None:
        """Copy or reduce segment `index`, if it is a received one."""
        if not self.sends:
            self.device.copy_pairs(self.copies[index])
        if self.reduce:
            self.reduce(index)


class BoundRound(NamedTuple):
    """A round's requests: `plain` ones need nothing before or after; `lanes` do."""

    number: int
    moves: Round
    copies: list[CopyPair]
    plain: list[MPI.Prequest]
    lanes: list[Lane]
    reduce_late: bool  # a reduction writes memory that a plain send reads: all sends first
    request_moves: Sequence[tuple[MPI.Prequest, Move]] = ()  # the move of each request

    def run(self, device: Device) -> Iterator[Messages]:
        """Start and complete the round's requests; yields those to wait for in between."""
        device.copy_pairs(self.copies)
        launched = [(lane, index) for lane in self.lanes for index in lane.launch(range(lane.window))]
        if self.plain:
            device.synchronize()
        for request in self.plain:  # not Startall, whose order is arbitrary: the segments of a run share one tag
            request.Start()
        for lane, index in launched:
            lane.start(index)
        if all(len(lane.requests) == 1 for lane in self.lanes):
            yield Messages(self.requests())
            for lane in self.lanes:
                lane.end(0)
            return
        if self.reduce_late:
            yield Messages(self.plain)
        for index in range(max(len(lane.requests) for lane in self.lanes)):
            for lane in self.lanes:
                if index < len(lane.requests):
                    yield Messages(lane.requests[index : index + 1])
                    lane.end(index)
                    for following in lane.launch(range(index + lane.window, index + lane.window + 1)):
                        lane.start(following)
        yield Messages(self.plain)

    def requests(self) -> list[MPI.Prequest]:
        return self.plain + [request for lane in self.lanes for request in lane.requests]

    def in_flight(self) -> list[MPI.Prequest]:
        return self.requests()

    def awaits(self) -> str:
        pending = [move for request, move in self.request_moves if not request.Get_status()]  # true if not started
        return f"round {self.number}: {', '.join(dict.fromkeys(map(show, pending or self.moves)))}"


class StagingBuffers:
    """Memory in which messages are staged, beside the vector, by use and size class.

    Plans that run one after the other may share them: a device is done with one before MPI is given it.
    """

    def __init__(self, device: Device):
        self.device = device
        self.buffers: dict[tuple, Any] = {}

    def take(self, kind: str, position: int, length: int, dtype: np.dtype) -> Any:
        """Return a buffer of at least so many elements, of host or device, for the move at a position of its round."""
        nbytes = size_class(length * dtype.itemsize, LARGEST_POWER_BYTES)
        key = kind, position, dtype, nbytes
        if key not in self.buffers:
            is_host, count = kind == "host", nbytes // dtype.itemsize
            self.buffers[key] = self.device.host(nbytes).view(dtype) if is_host else self.device.empty(count, dtype)
        return self.buffers[key]


class RequestBinder:
    """Binder of moves over chunks to requests over memory, with the `TAGS` tags from `first_tag` on.

    Numbers travel as `wire_dtype`, if that is not None: then a rank also rounds sent numbers in its own vector, so that
    both sides continue with the same ones.
    """

    def __init__(
        self,
        mpi: MPI.Comm,
        first_tag: int,
        device: Device,
        op: str | Op,
        segment_bytes: int,
        wire_dtype: np.dtype | None = None,
        staging: StagingBuffers | None = None,
    ):
        self.mpi, self.first_tag, self.device, self.op = mpi, first_tag, device, op
        self.segment_bytes, self.wire_dtype = segment_bytes, wire_dtype
        self.in_place = device.mpi_reads and wire_dtype is None  # MPI reads and writes the vector itself
        self.staging = staging or StagingBuffers(device)
        self.request_moves: list[tuple[MPI.Prequest, Move]] = []  # in this round

    def bind(self, number: int, moves: Round, vector: Vector) -> BoundRound:
        self.request_moves = []
        reductions = [m.run for m in moves if isinstance(m, RecvReduce)]
        clashes = [(into, m.run) for m in moves if isinstance(m, Send) for into in reductions if overlap(into, m.run)]
        reduce_late = bool(clashes) and self.in_place
        # Sends through staging memory are in step with the reductions into the same run, but not into another.
        at_once = reduce_late or any(into != sent for into, sent in clashes)
        copies = [(vector.view(m.run), vector.view(m.source)) for m in moves if isinstance(m, Copy) and m.run]
        plain: list[MPI.Prequest] = []
        lanes: list[Lane] = []
        messages = [m for m in moves if isinstance(m, Send | Recv | RecvReduce)]
        for position, (move, tag) in enumerate(zip(messages, self.tags(messages), strict=True)):
            if not move.run:  # a message without contents: a signal
                plain.append(self.request(move, tag, np.empty(0, np.uint8)))
                continue
            segments = self.cut(vector.view(move.run))
            if self.in_place and not isinstance(move, RecvReduce):
                plain += [self.request(move, tag, segment) for segment in segments]
            elif segments:
                lanes.append(self.lane(move, tag, segments, position, at_once))
        return BoundRound(number, moves, copies, plain, lanes, reduce_late, self.request_moves)

    def tags(self, messages: list[Send | Recv | RecvReduce]) -> list[int]:
        """Return a tag for each message of a round, unique among those to, or from, one rank."""
        ways = [(isinstance(m, Send), m[0]) for m in messages]
        nth = [ways[:position].count(way) for position, way in enumerate(ways)]
        assert max(nth, default=0) < TAGS, f"more than {TAGS} messages between two ranks: {messages}"
        return [self.first_tag + n for n in nth]

    def cut(self, view: Any) -> list[Any]:
        step = max(1, self.segment_bytes // view.dtype.itemsize)
        return [view[i : i + step] for i in range(0, len(view), step)]

    def lane(self, move: Send | Recv | RecvReduce, tag: int, segments: list[Any], position: int, at_once: bool) -> Lane:
        slots = len(segments) if at_once else WINDOW  # `at_once`: all are sent before the first is reduced
        ways = list(zip(*self.stops(move, segments, position, slots), strict=True))
        requests = [self.request(move, tag, way[-1]) for way in ways]
        if isinstance(move, Send):
            return Lane(requests, slots, self.device, [self.outgoing(way) for way in ways], sends=True)
        incoming = [[pair(a, b) for a, b in reversed(list(pairwise(way)))] for way in ways]
        if isinstance(move, Recv):
            return Lane(requests, slots, self.device, incoming, sends=False)
        reduce = self.reducer(move.source)
        return Lane(requests, slots, self.device, incoming, False, lambda i: reduce(segments[i], ways[i][0]))

    def stops(self, move: Send | Recv | RecvReduce, segments: list[Any], position: int, slots: int) -> list[list[Any]]:
        """Return the memory that segments pass in turn: from the vector, or a reduction's operand, to MPI's buffer."""
        dtype = segments[0].dtype
        stops = [self.slots("arrivals", position, segments, slots, dtype) if isinstance(move, RecvReduce) else segments]
        if self.wire_dtype is not None:
            dtype = self.wire_dtype
            stops.append(self.slots("rounded", position, segments, slots, dtype))
        if not self.device.mpi_reads:
            stops.append(self.slots("host", position, segments, slots, dtype))
        return stops

    def outgoing(self, way: Sequence[Any]) -> list[CopyPair]:
        copies = [pair(b, a) for a, b in pairwise(way)]
        return copies if self.wire_dtype is None else [*copies, pair(way[0], way[1])]

    def rounding(self, number: int, view: Any) -> BoundRound:
        """Bind a round without messages, which rounds `view` to the wire dtype."""
        segments = self.cut(view)
        rounded = self.slots("rounded", 0, segments, 1, self.wire_dtype) if segments else []
        copies = [pair for a, b in zip(segments, rounded, strict=True) for pair in ((b, a), (a, b))]
        return BoundRound(number, (), copies, [], [], reduce_late=False)

    def slots(self, kind: str, position: int, segments: list[Any], slots: int, dtype: Any) -> list[Any]:
        """Return a buffer for each segment; segment i shares its memory with segment i + slots."""
        longest = len(segments[0])
        buffer = self.staging.take(kind, position, longest * min(slots, len(segments)), np.dtype(dtype))
        begins = [i % slots * longest for i in range(len(segments))]
        return [buffer[b : b + len(s)] for b, s in zip(begins, segments, strict=True)]

    def reducer(self, source: int) -> Callable[[Any, Any], None]:
        """Return the reduction of data from `source`: the lower rank's operand stands on the left."""
        reduce, op = self.device.reduce, self.op
        if source < self.mpi.rank:
            return lambda own, arrived: reduce(op, arrived, own, own)
        return lambda own, arrived: reduce(op, own, arrived, own)

    def request(self, move: Send | Recv | RecvReduce, tag: int, wire: Any) -> MPI.Prequest:
        buffer = [as_bytes(wire), MPI.BYTE]
        if isinstance(move, Send):
            request = self.mpi.Send_init(buffer, move.to, tag)
        else:
            request = self.mpi.Recv_init(buffer, move.source, tag)
        self.request_moves.append((request, move))
        return request


def pair(target: Any, source: Any) -> CopyPair:
    """Return a copy, as one of bytes where none is rounded: host memory is a device's for bytes only."""
    return (as_bytes(target), as_bytes(source)) if target.dtype == source.dtype else (target, source)


def overlap(a: range, b: range) -> bool:
    return a.start < b.stop and b.start < a.stop
