"""Collectives between nodes whose messages also tell which call the sender runs, so that ranks detect mismatches.

Inside a node the first barrier compares.  Between nodes that takes the rounds of an all-reduce of one number: each
message begins with a header, the maximum of the keys that its sender has seen, and that of the negated ones.  A short
vector is sent along with the headers, if its schedule has the same partners in the same rounds.  It travels through
separate buffers, so that a mismatch leaves the callers' arrays unchanged.
"""

from __future__ import annotations

from functools import partial

import numpy as np
from mpi4py import MPI

from collectives import algorithms
from collectives.algorithms import Algorithm, leaders
from collectives.algorithms.groups import group_of
from collectives.arrays.memory import array
from collectives.arrays.ops import has_kernel
from collectives.runtime.backends.channel import Channel
from collectives.runtime.call.call import Call
from collectives.runtime.context import Context
from collectives.schedule.moves import Recv, RecvReduce, Send

HEADER_BYTES = 16
ALL_TO_ALL = ("all_reduce", "all_gather", "all_to_all")  # in which every rank hears of every other
LONGEST_BYTES = 1 << 15  # of a vector sent along with headers


class Packet:
    """Memory for a message: its header, then the chunks sent along."""

    def __init__(self, nbytes: int):
        self.memory = np.zeros(HEADER_BYTES + nbytes, np.uint8)
        self.header = self.memory[:HEADER_BYTES].view(np.int64)


class Headers:
    """The highest keys that a rank has seen in a call, and the packets in which it exchanges them with its partners.

    A node's ranks read the verdict of their leader, which alone has partners.  Creating it is collective.
    """

    def __init__(self, context: Context):
        self.context, self.rank = context, context.rank
        in_nodes, alone = context.topology.has_groups_in_nodes, [(rank,) for rank in range(context.size)]
        self.teams = leaders.teams_of(context.topology.nodes, context.size) if in_nodes else alone
        team = group_of(self.rank, self.teams)
        self.row = algorithms.find("all_reduce", "leaders" if in_nodes else "recursive_doubling")
        self.tag = context.next_tags()
        memory, world_ranks = context.memory.of_host, context.world_ranks
        lease = memory.allocate(HEADER_BYTES)
        self.seen = array(lease, 2, np.dtype(np.int64))
        self.verdict = lease.at(world_ranks[team[0]])  # the address of its leader's
        self.channel = Channel(memory, world_ranks, [self.rank, *(rank for rank in team if rank != self.rank)])
        partners = set().union(*self.partners(self.row, self.rank))
        self.leaving = {partner: Packet(LONGEST_BYTES) for partner in partners}
        self.arriving = {partner: Packet(LONGEST_BYTES) for partner in partners}
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

    def carry(self, call: Call, row: Algorithm) -> bool:
        """Return whether an agreed call can be sent along with the headers: the same on all ranks."""
        facts = call.facts
        if not facts.on_host or not facts.nbytes or call.wire_dtype is not None:
            return False
        if call.spec.reduces and not has_kernel(call.op):
            return False
        if row.name != self.row.name or call.collective not in ALL_TO_ALL or call.send_counts is not None:
            return False
        widest = max(map(len, self.teams), default=1)
        most_bytes = 4 * facts.nbytes * (widest if call.spec.exchanges else 1)  # sums may be wider than `x`
        return most_bytes <= LONGEST_BYTES and self.partners(row, 0) == self.partners(self.row, 0)

    def free(self) -> None:
        for request in self.arrivals.values():
            request.Free()
