"""Programs of the interpreter with messages: a short collective between nodes runs without Python from copy to copy.

All of a program's memory but the caller's arrays has fixed addresses: its vector, the packets of `Headers`, and the
other ranks' vectors in its node.  Its messages, headers and barriers are those of a `ComparedPlan`, so that ranks
detect a mismatch whichever of the two each of them runs.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
from mpi4py import MPI

from collectives.arrays.views import address_of
from collectives.runtime import kernels
from collectives.runtime.phases import ARRAY, LINE_BYTES, OUT, SCRATCH, Address, Reduction
from collectives.runtime.shared_memory import Assembler, Program
from collectives.schedule.moves import Barrier, Copy, Get, GetReduce, Move, Put, Round

if TYPE_CHECKING:
    from collectives.runtime.compared import HeadedRound, Headers
    from collectives.runtime.messages import Vector

HERE, THERE = Address(0, ARRAY, 0), Address(0, OUT, 0)  # the caller's arrays
YIELDS = 200  # of the core, before a program returns: a message takes many
DIFFERENT = np.array([1, 0], np.int64)  # the header of ranks that run different calls


class MessageProgram(Program):
    """A program with messages."""

    def __init__(self, assembler: MessageAssembler, oversubscribed: bool, binding: int):
        headers, code = assembler.headers, np.array(assembler.code, np.int64)
        dtype = assembler.reduction.dtype
        super().__init__(code, headers.channel, dtype, oversubscribed, headers.probe, binding)
        self.frame[kernels.ELSEWHERE] = assembler.elsewhere
        self.frame[kernels.YIELDS] = YIELDS
        self.waits = assembler.waits
        self.keep += [headers, assembler.vector, *assembler.tables]
        self.messages = [request for bound in dict.fromkeys(self.waits.values()) for request in bound.sends]

    def lie_in(self, keys: tuple[int, ...]) -> None:
        """Publish no windows: other ranks do not access the caller's arrays."""

    def requests(self) -> Sequence[MPI.Prequest]:
        return self.messages

    def awaits(self) -> str:
        bound = self.waits.get(int(self.frame[kernels.PLACE]))
        return bound.awaits() if bound else super().awaits()


