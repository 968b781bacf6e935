"""Collectives between nodes whose messages also tell which call the sender runs, so that ranks detect mismatches.

Inside a node the first barrier compares.  Between nodes that takes the rounds of an all-reduce of one number: each
message begins with a header, the maximum of the keys that its sender has seen, and that of the negated ones.  A short
vector is sent along with the headers, if its schedule has the same partners in the same rounds.  It travels through
separate buffers, so that a mismatch leaves the callers' arrays unchanged.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from mpi4py import MPI

from collectives import algorithms
from collectives.algorithms import Algorithm, leaders
from collectives.algorithms.groups import group_of
from collectives.arrays.device import Device, host
from collectives.arrays.memory import array
from collectives.arrays.ops import Op, has_kernel, sum_dtype
from collectives.arrays.views import address_of
from collectives.runtime.arguments import Arguments
from collectives.runtime.binding import Binder, Choice, in_registers
from collectives.runtime.messages import Messages, Vector
from collectives.runtime.operands import Binding, Workspace, bind, operands_of
from collectives.runtime.phases import NUM_SHARED, Reduction
from collectives.runtime.plan import MismatchError, Plan, Step
from collectives.runtime.progress import Waitable
from collectives.runtime.started import Comparison
from collectives.schedule.moves import Copy, Recv, RecvReduce, Round, Send, in_parts

if TYPE_CHECKING:
    from collectives.runtime.context import Context

HEADER_BYTES = 16
ALL_TO_ALL = ("all_reduce", "all_to_all")  # in which every rank hears of every other
LONGEST_BYTES = 1 << 15  # of a vector sent along with headers


class Packet:
    """Memory for a message: its header, then the chunks sent along."""

    def __init__(self) -> None:
        self.memory = np.zeros(HEADER_BYTES + LONGEST_BYTES, np.uint8)
        self.header = self.memory[:HEADER_BYTES].view(np.int64)


class Headers:
    """The highest keys that a rank has seen in a call, and the packets in which it exchanges them with its partners.

    A node's ranks read the verdict of their leader, which alone has partners.  Creating it is collective.
    """

    def __init__(self, context: Context, binder: Binder):
        self.context, self.binder, self.rank = context, binder, context.rank
        self.in_nodes = context.topology.has_groups_in_nodes and context.has_numba
        self.teams = leaders.teams_of(context.topology.nodes, context.size) if self.in_nodes else []
        team = group_of(self.rank, self.teams) if self.in_nodes else (self.rank,)
        self.row = algorithms.find("all_reduce", "leaders" if self.in_nodes else "recursive_doubling")
        self.tag = context.next_tags()
        memory, world_ranks = context.memory.of_host, binder.world_ranks
        lease = memory.allocate(HEADER_BYTES)
        self.seen = self.verdict = array(lease, 2, np.dtype(np.int64))
        if context.has_numba:
            from collectives.runtime.channel import Channel  # it imports the compiler

            self.channel = Channel(memory, world_ranks, [self.rank, *(rank for rank in team if rank != self.rank)])
        if self.in_nodes:
            self.verdict = host().borrow(lease.at(world_ranks[team[0]]), 2, np.dtype(np.int64))
        partners = set().union(*self.partners(self.row, self.rank))
        self.leaving = {partner: Packet() for partner in partners}
        self.arriving = {partner: Packet() for partner in partners}
        self.arrivals = {
            partner: context.mpi.Recv_init([packet.memory, MPI.BYTE], partner, self.tag)
            for partner, packet in self.arriving.items()
        }
        self.probe = partial(context.mpi.Iprobe, MPI.ANY_SOURCE, MPI.ANY_TAG)
        context.agreement.highest([0])  # all have cleared their slots

    def partners(self, row: Algorithm, rank: int) -> list[set[int]]:
        """Return the ranks with which a rank exchanges messages, round by round."""
        groups = self.context.topology.nodes if row.over_nodes else ()
        rounds = row.rounds(rank, self.context.size, 0, groups)
        peers_by_round = [{m[0] for m in moves if isinstance(m, Send | Recv | RecvReduce)} for moves in rounds]
        return [partners for partners in peers_by_round if partners]

    def carry(self, a: Arguments, choice: Choice) -> bool:
        """Return whether an agreed call can be sent along with the headers: the same on all ranks."""
        row, facts, _ = choice
        if facts is None or not facts.on_host or not facts.nbytes or a.wire_dtype is not None:
            return False
        if row.name != self.row.name or a.collective not in ALL_TO_ALL or a.send_counts is not None:
            return False
        widest = max(map(len, self.teams), default=1)
        most_bytes = 4 * facts.nbytes * (widest if a.spec.exchanges else 1)  # sums may be wider than `x`
        return most_bytes <= LONGEST_BYTES and self.partners(row, 0) == self.partners(self.row, 0)

    def open(self, key: int) -> None:
        """Forget the previous call; a rank without a bound call has the key 0."""
        self.seen[:] = key, -key

    @property
    def agree(self) -> bool:
        """Whether the node's leader found that all ranks make the same call."""
        highest, negated = self.verdict.tolist()
        return highest == -negated

    def free(self) -> None:
        for request in self.arrivals.values():
            request.Free()

    def comparison(self) -> ComparedPlan:
        """Make a plan that only compares.  Collective."""
        a = Arguments("all_reduce", self.rank, self.context.size, np.empty(0, np.int64))
        plan = self.plan(a, Choice(self.row, None), 0)
        assert isinstance(plan, ComparedPlan)
        return plan

    def plan(self, a: Arguments, choice: Choice, binding: int) -> ComparedPlan | CompiledPlan:
        """Make a plan for any arrays like those of a call.  Collective."""
        context, row = self.context, choice.row
        operands = operands_of(a)

        def allocate(use: str, count: int, dtype: Any) -> Any:
            return context.memory.empty(a.device, count, dtype)

        bound = bind(a, operands, Workspace(use_caller_arrays=False, allocate=allocate, is_shared=True))
        schedule = row.rounds(self.rank, context.size, 0, context.topology.nodes if row.over_nodes else ())
        num_shared = len(bound.vector.places)
        bound.vector.add_scratch(schedule, a.device.empty)
        memory, chunks = in_registers(bound.vector, num_shared)
        if self.compiles(a):
            return self.compiled(a, row, bound, schedule, binding)
        program = None
        if self.in_nodes:
            parts = partial(self.binder.direct_parts, channel=self.channel, binding=binding)
            program = parts(schedule, memory, chunks, a.kernel_op)
            if not any(direct for direct, _ in in_parts(schedule)):  # alone in its node
                program = None
        rounds = self.headed(schedule, bound.vector, a.op)
        plan = ComparedPlan(f"{a.collective} {row.name}", self, program, list(rounds.values()), binding)
        if len(a.flat):
            plan.source, plan.target, plan.dtype = bound.before[0][0], bound.after[0][1], a.flat.dtype
        plan.places = [tuple(map(of, memory[:NUM_SHARED])) for of in (address_of, context.windows.key_of)]
        if a.op == "avg":
            plan.divide = bound.reduced, context.size
        return plan

    def headed(self, schedule: Sequence[Round], vector: Vector, op: str | Op) -> dict[int, HeadedRound]:
        """Bind the rounds of messages, by their number."""
        parts = [part for direct, part in in_parts(schedule) if not direct]
        return {nth: HeadedRound(self, nth, moves, vector, op) for part in parts for nth, moves in part if moves}

    def compiles(self, a: Arguments) -> bool:
        """Return whether a call has a program: where it adds up, in numbers of the arrays' own dtype."""
        if not self.context.has_numba or not len(a.flat):
            return False
        return not a.spec.reduces or (has_kernel(a.op) and sum_dtype(a.flat.dtype, a.op) == a.flat.dtype)

    def compiled(
        self, a: Arguments, row: Algorithm, bound: Binding, schedule: Sequence[Round], binding: int
    ) -> CompiledPlan:
        from collectives.runtime.message_programs import MessageAssembler, MessageProgram
        from collectives.runtime.shared_memory import compile_for

        dtype = a.flat.dtype
        assembler = MessageAssembler(self, bound.vector, Reduction(a.kernel_op if a.spec.reduces else "", dtype, 1))
        divide = (bound.reduced, self.context.size) if a.op == "avg" else None
        rounds = self.headed(schedule, bound.vector, a.op)
        assembler.assemble(schedule, rounds, bound.before[0][0], bound.after[0][1], divide)
        if self.context.memory.of_host.node_comm.rank == 0:
            compile_for(dtype)  # then the others find it on disk
        self.context.agreement.highest([0])
        program = MessageProgram(assembler, self.context.progress.oversubscribed, binding)
        return CompiledPlan(f"{a.collective} {row.name}", None, self.context.progress, host(), [program], only=program)


