"""Rules for a round of messages: moves between existing ranks, each message with both its ends."""

import operator
from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

from collectives.schedule.moves import Copy, Move, Recv, RecvReduce, Round, Send, runs_of, show, show_run
from teaching.exercise.exercise import MistakeError, shortened

MOVES = Send, Recv, RecvReduce, Copy
ROUND = "a round is a tuple of moves, as in yield (Send(to, run),)"


def to_round(value: Any) -> Round:
    """Convert a value that a student yields to a round.

    Raises: ValueError for anything else.
    """
    if isinstance(value, Move):
        raise ValueError(f"yields {type(value).__name__}(...) by itself: {ROUND}")
    if not isinstance(value, tuple | list):
        raise ValueError(f"yields {shortened(value)}: {ROUND}")
    return tuple(to_move(move) for move in value)


def to_move(value: Any) -> Move:
    """Convert an item of a student's round to a move, with ranks as Python's integers.

    Raises: ValueError for anything else.
    """
    if not isinstance(value, MOVES):
        names = ", ".join(kind.__name__ for kind in MOVES)
        raise ValueError(f"{shortened(value)} is not a move of this exercise: use {names}")
    ranks: dict[str, Any] = {}
    for name, part in value._asdict().items():
        if name == "run" or isinstance(value, Copy):
            if not (isinstance(part, range) and part.step == 1):
                remedy = "a range of consecutive chunks, as chunk(0, size)"
                raise ValueError(f"{type(value).__name__}'s {name} is {shortened(part)}: use {remedy}")
        elif isinstance(part, bool) or not hasattr(part, "__index__"):
            raise ValueError(f"{type(value).__name__}'s {name} is {shortened(part)}: use the number of a rank")
        else:
            ranks[name] = operator.index(part)
    return value._replace(**ranks)


def peer_of(move: Move) -> int | None:
    match move:
        case Send(to, _):
            return to
        case Recv(source, _) | RecvReduce(source, _):
            return source
    return None


def check_moves(rank: int, index: int, moves: Round, size: int, num_chunks: int) -> None:
    """Refuse ranks and chunks that do not exist, messages to oneself, and copies to runs of another length."""
    for move in moves:
        would = f"in round {index}, rank {rank} would {show(move)}"
        peer = peer_of(move)
        if peer == rank:
            raise MistakeError(rank, index, f"{would}, which is itself")
        if peer is not None and not 0 <= peer < size:
            raise MistakeError(rank, index, f"{would}: there are ranks 0 to {size - 1}")
        if isinstance(move, Copy) and len(move.source) != len(move.run):
            raise MistakeError(rank, index, f"{would}: the runs must be as long as each other")
        for run in runs_of(move):
            if run and not 0 <= run.start < run.stop <= num_chunks:
                there = f"there are chunks {show_run(range(num_chunks))}"
                raise MistakeError(rank, index, f"{would}: {there}; chunk(i, size) counts them round the ring")


def check_messages(index: int, schedules: Sequence[Sequence[Round]]) -> None:
    """Pair the ends of a round's messages.  A single end waits for ever; two ends of different lengths do not match."""
    ends: dict[tuple[int, int], tuple[list[Any], list[Any]]] = defaultdict(lambda: ([], []))
    for rank, rounds in enumerate(schedules):
        for move in rounds[index]:
            peer = peer_of(move)
            if peer is not None:
                is_send = isinstance(move, Send)
                ends[(rank, peer) if is_send else (peer, rank)][not is_send].append(move)
    for (source, dest), (sends, receives) in sorted(ends.items()):
        for send, receive in zip_longest(sends, receives):
            if send is None or receive is None:
                raise deadlock(index, source, dest, send, receive, schedules)
            if len(send.run) != len(receive.run):
                ways = f"rank {source} would {show(send)}, but rank {dest} would {show(receive)}"
                raise MistakeError(dest, index, f"in round {index}, {ways}: the runs must be as long as each other")


def deadlock(
    index: int, source: int, dest: int, send: Move | None, receive: Move | None, schedules: Sequence[Sequence[Round]]
) -> MistakeError:
    """Describe a message of which one end is missing, and the place of that end, if it is in another round."""
    rank, peer, move = (source, dest, send) if send else (dest, source, receive)
    assert move
    lacks = f"rank {dest} receives nothing more" if send else f"rank {source} sends nothing more"
    end = "from it" if send else "to it"
    counts = Counter[int]()  # receives more than sends, in each round
    for number, (sending, receiving) in enumerate(zip(schedules[source], schedules[dest], strict=True)):
        counts[number] += sum(isinstance(m, Recv | RecvReduce) and m.source == source for m in receiving)
        counts[number] -= sum(isinstance(m, Send) and m.to == dest for m in sending)
    others = [number for number, more in counts.items() if (more > 0 if send else more < 0)]
    hint = f"; rank {peer} does in round {others[0]}: a message has both its ends in one round" if others else ""
    would = f"in round {index}, rank {rank} would {show(move)}"
    return MistakeError(rank, index, f"{would}, but {lacks} {end} in that round: deadlock{hint}")
