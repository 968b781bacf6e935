"""Follows every rank and message of a collective through a network, one event after the other.

A rank goes on to its next round as soon as its own moves are over.  A message can go when both ranks are at it, and
both are done with it when it has come.  Between nodes it passes the way out of one and the way into the other, which
are the node's ranks' in common; each takes messages in the order in which they come to it, of those that come at once
the lower sender's first, and is free for the next one after `Network.gate`.  Inside a node, a rank sends one message
after the other, and takes one after the other.  What it folds and copies comes as in `collectives.schedule.cost`.
"""

from collections import defaultdict
from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np

from collectives.algorithms import Algorithm
from collectives.job.settings import size_in_words
from collectives.schedule.compressed import RankClass, RankPrograms
from collectives.schedule.cost import Network, Nodes
from collectives.schedule.draw import Bar, Diagram, MessageLine
from collectives.schedule.simulate.events import NOT_AT_IT, Code, Speeds, State, count_busy, follow


class Outcome(NamedTuple):
    """The times at which ranks ended, in seconds; and if recorded, what happened.

    `messages` has source, dest, round, and when it could go and had come; `rounds` has rank, round, begin and end.
    """

    ends: np.ndarray
    messages: list[tuple[int, int, int, float, float]]
    rounds: list[tuple[int, int, float, float]]

    @property
    def seconds(self) -> float:
        return float(self.ends.max(initial=0.0))


def simulate(
    row: Algorithm, nbytes: int, nodes: Nodes, network: Network, root: int = 0, record: bool = False
) -> Outcome:
    """Run an algorithm on a vector of `nbytes`, in chunks of one length.

    >>> from collectives.algorithms import find
    >>> from collectives.schedule.cost import Link
    >>> network = Network(within=Link(alpha_s=1e-6, beta_s_per_byte=1e-9), gamma_s_per_byte=5e-10)
    >>> outcome = simulate(find("all_reduce", "ring"), 4000, ((0, 1, 2, 3),), network)
    >>> print(f"{outcome.seconds * 1e6:.1f} us")
    13.5 us
    """
    return Simulation(RankPrograms(row, nodes, root), network.cores).run(nbytes, network, record)


class Simulation:
    """An algorithm on some ranks, to be run with vectors of any length."""

    def __init__(self, programs: RankPrograms, cores: float, guess: bool = True):
        self.programs, self.cores = programs, cores
        self.encode(guess)

    def encode(self, guess: bool) -> None:
        """Encode the families that the programs seem to have, or each rank's own program."""
        self.guess, programs, nodes = guess, self.programs, self.programs.nodes
        self.code = encode(list(programs.families() if guess else programs.singles()), nodes)
        if max(map(len, nodes)) > self.cores:
            busy = np.zeros((len(nodes), max(programs.of(0).ends, default=0)), np.int32)
            count_busy(self.code, busy)
            self.code = self.code._replace(crowds=np.maximum(1.0, busy / self.cores))

    def run(self, nbytes: int, network: Network, record: bool = False) -> Outcome:
        size = self.programs.size
        state = start(self.code, len(self.programs.nodes))
        ended, messages, rounds = follow(self.code, speeds(network, nbytes / size), state, record)
        if ended < size and self.guess:  # which was wrong
            self.encode(guess=False)
            return self.run(nbytes, network, record)
        if ended < size:
            stuck = int(np.argmax(state.at[:, 0] < self.code.ends))
            raise UnmatchedError(
                f"{self.programs.row.name} on {size} ranks: rank {stuck} waits for ever in round {state.round[stuck]}"
            )
        return Outcome(state.clock, messages, rounds)


class UnmatchedError(AssertionError):
    """A schedule has messages without counterparts."""


def encode(families: Sequence[RankClass], nodes: Nodes) -> Code:
    size = sum(map(len, nodes))
    nth, begins, ends, node_of = (np.zeros(shape, np.int64) for shape in (size, (size, 2), size, size))
    place = np.zeros(2, np.int64)
    for family in families:
        ranks = np.asarray(family.ranks)
        nth[ranks], begins[ranks] = np.arange(len(ranks)), place
        place += len(family.structure), len(family.numbers)
        ends[ranks] = place[0]
    for number, node in enumerate(nodes):
        node_of[list(node)] = number
    structure, numbers, slopes = (
        np.fromiter(chain.from_iterable(part), np.int64)
        for part in zip(*((f.structure, f.numbers, f.slopes) for f in families), strict=True)
    )
    return Code(structure, numbers, slopes, nth, begins, ends, node_of, np.zeros((0, 0)))


def speeds(network: Network, chunk_bytes: float) -> Speeds:
    within, between, gate = network.within, network.between, network.gate
    return Speeds(
        alpha=within.alpha_s,
        beta=within.beta_s_per_byte * chunk_bytes,
        far_alpha=between.alpha_s,
        far_beta=between.beta_s_per_byte * chunk_bytes,
        gate_alpha=gate.alpha_s,
        gate_beta=gate.beta_s_per_byte * chunk_bytes,
        fold=network.gamma_s_per_byte * chunk_bytes,
        fold_late=max(0.0, network.gamma_s_per_byte - between.beta_s_per_byte) * chunk_bytes,
        segment=network.segment_bytes / chunk_bytes if chunk_bytes else np.inf,
        copy=network.copy_s_per_byte * chunk_bytes,
        meet=float(network.meet_s),
    )


def start(code: Code, num_nodes: int) -> State:
    size = len(code.nth)
    clock, began, over = np.zeros((3, size))
    round_, pending, waiting = np.zeros((3, size), np.int64)
    folds, ports, gates, arrivals = (np.zeros(shape) for shape in ((size, 2), (2, size), (2, num_nodes), (size, 2)))
    waiting[:] = NOT_AT_IT
    return State(code.begins.copy(), round_, clock, waiting, began, over, pending, folds, ports, gates, arrivals)


def plan_diagram(row: Algorithm, nbytes: int, nodes: Nodes, network: Network, root: int = 0) -> Diagram:
    """Diagram what a simulation predicts, message by message."""
    outcome = simulate(row, nbytes, nodes, network, root, record=True)
    lines = [MessageLine(source, dest, begin, end) for source, dest, _, begin, end in outcome.messages]
    title = f"{row.collective} {row.name}, {size_in_words(nbytes)}: planned, {outcome.seconds * 1e6:.0f} us"
    return Diagram(title, len(outcome.ends), bars(outcome), lines)


def bars(outcome: Outcome) -> list[Bar]:
    """List what each rank does in each round: first its messages, if it has any, then its reductions."""
    last: dict[tuple[int, int], float] = defaultdict(float)  # when the last message of a rank's round has come
    for source, dest, number, _, end in outcome.messages:
        for rank in (source, dest):
            last[rank, number] = max(last[rank, number], end)
    rounds = []
    for rank, number, begin, end in outcome.rounds:
        middle = last.get((rank, number))
        if middle is None:
            rounds.append(Bar(rank, begin, end, "work"))
        else:
            rounds += [Bar(rank, begin, middle, "wait"), Bar(rank, middle, end, "fold")]
    return [bar for bar in rounds if bar.end > bar.begin]