class CompiledPlan(Plan):
    """A collective between nodes that is one program; each run brings the arrays to copy from and to."""

    def use(self, number: int, addresses: tuple[int, ...], binding: int | None = None) -> None:
        """Take the arrays at two addresses for the next run, which is call `number`."""
        self.only.use(number, addresses, self.only.keys)


class HeadedRound(Step):
    """A round of messages with headers, one to each partner."""

    def __init__(self, headers: Headers, number: int, moves: Round, vector: Vector, op: str | Op):
        self.headers, self.number, self.moves = headers, number, moves
        self.copies = [(vector.view(m.run), vector.view(m.source)) for m in moves if isinstance(m, Copy)]
        self.op = op
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
        self.sends = [
            headers.context.mpi.Send_init(
                [headers.leaving[partner].memory[: HEADER_BYTES + ends[True, partner]], MPI.BYTE], partner, headers.tag
            )
            for partner in self.leaving
        ]

    def run(self, device: Device) -> Iterator[Messages]:
        headers = self.headers
        device.copy_pairs(self.copies)
        arrivals = [headers.arrivals[partner] for partner in self.arriving]
        MPI.Prequest.Startall(arrivals)
        for partner, out in self.leaving.items():
            headers.leaving[partner].header[:] = headers.seen
            device.copy_pairs(out)
        MPI.Prequest.Startall(self.sends)
        yield Messages([*arrivals, *self.sends])
        for partner, into in self.arriving.items():
            np.maximum(headers.seen, headers.arriving[partner].header, out=headers.seen)
            for view, arrived, reduces in into:
                if not reduces:
                    device.copy(view, arrived)
                elif partner < headers.rank:
                    device.reduce(self.op, arrived, view, view)
                else:
                    device.reduce(self.op, view, arrived, view)

    def requests(self) -> list[MPI.Prequest]:
        return self.sends


