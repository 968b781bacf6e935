"""The proof of a schedule from outside this package, and the checks before it: whatever is wrong is one ValueError."""

import hashlib
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from collectives.algorithms.algorithm import Access, Algorithm, Groups
from collectives.algorithms.groups import group_of, whole
from collectives.schedule import proof
from collectives.schedule.moves import (
    MESSAGES,
    Barrier,
    Copy,
    Move,
    Recv,
    RecvReduce,
    Round,
    Send,
    is_direct,
    runs_of,
    show,
)
from collectives.schedule.spec import COLLECTIVES, Chunks

MOST_MOVES = 1 << 24  # of all ranks: a ring of 1024 has four million
MOST_AREAS = 16  # as long as the vector, for working space and itself
SLOW_S = 1.0  # a proof that takes longer is reported

Programs = Sequence[Sequence[Round]]  # of all ranks


class Proved(NamedTuple):
    """What is known of a schedule that is right: a hash of all ranks' rounds, and what it needs.

    `aligned`: each chunk moves to places of its own length only, where chunks have several lengths.
    """

    digest: str
    access: Access
    aligned: bool
    rounds: tuple[Round, ...]  # of one rank


@lru_cache(maxsize=64)
def prove(row: Algorithm, size: int, root: int, nodes: Groups, rank: int = 0) -> Proved:
    """Prove that a schedule does its collective on so many ranks, once; and return it with the rounds of one.

    Raises: ValueError, naming the rank, the round and the chunk at fault.
    """
    begin_s = time.monotonic()
    groups = nodes if row.over_nodes else ()
    num_chunks = row.num_chunks(size, groups)
    spec = COLLECTIVES[row.collective]
    if Chunks.OWN in (spec.gives, spec.gets) and num_chunks % size:
        owned = f"{num_chunks} chunks are not divisible by {size} ranks"
        raise ValueError(f"algorithm {row.name}: {owned}, which own as many each: use a multiple")
    programs = [rounds_of(row, rank, size, root, groups) for rank in range(size)]
    check_lengths(row, programs)
    check_runs(row, programs, num_chunks, size)
    access = Access.MESSAGES
    if any(is_direct(moves) for rounds in programs for moves in rounds):
        access = Access.INTRA_NODE
        for each, rounds in enumerate(programs):
            check_access(row, each, rounds, group_of(each, whole(nodes or None, size)), num_chunks)
    more: dict[str, Any] = {"root": root} if spec.rooted else {}
    try:
        proof.check(row.collective, lambda rank, size, **_: programs[rank], size, num_chunks=num_chunks, **more)
    except proof.ContractError as error:
        raise ValueError(f"algorithm {row.name} is wrong: {error}") from None
    if (seconds := time.monotonic() - begin_s) > SLOW_S:
        print(f"collectives: the proof of {row.name} on {size} ranks took {seconds:.1f} s, once", file=sys.stderr)
    digest = hashlib.blake2b(repr(programs).encode(), digest_size=6).hexdigest()
    return Proved(digest, access, is_aligned(programs, num_chunks), tuple(programs[rank]))


def rounds_of(row: Algorithm, rank: int, size: int, root: int, groups: Groups) -> list[Round]:
    """Return a rank's rounds, which consist of moves with ranks and runs in range.

    Raises: ValueError for anything else, and for what the function raises.
    """
    rounds: list[Round] = []
    num_moves = 0
    for moves in row.rounds_of(rank, size, root, groups):
        where = f"algorithm {row.name}: rank {rank} of {size} in round {len(rounds)}"
        check_round(where, moves, size)
        rounds.append(tuple(moves))
        num_moves += 1 + len(moves)
        if num_moves * size > MOST_MOVES:
            raise ValueError(f"{where} has had {num_moves} moves: a rank may have {MOST_MOVES // size}")
    return rounds


def check_round(where: str, moves: Any, size: int) -> None:
    """Raise ValueError for what is no round of moves."""
    if isinstance(moves, Move) or not isinstance(moves, tuple | list):
        raise ValueError(f"{where} yields {moves!r}: yield a tuple of moves, as (Send(1, range(1)),)")
    for move in moves:
        if not isinstance(move, Move):
            raise ValueError(f"{where} yields {move!r}, not a move: use Send, Recv, RecvReduce, Copy or their kin")
        for field, value in zip(move._fields, move, strict=True):
            check_field(f"{where}: {field} {value!r}", is_run(move, field), value, field in ("sources", "ranks"), size)
        if len({len(run) for run in runs_of(move)}) > 1:
            raise ValueError(f"{where} would {show(move)}: use runs of one length")


def is_run(move: Move, field: str) -> bool:
    return field in ("run", "theirs") or (isinstance(move, Copy) and field == "source")


