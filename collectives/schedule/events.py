"""Follow every rank and message of a collective through a network, one event after the other.

A rank begins its next round as soon as its own moves are over.  A message starts when both ranks have posted it, and
completes on both when it has arrived.  Between nodes it passes the sending node's link out and the receiving node's
link in, which a node's ranks share; each link takes messages in order of arrival, of simultaneous ones the lower
sender's first, and is free for the next one after `Network.gate`.  Inside a node, a rank's sends are serialized, and so
are its receives.  Reductions and copies follow as in `collectives.schedule.cost`.
"""

from collections import defaultdict
from collections.abc import Sequence
from functools import cache, lru_cache
from heapq import heappop, heappush
from typing import NamedTuple

from collectives.algorithms import Algorithm
from collectives.schedule.cost import IDLE, Network, Nodes, RoundSummary, summary
from collectives.schedule.draw import Bar, MessageLine

OUT, IN = 0, 1  # the links that a message passes


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
    >>> from collectives.schedule.cost import Link
    >>> network = Network(within=Link(alpha_s=1e-6, beta_s_per_byte=1e-9), gamma_s_per_byte=5e-10)
    >>> outcome = simulate(find("all_reduce", "ring"), 4000, ((0, 1, 2, 3),), network)
    >>> print(f"{outcome.seconds * 1e6:.1f} us")
    13.5 us
    """
    rounds = rounds_of(row, nodes, root)
    simulation = Simulation(rounds, nodes, network, nbytes / len(rounds))
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


class Passage(NamedTuple):
    """A message that both ranks have posted by `begin`, and that reaches a link at `time`."""

    time: float
    way: int
    source: int
    dest: int
    chunks: int
    reduced: int
    begin: float


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
        self.free: dict[tuple[int, bool, int], float] = defaultdict(float)  # since when a rank's or node's way is
        self.passing: list[Passage] = []
        self.ready = list(range(len(rounds)))
        self.bars: list[Bar] = []
        self.lines: list[MessageLine] = []
        self.num_busy = cache(self.count_busy)

    def run(self) -> None:
        while self.ready or self.passing:
            if self.ready:
                self.begin_round(self.ready.pop())
            else:
                self.pass_way(heappop(self.passing))

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
        heappush(self.passing, Passage(time, OUT, source, dest, own.chunks, own.reduced + other.reduced, time))

    def pass_way(self, message: Passage) -> None:
        """Move a message from the link out to the link in, or over the latter."""
        time, way, source, dest, chunks, _, _ = message
        nodes, network, nbytes = (self.node_of[source], self.node_of[dest]), self.network, chunks * self.chunk_bytes
        far = nodes[0] != nodes[1]
        alpha_s, beta_s_per_byte = network.between if far else network.within
        takes_s = (1.0 if far else self.crowd(source)) * (alpha_s + nbytes * beta_s_per_byte)
        keeps_s = network.gate.alpha_s + nbytes * network.gate.beta_s_per_byte if far else takes_s
        resource = way, far, nodes[way] if far else (source, dest)[way]
        begin = max(time, self.free[resource])
        self.free[resource] = begin + keeps_s
        if way == OUT:
            heappush(self.passing, message._replace(time=begin, way=IN))
        else:
            self.end_message(message, begin + takes_s, far)

    def end_message(self, message: Passage, time: float, far: bool) -> None:
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
