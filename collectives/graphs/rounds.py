"""Rounds as data: the messages of trees, in an order that keeps every link busy.

A message may go in a round if what it carries arrived in an earlier one.  A round lasts as long as the slowest link
takes for a chunk, and every link carries as many chunks as it can in that time; of the messages that wait for a link,
those with the longest way still ahead of their chunk are first.
"""

import random
from bisect import insort
from collections.abc import Iterable, Sequence
from heapq import heapify, heappop, heappush
from itertools import groupby
from typing import NamedTuple

from collectives.graphs.graph import Path
from collectives.graphs.trees import Forest, SpanningTree
from collectives.schedule.moves import MESSAGES, Move, Recv, RecvReduce, Round, Send

Pair = tuple[int, int]  # the source and the dest of messages
Item = tuple[int, int, int]  # of a queue: wave, height, and number of a message

SLACK = 1e-6
ALMOST = 1 - SLACK  # of a chunk, which rounding errors leave


class Carry(NamedTuple):
    """A message of one chunk along one edge of a tree."""

    chunk: int
    source: int
    dest: int
    reduces: bool
    path: Path


class Dag:
    """The messages of all chunks, with those that each one waits for."""

    def __init__(self, forest: Forest):
        self.forest = forest
        self.messages: list[Carry] = []
        self.after: list[list[int]] = []  # the messages that wait for each one
        self.waits: list[int] = []  # how many each one waits for
        self.waves: list[int] = []
        self.wave = 0

    def add(self, chunk: int, wave: int, down: SpanningTree, up: SpanningTree | None = None) -> None:
        """Add a chunk that goes down a tree from its root, after its sum has come up another one."""
        self.wave = wave
        arrivals = self._ascend(chunk, up) if up else []
        children: dict[int, list[int]] = {}
        for parent, child in down.edges():
            children.setdefault(parent, []).append(child)
        ahead = [(down.root, arrivals)]
        while ahead:
            rank, before = ahead.pop()
            ahead += [
                (child, [self._append(chunk, rank, child, False, down, before)]) for child in children.get(rank, [])
            ]

    def _ascend(self, chunk: int, up: SpanningTree) -> list[int]:
        """Add the messages of a sum; return those that reach the root."""
        ranks = sorted(range(self.forest.size), key=up.depth, reverse=True)
        arrivals: dict[int, list[int]] = {rank: [] for rank in ranks}
        for rank in ranks[:-1]:
            parent = up.parents[rank]
            arrivals[parent].append(self._append(chunk, rank, parent, True, up, arrivals[rank]))
        return arrivals[up.root]

    def _append(
        self, chunk: int, source: int, dest: int, reduces: bool, tree: SpanningTree, before: Iterable[int]
    ) -> int:
        path = self.forest.path(tree, dest, source) if reduces else self.forest.path(tree, source, dest)
        number = len(self.messages)
        self.messages.append(Carry(chunk, source, dest, reduces, path))
        self.after.append([])
        self.waves.append(self.wave)
        self.waits.append(0)
        for other in before:
            self.after[other].append(number)
            self.waits[number] += 1
        return number

    def loads(self) -> list[int]:
        """Return the number of messages on each link."""
        loads = [0] * len(self.forest.load)
        for message in self.messages:
            for index in message.path:
                loads[index] += 1
        return loads

    @property
    def has_shared_links(self) -> bool:
        """Whether messages between different pairs of ranks compete for a link."""
        return any(len(message.path) > 1 for message in self.messages)

    def heights(self) -> list[int]:
        """Return the number of messages on the longest way ahead of each one; messages wait for earlier numbers."""
        heights = [0] * len(self.messages)
        for number in reversed(range(len(heights))):
            heights[number] = 1 + max((heights[other] for other in self.after[number]), default=0)
        return heights


class Order(NamedTuple):
    """How the messages that wait for a link are ordered, and how often another order of equals is tried."""

    by_wave: bool = False  # chunks of a wave before those of the next; else the longest way ahead first
    tries: int = 1


HEIGHT, WAVE = Order(), Order(by_wave=True)
SHUFFLED = Order(tries=8), Order(by_wave=True, tries=8)


