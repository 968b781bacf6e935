"""Follows every rank and message of a collective through a network, one event after the other.

A rank goes on to its next round as soon as its own moves are over.  A message can go when both ranks are at it, and
both are done with it when it has come.  Between nodes it passes the way out of one and the way into the other, which
are the node's ranks' in common; each takes messages in the order in which they come to it, of those that come at once
the lower sender's first, and is free for the next one after `Network.gate`.  Inside a node, a rank sends one message
after the other, and takes one after the other.  What it folds and copies comes as in `collectives.cost`.
"""

from collections.abc import Iterable, Sequence
from heapq import heappop, heappush
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from numba import njit

from collectives.algorithms import Algorithm
from collectives.algorithms.counterparts import Groups
from collectives.cost import Network, Nodes
from collectives.programs import Family, Programs

OUT, IN = 0, 1  # what an event waits for: the way out, or in
NOT_AT_IT = -1


class Code(NamedTuple):
    """All ranks' programs: `structure` and `numbers` of the families one after the other, and each rank's place."""

    structure: np.ndarray
    numbers: np.ndarray
    slopes: np.ndarray
    nth: np.ndarray  # in its family
    begins: np.ndarray  # (rank, 2): where its family's structure and numbers begin
    ends: np.ndarray  # where its family's structure ends
    node_of: np.ndarray
    crowds: np.ndarray  # (node, round): how many times slower the ranks are that share cores; empty where none do


class Speeds(NamedTuple):
    """Seconds, of a message and of a chunk."""

    alpha: float
    beta: float
    far_alpha: float
    far_beta: float
    gate_alpha: float
    gate_beta: float
    fold: float
    fold_late: float  # of what has come from another node, beyond `segment` chunks
    segment: float
    copy: float
    meet: float


class State(NamedTuple):
    """Where each rank is."""

    at: np.ndarray  # (rank, 2): its stretch's structure and numbers
    round: np.ndarray
    clock: np.ndarray  # when it began the round, and at last, when it ended
    waiting: np.ndarray  # the round whose messages it waits for
    began: np.ndarray  # these
    over: np.ndarray  # when the last of those that have come did
    pending: np.ndarray
    near: np.ndarray  # (2, rank): messages in the round to, and from, ranks of the node
    folds: np.ndarray  # (rank, 2): chunks to be folded from its node and from others
    ports: np.ndarray  # (2, rank): when it can send, or take, the next message inside the node
    gates: np.ndarray  # (2, node): when the way out, or in, is free
    met: np.ndarray  # (first rank of those who meet, 2): how many have come, and when the last did


class Log(NamedTuple):
    """What happened, as far as there is room for it; `noted` counts messages and rounds."""

    messages: np.ndarray
    rounds: np.ndarray
    noted: np.ndarray


class Outcome(NamedTuple):
    """When each rank ended, in seconds; and if asked for, what happened.

    `messages` has source, dest, round, and when it could go and had come; `rounds` has rank, round, begin and end.
    """

    ends: np.ndarray
    messages: np.ndarray
    rounds: np.ndarray

    @property
    def seconds(self) -> float:
        return float(self.ends.max(initial=0.0))


def simulate(
    row: Algorithm,
    nbytes: int,
    nodes: Nodes,
    network: Network,
    root: int = 0,
    groups: Groups | None = None,
    record: bool = False,
) -> Outcome:
    """Run an algorithm on a vector of `nbytes`, in chunks of one length.

    >>> from collectives.algorithms import find
    >>> from collectives.cost import Link
    >>> network = Network(within=Link(alpha_s=1e-6, beta_s_per_byte=1e-9), gamma_s_per_byte=5e-10)
    >>> outcome = simulate(find("all_reduce", "ring"), 4000, ((0, 1, 2, 3),), network)
    >>> print(f"{outcome.seconds * 1e6:.1f} us")
    13.5 us
    """
    return prepare(Programs(row, nodes, root, groups), network.cores).run(nbytes, network, record)


class Simulation:
    """An algorithm on some ranks, to be run with vectors of any length."""

    def __init__(self, programs: Programs, families: Iterable[Family], cores: int):
        self.programs, self.code = programs, encode(list(families), programs.nodes)
        longest = max(map(len, programs.nodes))
        if longest > cores:
            num_rounds = programs.of(0).ends[-1] if programs.of(0).ends else 0
            busy = count_busy(self.code, np.zeros((len(programs.nodes), num_rounds), np.int32))
            self.code = self.code._replace(crowds=np.maximum(1.0, busy / cores))

    def run(self, nbytes: int, network: Network, record: bool = False) -> Outcome:
        size = self.programs.size
        state = start(self.code, len(self.programs.nodes))
        num_messages, num_rounds = count_moves(self.code) if record else (0, 0)
        log = Log(np.zeros((num_messages, 5)), np.zeros((num_rounds, 4)), np.zeros(2, np.int64))
        ended = follow(self.code, speeds(network, nbytes / size), state, log)
        if ended < size:
            stuck = int(np.argmax(state.at[:, 0] < self.code.ends))
            raise UnmatchedError(
                f"{self.programs.row.name} on {size} ranks: rank {stuck} waits for ever in round {state.round[stuck]}"
            )
        return Outcome(state.clock, log.messages, log.rounds[: log.noted[1]])


