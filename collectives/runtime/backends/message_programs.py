"""Programs of the interpreter with messages: a short collective between nodes runs without Python from copy to copy.

All of a program's memory but the caller's arrays has fixed addresses: its vector, packets, and the other ranks' vectors
in its node.  A message begins with a header, as `collectives.runtime.backends.headers` describes.
"""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
from mpi4py import MPI

from collectives.algorithms import Algorithm
from collectives.arrays.addresses import address_of
from collectives.runtime.backends import kernels
from collectives.runtime.backends.headers import HEADER_BYTES, Headers
from collectives.runtime.backends.phases import ARRAY, LINE_BYTES, OUT, SCRATCH, Address, Reduction
from collectives.runtime.backends.shared_memory import FORMS, Assembler, Program, compile_for
from collectives.runtime.backends.vector import Vector, WorkingVector, working_vector
from collectives.runtime.call.call import Call
from collectives.runtime.call.operands import call_on
from collectives.runtime.plan import describe
from collectives.schedule.moves import (
    Barrier,
    Copy,
    Get,
    GetReduce,
    Move,
    Put,
    Recv,
    RecvReduce,
    Round,
    Send,
    in_parts,
)

YIELDS = 200  # of the core, before a program returns: a message takes many
SOURCE, RESULT = Address(0, ARRAY, 0), Address(0, OUT, 0)  # the arrays of the caller
DIFFERENT = np.array([1, 0], np.int64)  # the header of ranks that run different calls


class MessageRound:
    """A round of messages with headers, one to each partner."""

    def __init__(self, headers: Headers, number: int, moves: Round, vector: Vector):
        self.number, self.moves = number, moves
        self.copies = [(vector.view(m.run), vector.view(m.source)) for m in moves if isinstance(m, Copy)]
        self.leaving: dict[int, list[tuple[Any, Any]]] = {}  # copies into the packet of each partner
        self.arriving: dict[int, list[tuple[Any, Any, bool]]] = {}  # out of it, and whether they reduce
        ends: Counter[tuple[bool, int]] = Counter()  # of the data in packets, after the headers
        for move in moves:
            if not isinstance(move, Send | Recv | RecvReduce):
                continue
            partner, leaves, view = move[0], isinstance(move, Send), vector.view(move.run)
            packet = (headers.leaving if leaves else headers.arriving)[partner].memory[HEADER_BYTES:]
            begin = ends[leaves, partner]
            ends[leaves, partner] += view.nbytes
            part = packet[begin : ends[leaves, partner]].view(view.dtype)
            if leaves:
                self.leaving.setdefault(partner, []).append((part, view))
            else:
                self.arriving.setdefault(partner, []).append((view, part, isinstance(move, RecvReduce)))
        self.arrivals = [headers.arrivals[partner] for partner in self.arriving]
        self.sends = [
            headers.context.mpi.Send_init(
                [headers.leaving[partner].memory[: HEADER_BYTES + ends[True, partner]], MPI.BYTE], partner, headers.tag
            )
            for partner in self.leaving
        ]


