"""Follow every rank and message of a collective through a network, one event after the other.

A rank begins its next round as soon as its own moves are over.  A message starts when both ranks have posted it, and
completes on both when it has arrived.  Between nodes it uses the sending rank's port and its node's link on the way
out, and the same of the receiving rank on the way in; between groups of a tier also the ports of all groups that it
leaves, and of those that it enters.  Each serves messages in the order in which they start, of simultaneous ones the
lower sender's first, and all that a message uses serve it at once: the last one to do so ends it.  Inside a node, a
rank's sends are serialized, and so are its receives.  Reductions and copies follow as in `collectives.schedule.cost`.
"""

from collections import defaultdict
from collections.abc import Sequence
from functools import cache, lru_cache
from heapq import heappop, heappush
from typing import NamedTuple

from collectives.algorithms import Algorithm
from collectives.schedule.cost import IDLE, RoundSummary, summary
from collectives.schedule.draw import Bar, MessageLine
from collectives.schedule.network import Link, Network, Nodes

OUT, IN = 0, 1  # the ways of a link
IN_NODE, PORT = -2, -1  # levels of a rank's link in its node, and to others; a node's is 0, those of groups follow
Resource = tuple[int, int, int]  # a way of a rank's, node's or group's link: its way, level and number


class Outcome(NamedTuple):
    """The seconds after which each rank ended, and the events until then."""

    ends: list[float]
    bars: list[Bar]
    lines: list[MessageLine]

    @property
    def seconds(self) -> float:
        return max(self.ends)


def simulate(row: Algorithm, nbytes: int, nodes: Nodes, network: Network, root: int = 0) -> Outcome:
    """Run an algorithm on a vector of `nbytes`, in chunks of one length.

    >>> from collectives.algorithms import find
    >>> from collectives.schedule.network import Link
    >>> network = Network(within=Link(alpha_s=1e-6, beta_s_per_byte=1e-9), gamma_s_per_byte=5e-10)
    >>> outcome = simulate(find("all_reduce", "ring"), 4000, ((0, 1, 2, 3),), network)
    >>> print(f"{outcome.seconds * 1e6:.1f} us")
    13.5 us
    """
    rounds = rounds_of(row, nodes, root)
    simulation = Simulation(rounds, nodes, network, nbytes / row.num_chunks(len(rounds), nodes))
    simulation.run()
    if stuck := [rank for rank, own in enumerate(rounds) if simulation.number[rank] < len(own)]:
        where = f"rank {stuck[0]} waits forever in round {simulation.number[stuck[0]]}"
        raise AssertionError(f"{row.name} on {len(rounds)} ranks: {where}")
    return Outcome(simulation.clock, [bar for bar in simulation.bars if bar.end > bar.begin], simulation.lines)


@lru_cache(maxsize=1)
def rounds_of(row: Algorithm, nodes: Nodes, root: int) -> list[list[RoundSummary]]:
    """Return every rank's work in each round."""
    size = sum(map(len, nodes))
    return [[summary(moves, rank) for moves in row.rounds(rank, size, root, nodes)] for rank in range(size)]


class Post(NamedTuple):
    """One end of a message, which its rank has posted at `time`."""

    time: float
    chunks: int
    reduced: int


class PostedMessage(NamedTuple):
    """A message that both ranks have posted by `begin`."""

    begin: float
    source: int
    dest: int
    chunks: int
    reduced: int


class OpenRound:
    """The messages of a rank's round: how many have not arrived, and the chunks to reduce of those that have."""

    def __init__(self, number: int, begin: float):
        self.number, self.over, self.near, self.far = number, begin, 0, 0