class MessageAssembler(Assembler):
    """Assembler of one rank's schedule: messages with headers, and accesses to memory of its node between barriers.

    `waits` has the round of each instruction that waits for messages.
    """

    def __init__(self, headers: Headers, vector: Vector, reduction: Reduction):
        super().__init__(reduction)
        self.headers, self.vector, self.seen = headers, vector, address_of(headers.seen)
        self.elsewhere = 0
        self.waits: dict[int, HeadedRound] = {}
        self.tables: list[np.ndarray] = []  # of requests, and of their statuses

    def assemble(
        self,
        schedule: Sequence[Round],
        rounds: dict[int, HeadedRound],
        source: Any,
        target: Any,
        divide: tuple[Any, int] | None,
    ) -> None:
        """Write the code of a schedule, whose `rounds` of messages are bound, from the copy of the caller's array on.

        Where ranks of the node differ at the first barrier, this one only sends headers that tell the others.
        """
        self.copy(place(source), HERE, source.nbytes)
        first = min(rounds, default=-1)
        for number, moves in enumerate(schedule):
            if number == first:
                self.instruction(kernels.OPEN, self.seen, 0)
            if number in rounds:
                self.exchange(rounds[number])
            else:
                for move in moves:
                    self.direct(move)
        self.instruction(kernels.VERDICT, address_of(self.headers.verdict))
        if divide:
            self.instruction(kernels.DIVIDE, *place(divide[0])[1:], len(divide[0]), divide[1])
        self.copy(THERE, place(target), target.nbytes)
        self.instruction(kernels.END)
        self.elsewhere = len(self.code)
        self.instruction(kernels.OPEN, self.seen, 1)
        for bound in rounds.values():
            self.exchange(bound, data=False)
        self.instruction(kernels.VERDICT, DIFFERENT.ctypes.data)

    def copy(self, target: Address, source: Address, nbytes: int) -> None:
        if nbytes:
            self.instruction(kernels.COPY, *target[1:], *source[1:], nbytes)

    def direct(self, move: Move) -> None:
        """Write a move inside the node, or nothing for a message."""
        view = self.vector.view
        match move:
            case Barrier():
                self.instruction(kernels.BARRIER)
            case Copy(source, run):
                self.copy(place(view(run)), place(view(source)), view(run).nbytes)
            case Get(source, theirs, run):
                self.copy(place(view(run)), self.of_peer(source, theirs), view(run).nbytes)
            case Put(to, run, theirs):
                self.copy(self.of_peer(to, theirs), place(view(run)), view(run).nbytes)
            case GetReduce(sources, theirs, run) if len(view(run)):
                self.add(place(view(run)), [self.of_peer(rank, theirs) for rank in sources], view(run).nbytes)

    def of_peer(self, rank: int, run: range) -> Address:
        """Return the address in this process of a run of another rank's vector, which is laid out as this one's."""
        view = self.vector.view(run)
        window = self.headers.context.windows.window_of(view)
        if window is None:  # it is empty
            return place(view)
        return place(view).after(window.bases[self.headers.binder.world_ranks[rank]] - window.address)

    def exchange(self, bound: HeadedRound, data: bool = True) -> None:
        """Write a round of messages, with or without their data."""
        headers = self.headers
        for target, source in bound.copies if data else ():
            self.copy(place(target), place(source), target.nbytes)
        arrivals = [headers.arrivals[partner] for partner in bound.arriving]
        requests, statuses = self.table([*arrivals, *bound.sends])
        sends = requests + len(arrivals) * MPI._sizeof(MPI.Request)
        self.instruction(kernels.START, mpi_function("MPI_Startall"), len(arrivals), requests)
        for partner, out in bound.leaving.items():
            self.copy(place(headers.leaving[partner].header), place(headers.seen), headers.seen.nbytes)
            for part, view in out if data else ():
                self.copy(place(part), place(view), view.nbytes)
        self.instruction(kernels.START, mpi_function("MPI_Startall"), len(bound.sends), sends)
        self.waits[len(self.code)] = bound
        number = len(arrivals) + len(bound.sends)
        self.instruction(kernels.AWAIT, mpi_function("MPI_Testall"), number, requests, statuses)
        for partner, into in bound.arriving.items():
            self.instruction(kernels.MERGE, self.seen, address_of(headers.arriving[partner].header))
            for view, arrived, reduces in into if data else ():
                if not reduces:
                    self.copy(place(view), place(arrived), view.nbytes)
                elif len(view):
                    pair = (arrived, view) if partner < headers.rank else (view, arrived)
                    self.add(place(view), list(map(place, pair)), view.nbytes)

    def table(self, requests: Sequence[MPI.Prequest]) -> tuple[int, int]:
        """Return the addresses of a copy of the handles of requests, and of space for a flag and their statuses."""
        handles = b"".join(ctypes.string_at(MPI._addressof(each), MPI._sizeof(each)) for each in requests)
        table = np.frombuffer(handles, np.uint8).copy()
        statuses = np.zeros(LINE_BYTES + len(requests) * MPI._sizeof(MPI.Status), np.uint8)
        self.tables += [table, statuses]
        return table.ctypes.data, statuses.ctypes.data


def place(view: Any) -> Address:
    """Return the address of this process's memory: an offset from the register of private memory, which is 0."""
    return Address(0, SCRATCH, address_of(view))


@cache
def mpi_function(name: str) -> int:
    """Return the address of a function of the MPI library to which mpi4py is linked."""
    function = getattr(ctypes.CDLL(MPI.__spec__.origin), name)
    return ctypes.cast(function, ctypes.c_void_p).value or 0