class MessageAssembler(Assembler):
    """Assembler of one rank's schedule: messages with headers, and accesses to memory of its node between barriers.

    `bound` has the buffers, and the copies between them and the caller's arrays.  `waits` has the round of each
    instruction that waits for messages.
    """

    def __init__(self, headers: Headers, bound: WorkingVector, op: str):
        super().__init__(Reduction(op, bound.vector.view(range(1)).dtype, divisor=1))
        self.headers, self.bound, self.vector = headers, bound, bound.vector
        self.seen = address_of(headers.seen)
        self.on_mismatch = 0
        self.waits: dict[int, MessageRound] = {}
        self.tables: list[np.ndarray] = []  # of requests, and of their statuses

    def assemble(self, schedule: Sequence[Round], divisor: int) -> None:
        """Write the code of a schedule, from the copy of the caller's array to that of the result.

        Where ranks of the node differ at the first barrier, this one only sends headers that tell the others.
        """
        numbered = [each for direct, part in in_parts(schedule) if not direct for each in part]
        message_rounds = {
            number: MessageRound(self.headers, number, moves, self.vector) for number, moves in numbered if moves
        }
        for buffer, source in self.bound.before:
            self.convert(kernels.WIDEN, local(buffer), SOURCE, buffer, source)
        for number, moves in enumerate(schedule):
            if number == min(message_rounds, default=-1):
                self.instruction(kernels.OPEN, self.seen, 0)
            if number in message_rounds:
                self.messages(message_rounds[number])
            else:
                for move in moves:
                    self.direct(move)
        self.instruction(kernels.VERDICT, self.headers.verdict)
        if divisor > 1:
            total = self.bound.reduced
            self.instruction(kernels.DIVIDE, *local(total)[1:], len(total), divisor)
        for target, buffer in self.bound.after:
            self.convert(kernels.NARROW, RESULT, local(buffer), target, buffer)
        self.instruction(kernels.END)
        self.on_mismatch = len(self.code)
        self.instruction(kernels.OPEN, self.seen, 1)
        for message_round in message_rounds.values():
            self.messages(message_round, with_data=False)
        self.instruction(kernels.VERDICT, DIFFERENT.ctypes.data)

    def copy(self, target: Address, source: Address, nbytes: int) -> None:
        if nbytes:
            self.instruction(kernels.COPY, *target[1:], *source[1:], nbytes)

    def convert(self, opcode: int, target: Address, source: Address, into: Any, of: Any) -> None:
        """Write a copy between an array and its buffer, whose dtypes may be a 16-bit float and float32."""
        if into.dtype == of.dtype:
            self.copy(target, source, into.nbytes)
        else:
            narrow = of.dtype if opcode == kernels.WIDEN else into.dtype
            self.instruction(opcode, *target[1:], *source[1:], len(into), FORMS[narrow])

    def direct(self, move: Move) -> None:
        """Write a move inside the node."""
        view = self.vector.view
        match move:
            case Barrier():
                self.instruction(kernels.BARRIER)
            case Copy(source, run):
                self.copy(local(view(run)), local(view(source)), view(run).nbytes)
            case Get(source, theirs, run):
                self.copy(local(view(run)), self.peer_address(source, theirs), view(run).nbytes)
            case Put(to, run, theirs):
                self.copy(self.peer_address(to, theirs), local(view(run)), view(run).nbytes)
            case GetReduce(sources, theirs, run) if len(view(run)):
                self.add(local(view(run)), [self.peer_address(rank, theirs) for rank in sources], view(run).nbytes)

    def peer_address(self, rank: int, run: range) -> Address:
        """Return the address in this process of a run of another rank's vector, which is laid out as this one's."""
        view = self.vector.view(run)
        window = self.headers.context.windows.window_of(view)
        if window is None:  # it is empty
            return local(view)
        return local(view).after(window.bases[self.headers.context.world_ranks[rank]] - window.address)

    def messages(self, message_round: MessageRound, with_data: bool = True) -> None:
        """Write a round of messages."""
        headers = self.headers
        for target, source in message_round.copies if with_data else ():
            self.copy(local(target), local(source), target.nbytes)
        num_arrivals, num_sends = len(message_round.arrivals), len(message_round.sends)
        requests, statuses = self.table([*message_round.arrivals, *message_round.sends])
        self.instruction(kernels.START, mpi_function("MPI_Startall"), num_arrivals, requests)
        for partner, data in message_round.leaving.items():
            self.copy(local(headers.leaving[partner].header), local(headers.seen), HEADER_BYTES)
            for part, view in data if with_data else ():
                self.copy(local(part), local(view), view.nbytes)
        sends = requests + num_arrivals * MPI._sizeof(MPI.Request)
        self.instruction(kernels.START, mpi_function("MPI_Startall"), num_sends, sends)
        self.waits[len(self.code)] = message_round
        self.instruction(kernels.AWAIT, mpi_function("MPI_Testall"), num_arrivals + num_sends, requests, statuses)
        for partner, arrived in message_round.arriving.items():
            self.instruction(kernels.MERGE, self.seen, address_of(headers.arriving[partner].header))
            for view, part, reduces in arrived if with_data else ():
                if not reduces:
                    self.copy(local(view), local(part), view.nbytes)
                elif len(view):
                    operands = (part, view) if partner < headers.rank else (view, part)
                    self.add(local(view), list(map(local, operands)), view.nbytes)

    def table(self, requests: Sequence[MPI.Prequest]) -> tuple[int, int]:
        """Return the addresses of a copy of the handles of requests, and of space for a flag and their statuses."""
        handles = b"".join(ctypes.string_at(MPI._addressof(each), MPI._sizeof(each)) for each in requests)
        table = np.frombuffer(handles, np.uint8).copy()
        statuses = np.zeros(LINE_BYTES + len(requests) * MPI._sizeof(MPI.Status), np.uint8)
        self.tables += [table, statuses]
        return table.ctypes.data, statuses.ctypes.data


