"""All ranks' rounds run by the prover in lockstep, with the changes of chunks in each round."""

from typing import NamedTuple

from collectives.schedule.moves import Copy, Recv, RecvReduce, Send, show
from collectives.schedule.proof import ContractError, Value, World
from teaching.exercise.exercise import MistakeError


class Change(NamedTuple):
    """The change of a rank's chunk by a move of a round."""

    round: int
    rank: int
    chunk: int
    before: Value | None
    after: Value
    move: Recv | RecvReduce | Copy


def follow(world: World) -> list[Change]:
    """Run the rounds of all ranks, in each of which every message has both its ends.

    Raises: MistakeError for forbidden moves.
    """
    changes: list[Change] = []
    for index in range(len(world.programs[0])):
        for rank in range(len(world.programs)):
            check_held(world, rank, index)
        for rank in range(len(world.programs)):
            try:
                world.post(rank)
            except ContractError as error:  # a chunk written twice, or while it is read
                raise MistakeError(rank, index, str(error)) from error
        for rank in range(len(world.programs)):
            changes += land(world, rank, index)
    return changes


def check_held(world: World, rank: int, index: int) -> None:
    """Refuse to send, or copy, chunks that a rank does not have."""
    for move in world.programs[rank][index]:
        run = move.run if isinstance(move, Send) else move.source if isinstance(move, Copy) else range(0)
        for chunk in run:
            if chunk not in world.vectors[rank]:
                why = f"in round {index}, rank {rank} would {show(move)}, but holds nothing in [{chunk}] yet"
                raise MistakeError(rank, index, why)


def land(world: World, rank: int, index: int) -> list[Change]:
    """End a rank's round, and return the changes."""
    vector, moves = world.vectors[rank], world.programs[rank][index]
    writers = {c: move for move in moves if isinstance(move, Recv | RecvReduce | Copy) for c in move.run}
    before = {chunk: vector.get(chunk) for chunk in writers}
    for landing in world.landings[rank]:
        own = vector.get(landing.chunk)
        if landing.source is not None and (own is None or own.chunk != landing.value.chunk):
            would = f"in round {index}, rank {rank} would {show(writers[landing.chunk])}"
            holds = f"[{landing.chunk}] holds {f'chunk {own.chunk}' if own else 'nothing'}"
            raise MistakeError(rank, index, f"{would}, but {holds}, and what comes is chunk {landing.value.chunk}")
    world.land(rank)
    return [Change(index, rank, chunk, before[chunk], vector[chunk], move) for chunk, move in writers.items()]
