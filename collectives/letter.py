"""A message from one rank to another, as the one step of a plan."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from mpi4py import MPI

from collectives.arrays import as_bytes
from collectives.device import Device
from collectives.errors import CommunicationError
from collectives.executor import Messages
from collectives.schedule import Round


class Letter:
    """An array on its way: its own memory, or host memory that is copied in before or out after."""

    moves: Round = ()
    number = 0

    def __init__(self, mpi: MPI.Comm, device: Device, view: Any, peer: int, tag: int):
        self.mpi, self.peer, self.tag = mpi, peer, tag
        self.memory = as_bytes(view)
        self.wire = self.memory if device.mpi_reads else device.host(self.memory.nbytes)

    def run(self, device: Device) -> Iterator[Messages]:
        raise NotImplementedError

    def requests(self) -> Sequence[MPI.Prequest]:
        return ()

    def awaits(self) -> str:
        return ""


class SendLetter(Letter):
    def run(self, device: Device) -> Iterator[Messages]:
        if self.wire is not self.memory:
            device.copy(self.wire, self.memory)
        device.synchronize()
        yield Messages([self.mpi.Isend([self.wire, MPI.BYTE], self.peer, self.tag)])


class RecvLetter(Letter):
    """From rank `peer`, or any; `peer` is then whom it came from."""

    def run(self, device: Device) -> Iterator[Messages]:
        device.synchronize()
        status = MPI.Status()
        yield Messages([self.mpi.Irecv([self.wire, MPI.BYTE], self.peer, self.tag)], [status])
        sent, self.peer = status.Get_count(MPI.BYTE), status.Get_source()
        if sent != self.wire.nbytes:
            raise CommunicationError(
                f"x has {self.wire.nbytes} bytes, but rank {self.peer} sent {sent}: pass an array of that size"
            )
        if self.wire is not self.memory:
            device.copy(self.memory, self.wire)
            device.synchronize()  # `wire` goes with the plan
