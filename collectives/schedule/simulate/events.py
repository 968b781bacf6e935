"""The compiled half of a simulation: ranks, messages and what they wait for.  See exact.py for what it simulates.

Numba keeps what it compiles on disk.
"""

from heapq import heappop, heappush
from typing import Any, NamedTuple

import numpy as np
from numba import njit

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
    """The progress of each rank."""

    at: np.ndarray  # (rank, 2): its stretch's structure and numbers
    round: np.ndarray
    clock: np.ndarray  # when it began the round, and at last, when it ended
    waiting: np.ndarray  # the round whose messages it waits for
    began: np.ndarray  # these
    over: np.ndarray  # when the last of those that have come did
    pending: np.ndarray
    folds: np.ndarray  # (rank, 2): chunks to be folded from its node and from others
    ports: np.ndarray  # (2, rank): when it can send, or take, the next message inside the node
    gates: np.ndarray  # (2, node): when the way out, or in, is free
    arrivals: np.ndarray  # (first rank of those who meet, 2): how many have come, and when the last did


compiled: Any = njit(cache=True, no_cfunc_wrapper=True)  # what Python calls
inner: Any = njit(no_cpython_wrapper=True, no_cfunc_wrapper=True)  # what that calls: wrappers are half of compiling


@inner
def number(code: Code, rank: int, at: int) -> int:
    return code.numbers[at] + code.nth[rank] * code.slopes[at]


@inner
def peer_at(code: Code, rank: int, at: int) -> int:
    peer = rank + number(code, rank, at)
    return peer if 0 <= peer < len(code.nth) else peer % len(code.nth)  # a remainder takes its time


@inner
def is_busy(code: Code, rank: int, structure: int, numbers: int) -> bool:
    """Say whether the rank has messages, barriers, copies or folds in a stretch."""
    has_moves = code.structure[structure] or code.structure[structure + 1]
    return bool(has_moves or number(code, rank, numbers + 1) or number(code, rank, numbers + 2))


@inner
def find_stretch(code: Code, state: State, rank: int) -> bool:
    """Move on to the stretch of the rank's round; return whether there is one."""
    while state.at[rank, 0] < code.ends[rank]:
        structure, numbers = state.at[rank]
        end = number(code, rank, numbers)
        if state.round[rank] < end and is_busy(code, rank, structure, numbers):
            return True
        state.round[rank] = end
        num_messages, num_meets = code.structure[structure], code.structure[structure + 1]
        state.at[rank, 0] += 2 + num_messages
        state.at[rank, 1] += 4 + 3 * num_messages + num_meets
    return False


@inner
def crowd(code: Code, state: State, rank: int) -> float:
    """Look up how many times slower the rank is in its round, as others share its core."""
    return code.crowds[code.node_of[rank], state.round[rank]] if len(code.crowds) else 1.0


@compiled
def count_busy(code: Code, busy) -> None:
    """Count in (node, round) the ranks that have something to do."""
    for rank in range(len(code.nth)):
        structure, numbers = code.begins[rank]
        begin = 0
        while structure < code.ends[rank]:
            num_messages, num_meets = code.structure[structure], code.structure[structure + 1]
            end = number(code, rank, numbers)
            if is_busy(code, rank, structure, numbers):
                busy[code.node_of[rank], begin:end] += 1
            begin, structure, numbers = end, structure + 2 + num_messages, numbers + 4 + 3 * num_messages + num_meets


@compiled
def follow(code: Code, speeds: Speeds, state: State, record: bool):
    """Run all ranks as far as they get; return how many get to the end, and if asked for, messages and rounds."""
    messages, rounds = [(0, 0, 0, 0.0, 0.0)], [(0, 0, 0.0, 0.0)]  # which have types by their first entries
    log = (record, messages, rounds)
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
                _, _, source, dest, _, folded = event
                arrive(code, speeds, state, source, dest, folded, done, going, log)
    return ended, messages[1:], rounds[1:]


