"""Follow every message of a schedule over the links of a graph.

A rank begins its next round as soon as its own moves are over.  A message starts when both ranks have posted it, and
occupies all links of its route at once.  The messages on a link have fractions of its speed in proportion to their
lengths, as those of ranks that send a little of each in turn, and a message goes at the least that its links leave it.
A message is over for both ranks once its last byte has passed, and the links' latencies are over, too.  The messages
between two ranks in a round count as one.  Reductions and copies take no time here.
"""

from collections.abc import Callable, Sequence
from heapq import heappop, heappush

from collectives.graphs.graph import LinkGraph, Path
from collectives.schedule.moves import Recv, RecvReduce, Round, Send

Routes = dict[tuple[int, int], Path]
Traffics = tuple[tuple[bool, int, int], ...]  # is_send, peer, number of chunks


def seconds(graph: LinkGraph, rounds_of: Callable[[int], Sequence[Round]], chunk_bytes: float, routes: Routes) -> float:
    """Return the time of a schedule whose chunks have so many bytes.

    >>> from collectives.algorithms import find
    >>> from collectives.graphs.shapes import ring
    >>> graph, row = ring(4, gb_per_s=1.0, us=1.0), find("all_gather", "ring")
    >>> print(f"{seconds(graph, lambda rank: row.rounds(rank, 4, 0, ()), 1000, graph.routes()) * 1e6:.1f} us")
    6.0 us
    """
    transit = Transit(graph, [[traffic(moves) for moves in rounds_of(rank)] for rank in range(graph.size)], routes)
    return transit.run(chunk_bytes)


def traffic(moves: Round) -> Traffics:
    """Return the number of chunks to each peer, and from each."""
    sums: dict[tuple[bool, int], int] = {}
    for move in moves:
        match move:
            case Send(peer, run) | Recv(peer, run) | RecvReduce(peer, run):
                way = isinstance(move, Send), peer
                sums[way] = sums.get(way, 0) + len(run)
    return tuple((*way, chunks) for way, chunks in sums.items())


class Transfer:
    """A message on its way, and the speed that its links leave it."""

    def __init__(self, source: int, dest: int, path: Path, chunks: int, nbytes: float, now: float):
        self.source, self.dest, self.path, self.chunks, self.nbytes = source, dest, path, chunks, nbytes
        self.rate, self.since = 0.0, now

    def advance(self, now: float, rate: float) -> float:
        """Set another speed; return the time at which the last byte passes, if it stays."""
        self.nbytes -= (now - self.since) * self.rate
        self.rate, self.since = rate, now
        return now + max(self.nbytes, 0.0) / rate


class Transit:
    """All ranks, each in its round, and the messages on their way."""

    def __init__(self, graph: LinkGraph, rounds: Sequence[Sequence[Traffics]], routes: Routes):
        self.graph, self.rounds, self.routes = graph, rounds, routes
        self.speed = [link.gb_per_s * 1e9 for link in graph.links]

    def run(self, chunk_bytes: float) -> float:
        """Return the time at which the last rank ends."""
        size, self.chunk_bytes = self.graph.size, chunk_bytes
        self.number, self.left, self.over = [0] * size, [0] * size, [0.0] * size
        self.posts: dict[tuple[int, int, int], float] = {}
        self.users: list[set[int]] = [set() for _ in self.speed]  # the transfers on each link
        self.chunks = [0] * len(self.speed)
        self.transfers: dict[int, Transfer] = {}
        self.ends: dict[int, float] = {}  # when each message's last byte passes, as things are
        # Ordered by time: the ends of messages, some of them out of date, and the ranks that a round is over for.
        self.ahead: list[tuple[float, int, int]] = []
        self.count = 0
        for rank in range(size):
            self.begin(rank, 0.0)
        while self.ahead:
            time, rank, number = heappop(self.ahead)
            if rank >= 0:
                self.finish(rank, time)
            elif self.ends.get(number) == time:
                self.end(number, time)
        assert all(number == len(own) for number, own in zip(self.number, self.rounds, strict=True)), "deadlock"
        return max(self.over)

    def begin(self, rank: int, now: float) -> None:
        """Post the messages of a rank's next round that has some."""
        own = self.rounds[rank]
        while self.number[rank] < len(own) and not own[self.number[rank]]:
            self.number[rank] += 1
        if self.number[rank] == len(own):
            return
        number = self.number[rank]
        self.left[rank] = len(own[number])
        for is_send, peer, chunks in own[number]:
            source, dest = (rank, peer) if is_send else (peer, rank)
            if (number, source, dest) in self.posts:
                del self.posts[number, source, dest]
                nbytes = chunks * self.chunk_bytes
                self.start(Transfer(source, dest, self.routes[source, dest], chunks, nbytes, now), now)
            else:
                self.posts[number, source, dest] = now

    def start(self, transfer: Transfer, now: float) -> None:
        """Let a message have its fraction of each link."""
        self.count += 1
        self.transfers[self.count] = transfer
        for index in transfer.path:
            self.users[index].add(self.count)
            self.chunks[index] += transfer.chunks
        self.divide(transfer.path, now)

    def end(self, number: int, now: float) -> None:
        """Let others have a message's fraction; it arrives after the latencies."""
        transfer = self.transfers.pop(number)
        del self.ends[number]
        for index in transfer.path:
            self.users[index].remove(number)
            self.chunks[index] -= transfer.chunks
        self.divide(transfer.path, now)
        arrival = now + sum(self.graph.links[index].us for index in transfer.path) * 1e-6
        for rank in (transfer.source, transfer.dest):
            heappush(self.ahead, (arrival, rank, 0))

    def divide(self, path: Path, now: float) -> None:
        """Divide the speed of some links anew among their messages."""
        for number in {number for index in path for number in self.users[index]}:
            transfer = self.transfers[number]
            rate = transfer.chunks * min(self.speed[index] / self.chunks[index] for index in transfer.path)
            if rate != transfer.rate:
                self.ends[number] = transfer.advance(now, rate)
                heappush(self.ahead, (self.ends[number], -1, number))

    def finish(self, rank: int, now: float) -> None:
        """Count one message less in a rank's round; end the round after the last."""
        self.left[rank] -= 1
        self.over[rank] = now
        if not self.left[rank]:
            self.number[rank] += 1
            self.begin(rank, now)
