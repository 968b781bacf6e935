"""Times of messages between neighbouring hosts, measured between two steps of a run."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import numpy as np

import collectives
from parallelism.mesh import MeshShape
from training.reports.finding import HealthFinding

NUM_BYTES = 256 * 1024
REPEATS = 3
SLOW = 2.0  # time of a message, as a multiple of that of the fastest quarter of the links, or of its own least

Pair = tuple[int, int]


def neighbouring_hosts(layout: MeshShape, hosts: Sequence[str]) -> list[Pair]:
    """Return a pair of ranks for each two hosts that have neighbours along an axis.

    >>> from parallelism.mesh import mesh_shape
    >>> neighbouring_hosts(mesh_shape(4, dp=2, tp=2), ["a", "a", "b", "b"])
    [(0, 2)]
    """
    rings = [ranks for axis in layout.disjoint for ranks in layout.groups(axis)]
    edges = sorted(
        (min(edge), max(edge)) for ranks in rings for edge in zip(ranks, [*ranks[1:], ranks[0]], strict=True)
    )
    pairs = {frozenset(hosts[rank] for rank in edge): edge for edge in reversed(edges)}
    return sorted(edge for names, edge in pairs.items() if len(names) > 1)


def rounds(pairs: Sequence[Pair], hosts: Sequence[str]) -> list[list[Pair]]:
    """Arrange pairs in rounds in which each host has one pair at most.

    >>> rounds([(0, 1), (0, 2), (1, 2), (2, 3)], ["a", "b", "c", "d"])
    [[(0, 1), (2, 3)], [(0, 2)], [(1, 2)]]
    """
    arranged: list[list[Pair]] = []
    for pair in pairs:
        ends = {hosts[rank] for rank in pair}
        free = (each for each in arranged if ends.isdisjoint(hosts[rank] for other in each for rank in other))
        if (selected := next(free, None)) is None:
            arranged.append(selected := [])
        selected.append(pair)
    return arranged


class Links:
    """Links between neighbouring hosts, and the least time in which a message has gone over each."""

    def __init__(self, layout: MeshShape, hosts: Sequence[str]):
        self.hosts = hosts
        self.rounds = rounds(neighbouring_hosts(layout, hosts), hosts)
        self.pairs = [pair for each in self.rounds for pair in each]
        self.least_s = np.full(len(self.pairs), np.inf)

    def measure(self, comm: collectives.Communicator) -> np.ndarray:
        """Return the seconds of a message of 256 KiB over each link.  Collective.

        Cost: 3 such messages each way for each of a host's neighbours.
        """
        seconds, message = np.zeros(len(self.pairs)), np.zeros(NUM_BYTES, np.uint8)
        for pairs in self.rounds:
            comm.barrier()
            for pair in pairs:
                if comm.rank in pair:
                    seconds[self.pairs.index(pair)] = exchange_s(comm, pair, message)
        return np.asarray(comm.all_reduce(seconds, op="max"))

    def slow(self, seconds: np.ndarray) -> Iterator[HealthFinding]:
        """Yield a finding for each slow link, or for a host all of whose links are slow while others are not."""
        usual_s, self.least_s = np.sort(seconds)[(len(seconds) - 1) // 4], np.minimum(self.least_s, seconds)
        by_others = dict(zip(self.pairs, seconds / usual_s, strict=True))
        by_past = dict(zip(self.pairs, seconds / self.least_s, strict=True))
        slow = {pair for pair in self.pairs if max(by_others[pair], by_past[pair]) >= SLOW}

        def finding(ranks: tuple[int, ...], what: str, pairs: Sequence[Pair]) -> HealthFinding:
            times, than = min(by_others[pair] for pair in pairs), "those between other hosts"
            if times < SLOW:
                times, than = min(by_past[pair] for pair in pairs), "before"
            words = f"messages {what} take {times:.1f} times as long as {than}"
            return HealthFinding("link", ranks, words, f"messages {what} are fast again")

        for host, pairs in self.pairs_of().items():
            if len(pairs) > 1 and slow.issuperset(pairs) and len(slow) < len(self.pairs):
                ranks = tuple(rank for rank, name in enumerate(self.hosts) if name == host)
                yield finding(ranks, f"from and to {host}", pairs)
                slow = slow.difference(pairs)
        for pair in sorted(slow):
            yield finding(pair, "between {} and {}".format(*(self.hosts[rank] for rank in pair)), [pair])

    def pairs_of(self) -> dict[str, list[Pair]]:
        """Return the pairs of each host."""
        return {
            host: [p for p in self.pairs if host in (self.hosts[r] for r in p)] for host in dict.fromkeys(self.hosts)
        }


def exchange_s(comm: collectives.Communicator, pair: Pair, message: np.ndarray) -> float:
    """Return the seconds of a message between this rank and the other one of a pair, the least of some."""
    first, second = pair
    times = []
    for _ in range(REPEATS):
        begin_s = time.perf_counter()
        if comm.rank == first:
            comm.send(message, second)
            comm.recv(message, second)
        else:
            comm.recv(message, first)
            comm.send(message, first)
        times.append((time.perf_counter() - begin_s) / 2)
    return min(times)