class MessageProgram(Program):
    """A program with messages.  Creating it is collective."""

    def __init__(self, assembler: MessageAssembler, binding: int):
        headers, dtype = assembler.headers, assembler.reduction.dtype
        context = headers.context
        if context.memory.of_host.node_comm.rank == 0:
            compile_for(dtype)  # then the others find it on disk
        context.agreement.highest([0])
        code, oversubscribed = np.array(assembler.code, np.int64), context.progress.oversubscribed
        super().__init__(code, headers.channel, dtype, oversubscribed, headers.probe, binding)
        self.frame[kernels.ON_MISMATCH], self.frame[kernels.YIELDS] = assembler.on_mismatch, YIELDS
        self.keep += [assembler.vector, *assembler.tables]
        self.headers, self.waits = headers, assembler.waits
        self.messages = [send for message_round in dict.fromkeys(self.waits.values()) for send in message_round.sends]

    def lie_in(self, keys: tuple[int, ...]) -> None:
        """Publish no windows: other ranks do not access the caller's arrays."""

    def requests(self) -> Sequence[MPI.Prequest]:
        return self.messages

    def in_flight(self) -> Sequence[MPI.Request]:
        return [*self.messages, *self.headers.arrivals.values()]

    def awaits(self) -> str:
        message_round = self.waits.get(int(self.frame[kernels.COUNTER]))
        return describe(message_round.number, message_round.moves) if message_round else super().awaits()


def local(view: Any) -> Address:
    """Return the address of this process's memory: an offset from the register of private memory, which is 0."""
    return Address(0, SCRATCH, address_of(view))


@cache
def mpi_function(name: str) -> int:
    """Return the address of a function of the MPI library to which mpi4py is linked."""
    function = getattr(ctypes.CDLL(MPI.__spec__.origin), name)
    return ctypes.cast(function, ctypes.c_void_p).value or 0


def only_headers(headers: Headers) -> MessageProgram:
    """Make a program that only compares calls.  Collective."""
    call = call_on("all_reduce", headers.rank, headers.context.size, np.empty(0, np.uint8))
    return with_headers(headers, call, headers.row)


def with_headers(headers: Headers, call: Call, row: Algorithm) -> MessageProgram:
    """Make a program for any arrays like those of a call, with buffers of its own.  Collective."""
    context = headers.context

    def allocate(use: str, count: int, dtype: Any) -> Any:
        return context.memory.empty(call.device, count, dtype)

    groups = context.topology.nodes if row.over_nodes else ()
    working = working_vector(
        call, row.num_chunks(context.size, groups), allocate, in_caller_arrays=False, is_shared=True
    )
    schedule = row.rounds(headers.rank, context.size, 0, groups)
    working.vector.add_scratch(schedule, call.device.empty)
    assembler = MessageAssembler(headers, working, call.kernel_op if call.spec.reduces else "")
    assembler.assemble(schedule, divisor=context.size if call.op == "avg" else 1)
    return MessageProgram(assembler, call.binding)