class UnmatchedError(AssertionError):
    """Messages without counterparts: the schedule is wrong, or the guess which ranks do alike."""


def prepare(programs: Programs, cores: int) -> Simulation:
    """The families that programs seem to have, if all their messages meet; else each rank's own program."""
    simulation = Simulation(programs, programs.families(), cores)
    try:
        simulation.run(0, Network(cores=cores))
    except UnmatchedError:
        return Simulation(programs, programs.singles(), cores)
    return simulation


def encode(families: Sequence[Family], nodes: Nodes) -> Code:
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
    near = np.zeros((2, size), np.int64)
    folds, ports, gates, met = (np.zeros(shape) for shape in ((size, 2), (2, size), (2, num_nodes), (size, 2)))
    waiting[:] = NOT_AT_IT
    return State(code.begins.copy(), round_, clock, waiting, began, over, pending, near, folds, ports, gates, met)


compiled: Any = njit(cache=True)


@compiled
def number(code: Code, rank: int, at: int) -> int:
    return code.numbers[at] + code.nth[rank] * code.slopes[at]


@compiled
def find_stretch(code: Code, state: State, rank: int) -> bool:
    """Move on to the stretch of the rank's round; whether there is one."""
    while state.at[rank, 0] < code.ends[rank]:
        structure, numbers = state.at[rank]
        num_messages, num_meets = code.structure[structure], code.structure[structure + 1]
        end = number(code, rank, numbers)
        idle = not (num_messages or num_meets or number(code, rank, numbers + 1) or number(code, rank, numbers + 2))
        if state.round[rank] < end and not idle:
            return True
        state.round[rank] = end
        state.at[rank, 0] += 2 + num_messages
        state.at[rank, 1] += 3 + 3 * num_messages + num_meets
    return False


@compiled
def crowd(code: Code, state: State, rank: int) -> float:
    return code.crowds[code.node_of[rank], state.round[rank]] if len(code.crowds) else 1.0


@compiled
def count_busy(code: Code, busy):
    """How many ranks of each node have something to do in each round."""
    for rank in range(len(code.nth)):
        structure, numbers = code.begins[rank]
        begin = 0
        while structure < code.ends[rank]:
            num_messages, num_meets = code.structure[structure], code.structure[structure + 1]
            end = number(code, rank, numbers)
            if num_messages or num_meets or number(code, rank, numbers + 1) or number(code, rank, numbers + 2):
                busy[code.node_of[rank], begin:end] += 1
            begin, structure, numbers = end, structure + 2 + num_messages, numbers + 3 + 3 * num_messages + num_meets
    return busy


@compiled
def count_moves(code: Code):
    """The messages of all ranks, and their rounds that are not empty."""
    messages, rounds = 0, 0
    for rank in range(len(code.nth)):
        structure, numbers = code.begins[rank]
        begin = 0
        while structure < code.ends[rank]:
            num_messages, num_meets = code.structure[structure], code.structure[structure + 1]
            end = number(code, rank, numbers)
            messages += (end - begin) * code.structure[structure + 2 : structure + 2 + num_messages].sum()
            rounds += end - begin
            begin, structure, numbers = end, structure + 2 + num_messages, numbers + 3 + 3 * num_messages + num_meets
    return messages, rounds


@compiled
def follow(code: Code, speeds: Speeds, state: State, log: Log) -> int:
    """Run all ranks as far as they get; returns how many get to the end."""
    events = [(0.0, OUT, 0, 0, 0.0, 0.0)]  # time, way, source, dest, chunks, of which folded
    events.pop()
    going = list(range(len(code.nth) - 1, -1, -1))
    ended = 0
    while going or events:
        if going:
            rank = going.pop()
            if find_stretch(code, state, rank):
                begin_round(code, speeds, state, rank, events, going, log)
            else:
                ended += 1
        else:
            event = heappop(events)
            done = pass_gate(code, speeds, state, event, events)
            if done >= 0:
                arrive(code, speeds, state, event, done, going, log)
    return ended


