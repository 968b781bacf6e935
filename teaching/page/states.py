"""Every rank's chunks after each round of a schedule, from the prover's symbolic run.

A state is the rounds that all ranks have ended.  Ranks of the symbolic run are in different rounds at a time; without
races, the values written in a round do not depend on that.
"""

from collections import defaultdict
from functools import cache
from typing import NamedTuple

from collectives.algorithms import Algorithm
from collectives.algorithms.algorithm import Groups
from collectives.schedule.moves import (
    Barrier,
    Copy,
    Get,
    GetReduce,
    Put,
    Recv,
    RecvReduce,
    Round,
    is_direct,
)
from collectives.schedule.proof import BITS, Message, Rerun, Value, Vector, World, after, before, contributions
from collectives.schedule.spec import COLLECTIVES, Chunks


class ChunkTransfer(NamedTuple):
    """Chunks that a round brings to `dest`: run `theirs` of each of the sources becomes, or is reduced into, `run`."""

    kind: str  # the name of the receiving move
    sources: tuple[int, ...]
    theirs: range
    dest: int
    run: range
    values: tuple[Value, ...]  # of `run`, after the round


class RankRound(NamedTuple):
    """A rank's round: the `transfers` that it receives or writes, and the ranks of its barrier."""

    transfers: tuple[ChunkTransfer, ...]
    barrier: tuple[int, ...] = ()


class RecordedRun(NamedTuple):
    """A symbolic run of all ranks: the initial vectors, the values written by each round, and the final vectors due."""

    start: list[Vector]
    goal: list[Vector]
    programs: list[list[Round]]  # by rank
    rounds: list[list[RankRound]]  # by round, then by rank

    def states(self) -> list[list[Vector]]:
        """Return all ranks' vectors at first, and after each round."""
        vectors = [dict(vector) for vector in self.start]
        states = [[dict(vector) for vector in vectors]]
        for ranks in self.rounds:
            for transfer in (transfer for rank in ranks for transfer in rank.transfers):
                vectors[transfer.dest].update(zip(transfer.run, transfer.values, strict=True))
            states.append([dict(vector) for vector in vectors])
        return states


class RecordingWorld(World):
    """A symbolic run that records the message of each receive, and the values that each round of each rank writes."""

    def __init__(self, name: str, programs: list[list[Round]], start: list[Vector], goal: list[Vector]):
        super().__init__(name, programs, start, goal, in_order=False)
        self.delivered: dict[tuple[int, int], list[tuple[Message, Message]]] = defaultdict(list)  # by rank and round
        self.written: dict[tuple[int, int], dict[tuple[int, int], Value]] = {}  # then by owner and chunk
        self.heard_by_round: dict[tuple[int, int], int] = {}  # the ranks of which a rank has heard, as `heard`

    def deliver(self, send: Message, receive: Message) -> None:
        number = self.rounds[receive.rank]
        assert self.rounds[send.rank] == number, f"{self.name}: round {number} takes another round's message"
        super().deliver(send, receive)
        self.delivered[receive.rank, number].append((send, receive))

    def land(self, rank: int) -> None:
        number, landings = self.rounds[rank], self.landings[rank]
        super().land(rank)
        locations = [(landing.owner, landing.chunk) for landing in landings]
        self.written[rank, number] = {(owner, chunk): self.vectors[owner][chunk] for owner, chunk in locations}
        self.heard_by_round[rank, number] = self.heard[rank]

    def rank_round(self, rank: int, number: int) -> RankRound:
        """Return a rank's record of a round."""
        chunk_values = self.written[rank, number]
        transfers = []
        barrier: tuple[int, ...] = ()
        for move in self.programs[rank][number]:
            match move:
                case Barrier(ranks):
                    barrier = ranks
                case Copy(source, run):
                    transfers.append(ChunkTransfer("Copy", (rank,), source, rank, run, ()))
                case Get(peer, theirs, run):
                    transfers.append(ChunkTransfer("Get", (peer,), theirs, rank, run, ()))
                case Put(peer, run, theirs):
                    transfers.append(ChunkTransfer("Put", (rank,), run, peer, theirs, ()))
                case GetReduce(sources, theirs, run):
                    transfers.append(ChunkTransfer("GetReduce", sources, theirs, rank, run, ()))
                case Recv() | RecvReduce():
                    send = next(s for s, receive in self.delivered[rank, number] if receive.move is move)
                    name = type(move).__name__
                    transfers.append(ChunkTransfer(name, (send.rank,), send.move.run, rank, move.run, ()))
        return RankRound(
            tuple(t._replace(values=tuple(chunk_values[t.dest, chunk] for chunk in t.run)) for t in transfers), barrier
        )


def record(row: Algorithm, size: int, groups: Groups, root: int = 0) -> RecordedRun:
    """Run an algorithm symbolically, and return every round of it.

    A barrier moves no chunks: there, chunk 0 stands for the ranks of which a rank has heard.

    Raises: ContractError where the algorithm does not do what its collective must.
    """
    spec = COLLECTIVES[row.collective]
    num_chunks = row.num_chunks(size, groups)
    start = [before(spec, rank, size, root, num_chunks) for rank in range(size)]
    goal = [after(spec, rank, size, root, num_chunks) for rank in range(size)]
    if row.apart:
        goal = [{chunk + size: value for chunk, value in vector.items()} for vector in goal]
    programs = [row.rounds(rank, size, root, groups) for rank in range(size)]
    num_rounds = len(programs[0])
    shared = any(is_direct(moves) for rounds in programs for moves in rounds)
    whole = [[*rounds, (Rerun(),)] for rounds in programs] if shared else programs  # results are checked at the rerun
    world = RecordingWorld(f"{row.collective} on {size} ranks", whole, start, goal)  # type: ignore[arg-type]
    world.run()
    for rank in range(size) if not shared else ():
        world.check_result(rank)
    rounds = [[world.rank_round(rank, number) for rank in range(size)] for number in range(num_rounds)]
    if spec.gives is Chunks.NONE:
        start = [{0: ranks_known(1 << rank)} for rank in range(size)]
        goal = [{0: ranks_known((1 << size) - 1)} for _ in range(size)]
        rounds = [
            [barrier_round(each, rank, world.heard_by_round[rank, number]) for rank, each in enumerate(ranks)]
            for number, ranks in enumerate(rounds)
        ]
    return RecordedRun(start, goal, programs, rounds)


def ranks_known(mask: int) -> Value:
    """Return the ranks of a mask as contributions to chunk 0."""
    return Value(0, contributions(tuple(rank for rank in range(mask.bit_length()) if mask >> rank & 1)))


def barrier_round(each: RankRound, rank: int, mask: int) -> RankRound:
    """Return a round of a barrier, at the end of which a rank has heard of those in `mask`."""
    run, values = range(1), (ranks_known(mask),)
    transfers = [t._replace(theirs=run, run=run, values=values) for t in each.transfers]
    if each.barrier:
        transfers.append(ChunkTransfer("Copy", (rank,), run, rank, run, values))
    return each._replace(transfers=tuple(transfers))


@cache
def ranks_of(value: Value) -> int:
    """Return the ranks that are in a value, once each, as a mask.

    >>> bin(ranks_of(Value(0, contributions((0, 3)))))
    '0b1001'
    """
    counts = [value.ranks >> BITS * rank & (1 << BITS) - 1 for rank in range(value.ranks.bit_length() // BITS + 1)]
    assert max(counts) <= 1, f"{value} has a rank twice"
    return sum(count << rank for rank, count in enumerate(counts))