def check_field(what: str, is_run: bool, value: Any, is_several: bool, size: int) -> None:
    """Raise ValueError for a field of a move that is not a run, a rank or a tuple of ranks, as it should be."""
    if is_run:
        if not isinstance(value, range) or value.step != 1 or value.start < 0:
            raise ValueError(f"{what} is not a run of chunks: use range(first, last + 1)")
        return
    ranks = value if is_several else (value,)
    if not isinstance(ranks, tuple) or not ranks or not all(type(rank) is int for rank in ranks):
        kind = "a tuple of ranks, each an int" if is_several else "a rank, an int"
        raise ValueError(f"{what} is not {kind}: convert it")
    if not 0 <= min(ranks) <= max(ranks) < size:
        raise ValueError(f"{what} is out of range: use ranks from 0 to {size - 1}")


def check_lengths(row: Algorithm, programs: Programs) -> None:
    """Raise ValueError where ranks have different numbers of rounds, or too many messages in one."""
    for rank, rounds in enumerate(programs):
        if len(rounds) != len(programs[0]):
            lengths = f"rank {rank} has {len(rounds)} rounds, and rank 0 has {len(programs[0])}"
            raise ValueError(f"algorithm {row.name}: {lengths}: yield () for a round without moves")
        for number, moves in enumerate(rounds):
            dests = [move.to for move in moves if isinstance(move, Send)]
            if len(dests) > MESSAGES and (most := max(map(dests.count, dests))) > MESSAGES:
                where = f"rank {rank} in round {number}"
                raise ValueError(f"algorithm {row.name}: {where} sends a rank {most} messages: use at most {MESSAGES}")


def check_runs(row: Algorithm, programs: Programs, num_chunks: int, size: int) -> None:
    """Raise ValueError for a run that begins in the vector, and ends in the chunks behind it."""
    bounds = (num_chunks, 2 * size) if COLLECTIVES[row.collective].exchanges else (num_chunks,)
    for rank, rounds in enumerate(programs):
        for number, moves in enumerate(rounds):
            for move in moves:
                for run in runs_of(move):
                    if run.stop > MOST_AREAS * num_chunks:
                        most = f"use at most {MOST_AREAS * num_chunks} chunks"
                        raise ValueError(
                            f"algorithm {row.name}: rank {rank} in round {number} would {show(move)}: {most}"
                        )
                    if any(run.start < bound < run.stop for bound in bounds):
                        where = f"rank {rank} in round {number} would {show(move)}"
                        raise ValueError(f"algorithm {row.name}: {where}, across the vector's end: use two moves")


def check_access(row: Algorithm, rank: int, rounds: Sequence[Round], node: Sequence[int], num_chunks: int) -> None:
    """Raise ValueError where a rank accesses memory outside its node, or outside the vector."""
    for number, moves in enumerate(rounds):
        where = f"algorithm {row.name}: rank {rank} in round {number}"
        direct = [move for move in moves if is_direct((move,))]
        if direct and any(isinstance(move, Send | Recv | RecvReduce) for move in moves):
            raise ValueError(f"{where} has messages and accesses to memory: put them into rounds of their own")
        for move in direct:
            if isinstance(move, Barrier):
                if sorted(move.ranks) != sorted(node):
                    raise ValueError(f"{where} would {show(move)}: a barrier is of all ranks of a node, {sorted(node)}")
                continue
            peers = move[0] if isinstance(move[0], tuple) else (move[0],)
            if strange := [peer for peer in peers if peer not in node]:
                raise ValueError(f"{where} would {show(move)}: rank {strange[0]} is on another node: send messages")
            if max(run.stop for run in runs_of(move)) > num_chunks:
                raise ValueError(f"{where} would {show(move)}: only the vector's {num_chunks} chunks can be accessed")


def is_aligned(programs: Programs, num_chunks: int) -> bool:
    """Return whether chunk i of n only moves to chunks i, i + n, i + 2n and so on."""
    return all(a.start % num_chunks == b.start % num_chunks for a, b in moved_runs(programs))


def moved_runs(programs: Programs) -> Iterator[tuple[range, range]]:
    """Yield the runs between which data move, in one vector or from one to another."""
    sends: dict[tuple[int, int], list[range]] = defaultdict(list)
    receives: dict[tuple[int, int], list[range]] = defaultdict(list)
    for rank, rounds in enumerate(programs):
        for move in (move for moves in rounds for move in moves):
            match move:
                case Send(to, run):
                    sends[rank, to].append(run)
                case Recv(source, run) | RecvReduce(source, run):
                    receives[source, rank].append(run)
                case Barrier():
                    pass
                case _:
                    first, second = runs_of(move)
                    yield first, second
    for way, runs in sends.items():
        yield from zip(runs, receives[way], strict=True)
