"""What each collective must achieve, and the symbolic run of all ranks that proves it of a schedule.

The run holds no numbers: a chunk's value says which chunk of the input it is and how often each rank is in it.
Sends complete only when received, so that a schedule that passes needs no buffering anywhere.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from typing import NamedTuple

from collectives.schedule import Copy, Fold, Recv, Round, Schedule, Send, show, show_run

BITS = 16  # a rank's count in a multiset of contributions, kept as one integer


class Value(NamedTuple):
    """A chunk's contents: the chunk of the input it is, and the multiset of ranks folded into it."""

    chunk: int
    ranks: int

    def __str__(self) -> str:
        counts = [self.ranks >> BITS * r & (1 << BITS) - 1 for r in range(self.ranks.bit_length() // BITS + 1)]
        terms = [f"{n}*r{r}" if n > 1 else f"r{r}" for r, n in enumerate(counts) if n]
        return f"chunk {self.chunk} of {' + '.join(terms)}"


Vector = dict[int, Value]


class Contract(NamedTuple):
    """What each rank's working vector holds `before(rank, size, root)` and must hold `after` it."""

    before: Callable[[int, int, int], Vector]
    after: Callable[[int, int, int], Vector]


def of(rank: int, chunks: range) -> Vector:
    return {c: Value(c, 1 << BITS * rank) for c in chunks}


def total(size: int, chunks: range) -> Vector:
    return {c: Value(c, sum(1 << BITS * r for r in range(size))) for c in chunks}


CONTRACTS = {
    "all_reduce": Contract(lambda r, p, _: of(r, range(p)), lambda r, p, _: total(p, range(p))),
    "reduce_scatter": Contract(lambda r, p, _: of(r, range(p)), lambda r, p, _: total(p, range(r, r + 1))),
    "all_gather": Contract(
        lambda r, p, _: of(r, range(r, r + 1)), lambda r, p, _: {c: Value(c, 1 << BITS * c) for c in range(p)}
    ),
    "all_to_all": Contract(
        lambda r, p, _: of(r, range(p)),
        lambda r, p, _: of(r, range(p)) | {p + s: Value(r, 1 << BITS * s) for s in range(p)},
    ),
    "broadcast": Contract(
        lambda r, p, root: of(root, range(p)) if r == root else {}, lambda r, p, root: of(root, range(p))
    ),
    "reduce": Contract(lambda r, p, _: of(r, range(p)), lambda r, p, root: total(p, range(p)) if r == root else {}),
    "gather": Contract(
        lambda r, p, _: of(r, range(r, r + 1)),
        lambda r, p, root: {c: Value(c, 1 << BITS * c) for c in range(p)} if r == root else {},
    ),
    "scatter": Contract(
        lambda r, p, root: of(root, range(p)) if r == root else {}, lambda r, p, root: of(root, range(r, r + 1))
    ),
    "barrier": Contract(lambda r, p, _: {}, lambda r, p, _: {}),
}


class ContractError(Exception):
    """A schedule that does not do what its collective must; says where."""


def check(collective: str, algorithm: Callable[..., Schedule], size: int, **root: int) -> None:
    """Run every rank's schedule symbolically and hold the result against the collective's contract.

    Raises: ContractError, naming rank, round, peer and chunk.
    """
    contract, at = CONTRACTS[collective], root.get("root", 0)
    vectors = [contract.before(rank, size, at) for rank in range(size)]
    world = World([list(algorithm(rank, size, **root)) for rank in range(size)], vectors)
    world.run()
    for rank in range(size):
        for chunk, value in contract.after(rank, size, at).items():
            if vectors[rank].get(chunk) != value:
                raise ContractError(
                    f"{collective} on {size} ranks: rank {rank} ends with "
                    f"{vectors[rank].get(chunk, 'nothing')} in [{chunk}], must be {value}"
                )
    if collective == "barrier":
        check_everyone_heard(world.heard, size)


def check_everyone_heard(heard: list[int], size: int) -> None:
    for rank, mask in enumerate(heard):
        if missing := [r for r in range(size) if not mask >> r & 1]:
            raise ContractError(f"barrier on {size} ranks: rank {rank} ends without word of ranks {missing}")


class Message(NamedTuple):
    """One side of a message that waits for the other: rank `rank`'s move."""

    rank: int
    move: Send | Recv | Fold


class World:
    """All ranks of a symbolic run.  A round's moves are posted together and take effect at its end."""

    def __init__(self, programs: list[list[Round]], vectors: list[Vector]):
        self.programs, self.vectors = programs, vectors
        size = len(programs)
        self.heard = [1 << rank for rank in range(size)]  # a bit for each rank whose start is known here
        self.rounds = [0] * size
        self.pending = [0] * size  # unmatched moves of the round at hand
        self.landings: list[list[tuple[int, Value, bool]]] = [[] for _ in range(size)]
        self.news = [0] * size
        self.sends: dict[tuple[int, int], deque[Message]] = defaultdict(deque)
        self.receives: dict[tuple[int, int], deque[Message]] = defaultdict(deque)

    def run(self) -> None:
        ready = list(range(len(self.programs)))
        for rank in ready:
            self.post(rank)
        while ready:
            rank = ready.pop()
            while self.rounds[rank] < len(self.programs[rank]) and not self.pending[rank]:
                self.land(rank)
                ready.extend(self.post(rank))
        stuck = [rank for rank, at in enumerate(self.rounds) if at < len(self.programs[rank])]
        if stuck:
            raise ContractError("deadlock: " + "; ".join(self.where(rank) for rank in stuck[:4]))

    def post(self, rank: int) -> list[int]:
        """Post the round at hand; return the peers that it set going."""
        if self.rounds[rank] == len(self.programs[rank]):
            return []
        moves = self.programs[rank][self.rounds[rank]]
        self.check_disjoint(rank, moves)
        self.pending[rank] = sum(not isinstance(m, Copy) for m in moves)
        return [peer for move in moves if (peer := self.post_move(rank, move)) is not None]

    def post_move(self, rank: int, move) -> int | None:
        match move:
            case Copy(source, run):
                values = [self.value(rank, c, move) for c in source]
                self.landings[rank] += [(c, v, False) for c, v in zip(run, values, strict=True)]
                return None
            case Send(to, _):
                mine, theirs, key = self.sends, self.receives, (rank, to)
            case Recv(source, _) | Fold(source, _):
                mine, theirs, key = self.receives, self.sends, (source, rank)
        if not theirs[key]:
            mine[key].append(Message(rank, move))
            return None
        other = theirs[key].popleft()
        send, receive = (Message(rank, move), other) if isinstance(move, Send) else (other, Message(rank, move))
        self.deliver(send, receive)
        return other.rank

    def deliver(self, send: Message, receive: Message) -> None:
        if len(send.move.run) != len(receive.move.run):
            raise ContractError(
                f"{self.at(receive.rank)} would {show(receive.move)}, which sends {show_run(send.move.run)}"
            )
        values = [self.value(send.rank, c, send.move) for c in send.move.run]
        fold = isinstance(receive.move, Fold)
        self.landings[receive.rank] += [(c, v, fold) for c, v in zip(receive.move.run, values, strict=True)]
        self.news[receive.rank] |= self.heard[send.rank]
        self.pending[send.rank] -= 1
        self.pending[receive.rank] -= 1

    def value(self, rank: int, chunk: int, move) -> Value:
        if chunk not in self.vectors[rank]:
            raise ContractError(f"{self.at(rank)} would {show(move)}, but holds nothing in [{chunk}]")
        return self.vectors[rank][chunk]

    def land(self, rank: int) -> None:
        """End the round at hand: what was received takes effect."""
        vector = self.vectors[rank]
        for chunk, value, fold in self.landings[rank]:
            if fold:
                own = vector.get(chunk)
                if own is None or own.chunk != value.chunk:
                    raise ContractError(f"{self.at(rank)} folds {value} into {own or 'nothing'} in [{chunk}]")
                value = Value(chunk=own.chunk, ranks=own.ranks + value.ranks)
            vector[chunk] = value
        self.landings[rank] = []
        self.heard[rank] |= self.news[rank]
        self.rounds[rank] += 1

    def check_disjoint(self, rank: int, moves: Round) -> None:
        """No chunk is written twice in a round, nor written while it is read; a Fold writes after all Sends."""
        written: dict[int, object] = {}
        for move in moves:
            for chunk in () if isinstance(move, Send) else move.run:
                if chunk in written:
                    raise ContractError(f"{self.at(rank)} writes [{chunk}] twice: {show(move)}")
                written[chunk] = move
        for chunk, reader in self.reads(moves):
            writer = written.get(chunk)
            if isinstance(writer, Recv | Copy) or (isinstance(reader, Copy) and writer is not None):
                raise ContractError(f"{self.at(rank)} writes [{chunk}] while it would {show(reader)}")

    def reads(self, moves: Round) -> Iterator[tuple[int, Send | Copy]]:
        for move in moves:
            if isinstance(move, Send | Copy):
                yield from ((chunk, move) for chunk in (move.run if isinstance(move, Send) else move.source))

    def at(self, rank: int) -> str:
        return f"rank {rank} in round {self.rounds[rank]}"

    def where(self, rank: int) -> str:
        unmatched = [
            m.move for queue in (*self.sends.values(), *self.receives.values()) for m in queue if m.rank == rank
        ]
        return f"{self.at(rank)} waits to {', '.join(map(show, unmatched))}"
