"""A message from one rank to another, as the only step of a plan.

Each message begins with an envelope: dtype, size, and the tag of its payload.  A payload of up to `EAGER_BYTES` lies in
the envelope; a longer one follows under a tag of its own, so that the receiver checks the envelope before the payload
goes into the caller's array: in messages of at most 1 GiB; to another node, in up to 64 parts, since MPI sends short
ones without an acknowledgement: exchanges over Open MPI's TCP take up to 1.4 times as long with one long message.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from struct import Struct
from typing import Any

import numpy as np
from mpi4py import MPI

from collectives.arrays.addresses import as_bytes
from collectives.arrays.device import Device
from collectives.arrays.ops import DTYPES
from collectives.arrays.views import flat, numpy_view
from collectives.job.errors import CommunicationError
from collectives.job.launch import refuse_after_fork
from collectives.runtime.backends.messages import LARGEST_MESSAGE_BYTES, Messages
from collectives.runtime.call.checks import check_integer, check_rank
from collectives.runtime.call.packed import check_result, contiguous, is_strided
from collectives.runtime.plan import Plan, Step
from collectives.runtime.progress import Progress, Waitable
from collectives.runtime.reports.call_log import Calls

EAGER_BYTES = 4032  # with its envelope, below MPI's eager limit
PART_BYTES, MOST_PARTS = 60_000, 64  # of a payload to another node; below the eager limit of Open MPI's TCP, 64 KiB
ENVELOPE = Struct("qqq")  # dtype, bytes, and tag of the payload
CODES: dict[Any, int] = {dtype: code for code, dtype in enumerate(sorted(DTYPES, key=str))}


class Mailbox:
    """A communicator for messages between ranks, and `calls`, its counter in the call log.

    The lower half of its tags is for the caller.
    """

    def __init__(self, mpi: MPI.Comm, node: Sequence[int], num_tags: int, calls: Calls, progress: Progress):
        self.mpi, self.node, self.num_tags = mpi, node, num_tags // 2
        self.rank, self.size, self.calls, self.progress = mpi.rank, mpi.size, calls, progress
        self.num_sent = count()

    def payload_tag(self) -> int:
        """Return a tag for a payload that no other message of this rank in flight has."""
        return self.num_tags + next(self.num_sent) % self.num_tags

    def parts(self, payload: Any, peer: int) -> list[Any]:
        """Cut a payload to or from a rank into messages."""
        nbytes = LARGEST_MESSAGE_BYTES
        if peer not in self.node:
            nbytes = min(max(PART_BYTES, -(-len(payload) // MOST_PARTS)), nbytes)
        return [payload[i : i + nbytes] for i in range(0, len(payload), nbytes)]

    def check_tag(self, tag: int) -> None:
        check_integer("tag", tag, 0, self.num_tags - 1)


class PointToPoint(Step):
    """The array of one side of a message: its own memory, or host memory that is copied in before or out after."""

    def __init__(self, mailbox: Mailbox, device: Device, view: Any, peer: int, tag: int):
        mailbox.check_tag(tag)
        if view.dtype not in CODES:
            raise ValueError(f"dtype {view.dtype} cannot be sent point to point: send its fields one by one")
        self.mailbox, self.peer, self.tag = mailbox, peer, tag
        self.dtype, self.code, self.memory = view.dtype, CODES[view.dtype], as_bytes(view)
        self.wire = self.memory if device.mpi_reads else device.host(self.memory.nbytes)
        self.started: list[MPI.Request] = []

    def in_flight(self) -> Sequence[MPI.Request]:
        return self.started


class SendMessage(PointToPoint):
    def run(self, device: Device) -> Iterator[Messages]:
        if self.wire is not self.memory:
            device.copy(self.wire, self.memory)
        device.synchronize()
        mpi, nbytes, tag = self.mailbox.mpi, self.wire.nbytes, self.mailbox.payload_tag()
        is_inside = nbytes <= EAGER_BYTES and isinstance(self.wire, np.ndarray)
        first = ENVELOPE.pack(self.code, nbytes, tag) + (self.wire.tobytes() if is_inside else b"")
        payload = [] if is_inside else self.mailbox.parts(self.wire, self.peer)
        self.started = [mpi.Isend([first, MPI.BYTE], self.peer, self.tag)]
        self.started += [mpi.Isend([part, MPI.BYTE], self.peer, tag) for part in payload]
        yield Messages(self.started)


class RecvMessage(PointToPoint):
    """A message from rank `peer`, or from any, whose rank `peer` then becomes."""

    def run(self, device: Device) -> Iterator[Messages]:
        device.synchronize()
        mpi, status = self.mailbox.mpi, MPI.Status()
        first = bytearray(ENVELOPE.size + EAGER_BYTES)
        self.started = [mpi.Irecv([first, MPI.BYTE], self.peer, self.tag)]
        yield Messages(self.started, [status])
        self.peer = status.Get_source()
        code, nbytes, tag = ENVELOPE.unpack_from(first)
        fits = self.takes(code, nbytes)
        is_inside = status.Get_count(MPI.BYTE) > ENVELOPE.size
        if not is_inside:
            payload = self.wire if fits else np.empty(nbytes, np.uint8)
            parts = self.mailbox.parts(payload, self.peer)
            self.started = [mpi.Irecv([part, MPI.BYTE], self.peer, tag) for part in parts]
            yield Messages(self.started)
        if not fits:
            raise CommunicationError(self.mismatch(code, nbytes))
        source = self.wire
        if is_inside:
            source = self.wire if isinstance(self.wire, np.ndarray) else device.host(nbytes)
            source[:] = np.frombuffer(first, np.uint8, nbytes, ENVELOPE.size)
        if source is not self.memory:
            device.copy(self.memory, source)
            device.synchronize()  # `source` is freed with the plan

    def takes(self, code: int, nbytes: int) -> bool:
        """Return whether a payload fits into the array."""
        return (code, nbytes) == (self.code, self.wire.nbytes)

    def mismatch(self, code: int, nbytes: int) -> str:
        dtypes = list(CODES)
        own, sent = dtypes[self.code], dtypes[code]
        return (
            f"x has {len(self.memory) // own.itemsize} elements of {own}, but rank {self.peer} sent "
            f"{nbytes // sent.itemsize} of {sent}: receive into an array of that length and dtype"
        )


class RecvNew(RecvMessage):
    """A message into a new array, which becomes the result of `plan`."""

    plan: Plan

    def takes(self, code: int, nbytes: int) -> bool:
        dtype = list(CODES)[code]
        result = self.plan.result = np.empty(nbytes // dtype.itemsize, dtype)
        self.memory = self.wire = as_bytes(result)
        del self.plan  # breaks the cycle with this message, so that the array is freed with its last user
        return True


@dataclass
class Arrival(Waitable):
    """The wait for the arrival of a message."""

    mpi: MPI.Comm
    source: int
    tag: int
    status: MPI.Status

    def test(self) -> bool:
        return self.mpi.Iprobe(self.source, self.tag, self.status)


refuse_after_fork(Arrival)


def probe(mailbox: Mailbox, source: int | None, tag: int, blocking: bool) -> int | None:
    """Return the rank from which a message of that tag has arrived, or None.

    Raises: ValueError for a rank or a tag that is out of range.
    """
    if source is not None:
        check_rank("source", source, mailbox.size)
    mailbox.check_tag(tag)
    status = MPI.Status()
    arrival = Arrival(mailbox.mpi, MPI.ANY_SOURCE if source is None else source, tag, status)
    if blocking:
        mailbox.progress.wait(arrival, words=f"probe of {words_of(source)} with tag {tag}")
    elif not arrival.test():
        return None
    return status.Get_source()


def words_of(rank: int | None) -> str:
    return "any rank" if rank is None else f"rank {rank}"


def run_message(
    mailbox: Mailbox, kind: type[PointToPoint], x: Any, peer: int | None, tag: int, blocking: bool, in_group: bool
) -> Any:
    """Send `x` to a rank, or receive it from one, or from any rank; returns `x`, or a request.

    Without an `x`, a message is received into a new host array.  In a group, which waits for its requests, no other
    thread advances it.

    Raises: ValueError for a rank or a tag that is out of range, or an unsuitable array.
    """
    receives = kind is RecvMessage
    if peer is not None or not receives:
        check_rank("source" if receives else "dest", peer, mailbox.size)
    if receives and x is None:
        kind, x = RecvNew, np.empty(0, np.uint8)
    packed = contiguous(x) if is_strided(x) else x
    device, view = flat(packed)
    if receives:
        check_result(view if packed is x else numpy_view(x), "x")
    words = f"{'recv from' if receives else 'send to'} {words_of(peer)} with tag {tag}"
    rank = MPI.ANY_SOURCE if peer is None else peer
    message = kind(mailbox, device, view, rank, tag)
    after = [(numpy_view(x), numpy_view(packed))] if receives and packed is not x else []
    plan = Plan(words, x, mailbox.progress, device, [message], after=after, words=words)
    if isinstance(message, RecvNew):
        message.plan = plan
    if not (blocking or in_group or peer is None or peer in mailbox.node):
        return plan.start()
    plan.begin()  # in a node no thread need advance it: it is copied once, when it is waited for
    return plan.wait() if blocking and not in_group else plan