@compiled
def begin_round(code: Code, speeds: Speeds, state: State, rank: int, events, going, log: Log) -> None:
    """What the rank does by itself, and then its messages, as far as their other ranks are at them."""
    structure, numbers = state.at[rank]
    num_messages, num_meets = code.structure[structure], code.structure[structure + 1]
    copied, folded = number(code, rank, numbers + 1), number(code, rank, numbers + 2)
    now = state.clock[rank] + crowd(code, state, rank) * (copied * speeds.copy + folded * speeds.fold)
    if num_meets:
        meet(code, speeds, state, rank, now, numbers + 3 + 3 * num_messages, num_meets, going, log)
    elif num_messages == 0:
        end_round(state, rank, now, going, log)
    else:
        state.waiting[rank], state.pending[rank] = state.round[rank], num_messages
        state.began[rank] = state.over[rank] = now
        state.near[:, rank] = 0
        for nth in range(num_messages):
            peer = (rank + number(code, rank, numbers + 3 + 3 * nth)) % len(code.nth)
            if code.node_of[peer] == code.node_of[rank]:
                state.near[OUT if code.structure[structure + 2 + nth] else IN, rank] += 1
        for nth in range(num_messages):
            at = numbers + 3 + 3 * nth
            is_send = code.structure[structure + 2 + nth]
            peer = (rank + number(code, rank, at)) % len(code.nth)
            if state.waiting[peer] == state.round[rank]:
                chunks, folded = number(code, rank, at + 1), number(code, rank, at + 2)
                found, theirs = counterpart(code, state, peer, rank, is_send, chunks)
                if found:
                    source, dest = (rank, peer) if is_send else (peer, rank)
                    ready = max(now, state.began[peer])
                    event = (ready, OUT, source, dest, float(chunks), float(folded + theirs))
                    if (
                        code.node_of[source] == code.node_of[dest]
                        and state.near[OUT, source] * state.near[IN, dest] == 1
                    ):
                        arrive(code, speeds, state, event, ready + inside_s(code, speeds, state, event), going, log)
                    else:
                        heappush(events, event)


@compiled
def inside_s(code: Code, speeds: Speeds, state: State, event) -> float:
    _, _, source, _, chunks, _ = event
    return crowd(code, state, source) * (speeds.alpha + chunks * speeds.beta)


@compiled
def counterpart(code: Code, state: State, rank: int, peer: int, is_send: int, chunks: int):
    """Whether a rank takes what the peer sends, or sends what it takes; and how much of it the rank folds."""
    structure, numbers = state.at[rank]
    for nth in range(code.structure[structure]):
        at = numbers + 3 + 3 * nth
        same_peer = (rank + number(code, rank, at)) % len(code.nth) == peer
        if same_peer and code.structure[structure + 2 + nth] != is_send and number(code, rank, at + 1) == chunks:
            return True, number(code, rank, at + 2)
    return False, 0


@compiled
def meet(code: Code, speeds: Speeds, state: State, rank: int, now: float, at: int, num_meets: int, going, log) -> None:
    """Arrive; the last one lets all go on."""
    first = rank + number(code, rank, at)
    state.met[first, 0] += 1
    state.met[first, 1] = max(state.met[first, 1], now)
    if state.met[first, 0] == num_meets:
        end = state.met[first, 1] + crowd(code, state, rank) * speeds.meet
        state.met[first] = 0
        for nth in range(num_meets):
            end_round(state, rank + number(code, rank, at + nth), end, going, log)


@compiled
def pass_gate(code: Code, speeds: Speeds, state: State, event, events) -> float:
    """Bring a message to the way in, or over it; returns when it has come, or a number below 0."""
    time, way, source, dest, chunks, folded = event
    nodes = code.node_of[source], code.node_of[dest]
    if nodes[0] == nodes[1]:
        takes = inside_s(code, speeds, state, event)
        gates, at, keeps = state.ports, source if way == OUT else dest, takes
    else:
        takes = speeds.far_alpha + chunks * speeds.far_beta
        gates, at, keeps = state.gates, nodes[way], speeds.gate_alpha + chunks * speeds.gate_beta
    begin = max(time, gates[way, at])
    gates[way, at] = begin + keeps
    if way == IN:
        return begin + takes
    heappush(events, (begin, IN, source, dest, chunks, folded))
    return -1.0


@compiled
def arrive(code: Code, speeds: Speeds, state: State, event, done: float, going, log: Log) -> None:
    """A message has come; a rank that has no other to wait for folds and goes on."""
    _, _, source, dest, _, folded = event
    if log.noted[0] < len(log.messages):
        ready = max(state.began[source], state.began[dest])
        line = log.messages[log.noted[0]]
        line[0], line[1], line[2], line[3], line[4] = source, dest, state.round[source], ready, done
        log.noted[0] += 1
    state.folds[dest, 0 if code.node_of[source] == code.node_of[dest] else 1] += folded
    for rank in (source, dest):
        state.over[rank] = max(state.over[rank], done)
        state.pending[rank] -= 1
        if state.pending[rank] == 0:
            state.waiting[rank] = NOT_AT_IT
            end_round(state, rank, state.over[rank] + folding(code, speeds, state, rank), going, log)
            state.folds[rank] = 0.0


@compiled
def folding(code: Code, speeds: Speeds, state: State, rank: int) -> float:
    near, far = state.folds[rank]
    late = max(0.0, far - speeds.segment)
    return crowd(code, state, rank) * ((near + far - late) * speeds.fold + late * speeds.fold_late)


@compiled
def end_round(state: State, rank: int, end: float, going, log: Log) -> None:
    if log.noted[1] < len(log.rounds):
        line = log.rounds[log.noted[1]]
        line[0], line[1], line[2], line[3] = rank, state.round[rank], state.clock[rank], end
        log.noted[1] += 1
    state.clock[rank] = end
    state.round[rank] += 1
    going.append(rank)