class Simulation:
    """All ranks, each in its round."""

    def __init__(self, rounds: Sequence[Sequence[RoundSummary]], nodes: Nodes, network: Network, chunk_bytes: float):
        self.rounds, self.nodes, self.network, self.chunk_bytes = rounds, nodes, network, chunk_bytes
        self.node_of = {rank: number for number, node in enumerate(nodes) for rank in node}
        self.number, self.clock = [0] * len(rounds), [0.0] * len(rounds)  # rounds that are over, and when they were
        self.posts: dict[tuple[int, int, int], Post] = {}  # without the other end yet, by round, source and dest
        self.pending: dict[int, OpenRound] = {}
        self.arrived: dict[tuple[int, ...], list[float]] = defaultdict(list)  # at a barrier, and when
        self.free: dict[Resource, float] = defaultdict(float)  # since when it is
        self.waiting: list[PostedMessage] = []  # a heap
        self.ready = list(range(len(rounds)))
        self.bars: list[Bar] = []
        self.lines: list[MessageLine] = []
        self.num_busy, self.path = cache(self.count_busy), cache(self.path_between)

    def run(self) -> None:
        while self.ready or self.waiting:
            if self.ready:
                self.begin_round(self.ready.pop())
            else:
                self.send(heappop(self.waiting))

    def count_busy(self, node: int, number: int) -> int:
        """Count the ranks of a node that have work in a round."""
        return sum(self.rounds[rank][number] != IDLE for rank in self.nodes[node])

    def crowd(self, rank: int) -> float:
        """Return the slowdown of a rank in its round, as others share its core."""
        node, cores = self.node_of[rank], self.network.cores
        return max(1.0, self.num_busy(node, self.number[rank]) / cores) if len(self.nodes[node]) > cores else 1.0

    def begin_round(self, rank: int) -> None:
        """Do a rank's own work; then post its messages, or arrive at its barrier."""
        own, network = self.rounds[rank], self.network
        while self.number[rank] < len(own) and own[self.number[rank]] == IDLE:
            self.number[rank] += 1
        if self.number[rank] == len(own):
            return
        number, work = self.number[rank], own[self.number[rank]]
        s_per_byte = work.copied * network.copy_s_per_byte + work.reduced * network.gamma_s_per_byte
        s_per_byte += work.pulled * network.pull_s_per_byte
        time = self.clock[rank] + self.crowd(rank) * self.chunk_bytes * s_per_byte
        if work.barrier:
            self.arrive(rank, work.barrier, time)
        elif not work.messages:
            self.end_round(rank, time)
        else:
            self.pending[rank] = OpenRound(len(work.messages), time)
            for is_send, peer, chunks, reduced in work.messages:
                source, dest = (rank, peer) if is_send else (peer, rank)
                self.post((number, source, dest), Post(time, chunks, reduced))

    def arrive(self, rank: int, ranks: tuple[int, ...], time: float) -> None:
        """Arrive at a barrier; the last rank releases all."""
        self.arrived[ranks].append(time)
        if len(self.arrived[ranks]) == len(ranks):
            end = max(self.arrived.pop(ranks)) + self.crowd(rank) * self.network.meet_s
            for member in ranks:
                self.end_round(member, end)

    def post(self, key: tuple[int, int, int], own: Post) -> None:
        """Post one end of a message; start it, if the other end is posted."""
        _, source, dest = key
        other = self.posts.pop(key, None)
        if other is None or other.chunks != own.chunks:
            self.posts[key] = own
            return
        time = max(own.time, other.time)
        heappush(self.waiting, PostedMessage(time, source, dest, own.chunks, own.reduced + other.reduced))

    def path_between(self, nodes: tuple[int, int]) -> tuple[Link, list[tuple[Resource, Link]]]:
        """Return the link of a message from a node to another, and all gates that it uses, with what it takes there."""
        lengths = (1, *(tier.nodes for tier in self.network.tiers))
        levels = [level for level, length in enumerate(lengths) if nodes[OUT] // length != nodes[IN] // length]
        gates = [(level, gate) for level in levels if (gate := self.network.gates[level])]
        path = [((way, level, nodes[way] // lengths[level]), gate) for level, gate in gates for way in (OUT, IN)]
        return self.network.links[levels[-1]], path

    def send(self, message: PostedMessage) -> None:
        """End a message when all that it uses has served it."""
        begin, source, dest, chunks, _ = message
        nodes, nbytes = (self.node_of[source], self.node_of[dest]), chunks * self.chunk_bytes
        if nodes[OUT] == nodes[IN]:
            takes_s = self.crowd(source) * self.network.within.seconds(nbytes)
            end = max(self.serve((way, IN_NODE, rank), begin, takes_s) for way, rank in ((OUT, source), (IN, dest)))
            self.end_message(message, end, far=False)
            return
        link, path = self.path(nodes)
        port_s = nbytes * link.beta_s_per_byte
        end = max(self.serve((way, PORT, rank), begin, port_s) for way, rank in ((OUT, source), (IN, dest)))
        for resource, gate in path:
            end = max(end, self.serve(resource, begin, nbytes * gate.beta_s_per_byte, gate.alpha_s))
        self.end_message(message, end + link.alpha_s, far=True)

    def serve(self, resource: Resource, begin: float, takes_s: float, pause_s: float = 0.0) -> float:
        """Let a resource serve a message after those before it, and return the end; `pause_s` later comes the next."""
        end = max(begin, self.free[resource]) + takes_s
        self.free[resource] = end + pause_s
        return end

    def end_message(self, message: PostedMessage, time: float, far: bool) -> None:
        """Let ranks without further messages to wait for reduce, and end their round."""
        self.lines.append(MessageLine(message.source, message.dest, message.begin, time))
        arrived = self.pending[message.dest]
        arrived.near += message.reduced * (not far)
        arrived.far += message.reduced * far
        for rank in (message.source, message.dest):
            pending = self.pending[rank]
            pending.number -= 1
            pending.over = max(pending.over, time)
            if not pending.number:
                near_s = pending.near * self.chunk_bytes * self.network.gamma_s_per_byte
                far_s = self.network.reduction_s(pending.far * self.chunk_bytes)
                self.end_round(rank, pending.over + self.crowd(rank) * (near_s + far_s), pending.over)

    def end_round(self, rank: int, end: float, over: float | None = None) -> None:
        """End a rank's round, whose messages, if any, were over at `over`."""
        begin = self.clock[rank]
        if over is None:
            self.bars.append(Bar(rank, begin, end, "work"))
        else:
            self.bars += [Bar(rank, begin, over, "wait"), Bar(rank, over, end, "reduce")]
        self.clock[rank] = end
        self.number[rank] += 1
        self.ready.append(rank)