class ComparedPlan(Plan):
    """A collective between nodes, bound to its own buffers; each run brings the arrays to copy from and to."""

    source: Any  # buffers of a rank's input, and of its result
    target: Any
    dtype: np.dtype  # of the calls' arrays
    places: list[tuple[int, ...]]  # the addresses of its buffers, and their windows

    def __init__(self, name: str, headers: Headers, program: Any, rounds: Sequence[HeadedRound], binding: int):
        super().__init__(name, None, headers.context.progress, host(), rounds)
        self.headers, self.program, self.binding = headers, program, binding
        self.key = self.number = 0

    def use(self, number: int, addresses: Sequence[int] = (), binding: int | None = None) -> None:
        """Take the arrays at two addresses for the next run, which is call `number`."""
        binding = self.binding if binding is None else binding
        self.key = binding << 32 | number if binding else 0
        if self.program is not None:
            self.program.use(number, *self.places, binding)
        if addresses:
            self.before = [(self.source, host().borrow(addresses[0], len(self.source), self.dtype))]
            self.after = [(host().borrow(addresses[1], len(self.target), self.dtype), self.target)]

    def _run(self) -> Iterator[Waitable]:
        self.device.copy_pairs(self.before)
        arrival = None
        if self.program is not None:
            self._round = self.program
            arrival = Comparison(self.program)
            if not arrival.test():
                yield arrival
        differ = arrival is not None and arrival.has_failed
        self.headers.open(0 if differ else self.key)
        for messages in self.rounds:
            self._round = messages
            yield from messages.run(self.device)
        if not differ and self.program is not None:
            self._round = self.program
            yield from self.program.run(self.device)
        if differ or not self.headers.agree:
            raise MismatchError("ranks have bound different collectives")
        if self.divide:
            self.device.divide(*self.divide)
        self.device.copy_pairs(self.after)