@inner
def begin_round(code: Code, speeds: Speeds, state: State, rank: int, events, going, log) -> None:
    """Do the rank's own work, and then begin its messages whose other ranks are at them."""
    structure, numbers = state.at[rank]
    num_messages, num_meets = code.structure[structure], code.structure[structure + 1]
    copied, folded = number(code, rank, numbers + 1), number(code, rank, numbers + 2)
    now = state.clock[rank] + crowd(code, state, rank) * (copied * speeds.copy + folded * speeds.fold)
    if num_meets:
        meet(code, speeds, state, rank, now, numbers + 4 + 3 * num_messages, num_meets, going, log)
    elif num_messages == 0:
        end_round(state, rank, now, going, log)
    else:
        state.began[rank] = state.over[rank] = now
        state.waiting[rank], state.pending[rank] = state.round[rank], num_messages
        for nth in range(num_messages):
            peer = peer_at(code, rank, numbers + 4 + 3 * nth)
            if state.waiting[peer] == state.round[rank]:
                begin_message(code, state, rank, peer, nth, events)


@inner
def begin_message(code: Code, state: State, rank: int, peer: int, nth: int, events) -> None:
    """Let a message go, if the peer has its other end."""
    structure, numbers = state.at[rank]
    at, is_send = numbers + 4 + 3 * nth, code.structure[structure + 2 + nth]
    chunks = number(code, rank, at + 1)
    found, theirs = counterpart(code, state, peer, rank, is_send, chunks)
    if found:
        source, dest = (rank, peer) if is_send else (peer, rank)
        ready = max(state.began[rank], state.began[peer])
        heappush(events, (ready, OUT, source, dest, float(chunks), float(number(code, rank, at + 2) + theirs)))


@inner
def counterpart(code: Code, state: State, rank: int, peer: int, is_send: int, chunks: int):
    """Return whether a rank takes what the peer sends, or sends what it takes; and how much the rank folds."""
    structure, numbers = state.at[rank]
    for nth in range(code.structure[structure]):
        at = numbers + 4 + 3 * nth
        same_peer = peer_at(code, rank, at) == peer
        if same_peer and code.structure[structure + 2 + nth] != is_send and number(code, rank, at + 1) == chunks:
            return True, number(code, rank, at + 2)
    return False, 0


@inner
def meet(code: Code, speeds: Speeds, state: State, rank: int, now: float, at: int, num_meets: int, going, log) -> None:
    """Arrive at a barrier; the last one lets all go on."""
    first = rank + number(code, rank, at)
    state.arrivals[first, 0] += 1
    state.arrivals[first, 1] = max(state.arrivals[first, 1], now)
    if state.arrivals[first, 0] == num_meets:
        end = state.arrivals[first, 1] + crowd(code, state, rank) * speeds.meet
        state.arrivals[first] = 0
        for nth in range(num_meets):
            end_round(state, rank + number(code, rank, at + nth), end, going, log)


@inner
def pass_gate(code: Code, speeds: Speeds, state: State, event, events) -> float:
    """Bring a message to the way in, or over it; returns when it has come, or a number below 0."""
    time, way, source, dest, chunks, folded = event
    nodes = code.node_of[source], code.node_of[dest]
    if nodes[0] == nodes[1]:
        takes = crowd(code, state, source) * (speeds.alpha + chunks * speeds.beta)
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


@inner
def arrive(
    code: Code, speeds: Speeds, state: State, source: int, dest: int, folded: float, done: float, going, log
) -> None:
    """End a message; a rank that has no other to wait for folds and goes on."""
    if log[0]:
        log[1].append((source, dest, state.round[source], max(state.began[source], state.began[dest]), done))
    state.folds[dest, 0 if code.node_of[source] == code.node_of[dest] else 1] += folded
    for rank in (source, dest):
        state.over[rank] = max(state.over[rank], done)
        state.pending[rank] -= 1
        if state.pending[rank] == 0:
            state.waiting[rank] = NOT_AT_IT
            end_round(state, rank, state.over[rank] + folding(code, speeds, state, rank), going, log)
            state.folds[rank] = 0.0


@inner
def folding(code: Code, speeds: Speeds, state: State, rank: int) -> float:
    near, far = state.folds[rank]
    late = max(0.0, far - speeds.segment)
    return crowd(code, state, rank) * ((near + far - late) * speeds.fold + late * speeds.fold_late)


@inner
def end_round(state: State, rank: int, end: float, going, log) -> None:
    if log[0]:
        log[2].append((rank, state.round[rank], state.clock[rank], end))
    state.clock[rank] = end
    state.round[rank] += 1
    going.append(rank)