class Planner:
    """A round after the other, from what the links can carry."""

    def __init__(self, dag: Dag, order: Order = HEIGHT, one_each: bool = False):
        self.dag, self.order, self.one_each = dag, order, one_each  # one_each: a rank sends a chunk once in a round
        self.heights, self.waits = dag.heights(), list(dag.waits)
        s_per_chunk, self.load = dag.forest.s_per_chunk, dag.loads()
        round_s = max(each for each, load in zip(s_per_chunk, self.load, strict=True) if load)
        self.rate = [round_s / each for each in s_per_chunk]
        self.most = [-(-(rate - SLACK) // 1) for rate in self.rate]
        self.credit = [0.0] * len(self.rate)
        self.draw = random.Random(0)  # the same on all ranks
        self.ready: dict[Pair, list[Item]] = {}
        for number, waits in enumerate(self.waits):
            if not waits:
                self.enqueue(number)

    def enqueue(self, number: int) -> None:
        message = self.dag.messages[number]
        wave = self.dag.waves[number] if self.order.by_wave else 0
        insort(self.ready.setdefault((message.source, message.dest), []), (wave, -self.heights[number], number))

    def rounds(self) -> list[list[Carry]]:
        """Return the messages of each round."""
        rounds, left = [], len(self.waits)
        while left:
            numbers = self.next_round()
            left -= len(numbers)
            for other in (other for number in numbers for other in self.dag.after[number]):
                self.waits[other] -= 1
                if not self.waits[other]:
                    self.enqueue(other)
            rounds.append([self.dag.messages[number] for number in numbers])
        return rounds

    def next_round(self) -> list[int]:
        """Choose messages until no link has room for more: of some tries those on the links with most ahead."""
        for index, most in enumerate(self.most):
            self.credit[index] = min(self.credit[index] + self.rate[index], most)
        before, tries = self.credit, []
        for number in range(self.order.tries):
            self.credit = list(before)
            numbers = self.choose(shuffled=number > 0)
            tries.append((sum(map(self.urgency, numbers)), -number, numbers, self.credit))
        *_, numbers, self.credit = max(tries)
        chosen = set(numbers)
        for number in numbers:
            for index in self.dag.messages[number].path:
                self.load[index] -= 1
        for pair in {self.dag.messages[number][1:3] for number in numbers}:
            self.ready[pair] = [item for item in self.ready[pair] if item[-1] not in chosen]
        return numbers

    def urgency(self, number: int) -> float:
        """Return the rounds for which a message's busiest link has work."""
        return max(self.load[index] / self.rate[index] for index in self.dag.messages[number].path)

    def choose(self, shuffled: bool) -> list[int]:
        """Choose messages, always the first of those that wait for any link, as long as one has room."""
        room = RoundRoom(self.one_each)
        queues = {pair: queue for pair, queue in self.ready.items() if queue}
        turn = self.draw.random if shuffled else float
        ahead = [(turn(), queue[0], pair, 0) for pair, queue in queues.items()]
        heapify(ahead)
        chosen: list[int] = []
        while ahead:
            _, (*_, number), pair, at = heappop(ahead)
            message = self.dag.messages[number]
            if any(self.credit[index] < ALMOST for index in message.path):
                continue  # and so for the others of the pair
            if room.take(message):
                chosen.append(number)
                for index in message.path:
                    self.credit[index] -= 1
            if at + 1 < len(queues[pair]):
                heappush(ahead, (turn(), queues[pair][at + 1], pair, at + 1))
        return chosen


class RoundRoom:
    """What a round holds so far, as far as it keeps more messages out."""

    def __init__(self, one_each: bool):
        self.one_each = one_each
        self.busy: set[tuple[bool, int, int]] = set()  # sums that a rank adds to, or chunks that it sends
        self.chunks: dict[tuple[int, int, bool], set[int]] = {}
        self.num_runs: dict[Pair, int] = {}

    def take(self, message: Carry) -> bool:
        """Take a message, if the round stays valid."""
        pair = message.source, message.dest
        claim = (True, message.dest, message.chunk) if message.reduces else (False, message.source, message.chunk)
        if claim in self.busy and (message.reduces or self.one_each):
            return False
        chunks = self.chunks.setdefault((*pair, message.reduces), set())
        runs = self.num_runs.get(pair, 0) + 1 - (message.chunk - 1 in chunks) - (message.chunk + 1 in chunks)
        if runs > MESSAGES:
            return False
        self.busy.add(claim)
        chunks.add(message.chunk)
        self.num_runs[pair] = runs
        return True


def moves_of(rounds: Sequence[Sequence[Carry]], size: int) -> list[list[Round]]:
    """Return each rank's rounds: a send and a receive for every run of adjacent chunks between two ranks."""
    schedules: list[list[Round]] = [[] for _ in range(size)]
    for messages in rounds:
        moves: list[list[Move]] = [[] for _ in range(size)]
        ordered = sorted(messages, key=lambda message: (message.source, message.dest, message.reduces, message.chunk))
        for (source, dest, reduces), group in groupby(ordered, key=lambda message: message[1:4]):
            for run in runs_of_chunks([message.chunk for message in group]):
                moves[source].append(Send(dest, run))
                moves[dest].append(RecvReduce(source, run) if reduces else Recv(source, run))
        for rank, own in enumerate(moves):
            schedules[rank].append(tuple(own))
    return schedules


def runs_of_chunks(chunks: Sequence[int]) -> list[range]:
    """Join increasing chunks that are adjacent.

    >>> runs_of_chunks([1, 2, 4])
    [range(1, 3), range(4, 5)]
    """
    runs: list[range] = []
    for chunk in chunks:
        if runs and runs[-1].stop == chunk:
            runs[-1] = range(runs[-1].start, chunk + 1)
        else:
            runs.append(range(chunk, chunk + 1))
    return runs
