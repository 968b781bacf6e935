"""The contract of each collective, and the symbolic run of all ranks that proves it of a schedule.

The run holds no numbers: a chunk's value says which chunk of the input it is and how often each rank is in it.  Sends
complete only when received, so that a schedule that passes needs no buffering anywhere.  Where ranks access each
other's memory, barriers must order every read and write: an access without order is a race, whoever wins it.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import lru_cache, partial, reduce
from typing import Any, NamedTuple

from collectives.schedule.moves import (
    Barrier,
    Copy,
    Get,
    GetReduce,
    Move,
    Put,
    Recv,
    RecvReduce,
    Round,
    Schedule,
    Send,
    is_direct,
    replaced,
    runs_of,
    show,
    show_run,
)
from collectives.schedule.spec import At, Chunks, Collective, spec_of

RUNS = 3  # successive runs of a schedule on shared memory, to prove that a run does not disturb the next
BITS = 16  # a rank's count in a multiset of contributions, kept as one integer


class Value(NamedTuple):
    """A chunk's contents: the chunk of the input it is, and the multiset of ranks reduced into it."""

    chunk: int
    ranks: int

    @property
    def counts(self) -> dict[int, int]:
        """The number of contributions of each rank that contributes."""
        counts = [self.ranks >> BITS * r & (1 << BITS) - 1 for r in range(self.ranks.bit_length() // BITS + 1)]
        return {rank: count for rank, count in enumerate(counts) if count}

    def __str__(self) -> str:
        terms = [f"{n}*r{r}" if n > 1 else f"r{r}" for r, n in self.counts.items()]
        return f"chunk {self.chunk} of {' + '.join(terms)}"


Vector = dict[int, Value]


def before(spec: Collective, rank: int, size: int, root: int, num_chunks: int = 0) -> Vector:
    """Return the contents of a rank's working vector before a collective."""
    return {c: Value(c, contributions((rank,))) for c in spec.gives.on(rank, size, root, num_chunks)}


def after(spec: Collective, rank: int, size: int, root: int, num_chunks: int = 0) -> Vector:
    """Return its contents due after it; where the result has chunks of its own, `x` unchanged."""
    values = before(spec, rank, size, root) if spec.exchanges else {}
    for chunk in spec.gets.on(rank, size, root, num_chunks):
        owner = chunk * size // (num_chunks or size)
        count = contributions(spec.sources(At(rank, owner, size, root)))
        values[size + chunk if spec.exchanges else chunk] = Value(rank if spec.exchanges else chunk, count)
    return values


@lru_cache(maxsize=1024)
def contributions(ranks: Sequence[int]) -> int:
    """Count each of the ranks once."""
    return sum(1 << BITS * rank for rank in ranks)


class ContractError(Exception):
    """Violation of a collective's contract by a schedule, with its place."""


def check(
    collective: str,
    algorithm: Callable[..., Schedule],
    size: int,
    *,
    apart: bool = False,
    in_order: bool = False,
    num_chunks: int = 0,
    **root: int,
) -> None:
    """Run every rank's schedule symbolically and compare the result with the collective's contract.

    The vector has `num_chunks`, by default one for each rank.  With `apart` the result is due in as many chunks behind
    them.  With `in_order`, every sum must be ((rank 0 + rank 1) + rank 2) + ...

    Raises: ContractError, naming rank, round, peer and chunk.
    """
    spec, at = spec_of(collective), root.get("root", 0)
    programs = [list(algorithm(rank, size, **root)) for rank in range(size)]
    name = f"{collective} on {size} ranks"
    bounds = bounds_of_runs(programs, num_chunks or size)
    if not apart and len(bounds) <= (num_chunks or size) and is_joinable(spec, programs):
        with suppress(ContractError):  # the run below, with all chunks, says in which one it is wrong
            check_joined(name, spec, programs, bounds, at, in_order)
            return
    start = [before(spec, rank, size, at, num_chunks) for rank in range(size)]
    goal = [after(spec, rank, size, at, num_chunks) for rank in range(size)]
    if apart:
        goal = [{chunk + (num_chunks or size): value for chunk, value in vector.items()} for vector in goal]
    if any(is_direct(moves) for rounds in programs for moves in rounds):
        width = 1 + max((chunk for vector in (*start, *goal) for chunk in vector), default=-1)
        num_chunks = max((run.stop for rs in programs for moves in rs for m in moves for run in runs_of(m)), default=0)
        programs = [repeated(rounds, width, num_chunks - width) for rounds in programs]
    world = World(name, programs, start, goal, in_order)
    world.run()
    for rank in range(size) if not world.shared else ():  # else checked before each rerun
        world.check_result(rank)
    for rank, mask in enumerate(world.heard if spec.gives is Chunks.NONE else ()):
        if missing := [r for r in range(size) if not mask >> r & 1]:
            raise ContractError(f"barrier on {size} ranks: rank {rank} ends without word of ranks {missing}")


def bounds_of_runs(programs: Sequence[Sequence[Round]], num_chunks: int) -> list[int]:
    """Return where runs begin and end, in ascending order: chunks between two bounds always move together."""
    runs = {run for rounds in programs for moves in rounds for move in moves for run in runs_of(move)}
    return sorted({0, num_chunks}.union(*((run.start, run.stop) for run in runs)))


def is_joinable(spec: Collective, programs: Sequence[Sequence[Round]]) -> bool:
    """Return whether a few chunks can stand for all: nobody owns single ones, and there are only messages."""
    return not {Chunks.OWN, Chunks.NONE} & {spec.gives, spec.gets} and all(
        isinstance(move, Send | Recv | RecvReduce) for rounds in programs for moves in rounds for move in moves
    )


def check_joined(
    name: str, spec: Collective, programs: list[list[Round]], bounds: Sequence[int], root: int, in_order: bool
) -> None:
    """Check a schedule with one chunk in place of all those between two bounds: the work of a few chunks."""
    index = {bound: number for number, bound in enumerate(bounds)}
    size, num_chunks = len(programs), len(bounds) - 1

    def joined(run: range) -> range:
        return range(index[run.start], index[run.stop]) if run else range(0)

    coarse = [[tuple(replaced(m, int, joined) for m in moves) for moves in rounds] for rounds in programs]
    start, goal = ([of(spec, rank, size, root, num_chunks) for rank in range(size)] for of in (before, after))
    world = JoinedWorld(name, coarse, start, goal, in_order)
    world.run()
    for rank in range(size):
        world.check_result(rank)


class Rerun(NamedTuple):
    """A pause between two runs of a schedule: the caller takes the result and overwrites everything for the next."""


def repeated(rounds: list[Round], width: int, num_scratch: int) -> list[Round]:
    """Repeat a rank's rounds `RUNS` times; scratch chunks, from `width` on, alternate with another set."""

    def other(run: range) -> range:
        by = num_scratch if run.start >= width else 0
        return range(run.start + by, run.stop + by)

    programs: list[Any] = []
    for index in range(RUNS):
        turned = [tuple(replaced(m, int, other) for m in moves) for moves in rounds] if index % 2 else rounds
        programs += [*turned, (Rerun(),)]
    return programs


class Message(NamedTuple):
    """One side of a message, waiting for the other: rank `rank`'s move."""

    rank: int
    move: Send | Recv | RecvReduce


class Landing(NamedTuple):
    """The value that a round leaves in a chunk of `owner`'s; it is reduced there if it came from a rank `source`."""

    owner: int
    chunk: int
    value: Value
    source: int | None = None


class LastUse(NamedTuple):
    """The rank that touched a chunk of memory last, and in which of its rounds."""

    rank: int
    round: int


class World:
    """All ranks of a symbolic run.  A round's moves are posted together and take effect at its end."""

    def __init__(
        self, name: str, programs: list[list[Round]], before: list[Vector], after: list[Vector], in_order: bool
    ):
        self.name, self.programs, self.before, self.after, self.in_order = name, programs, before, after, in_order
        self.vectors = [dict(vector) for vector in before]
        size = len(programs)
        self.heard = [1 << rank for rank in range(size)]  # a bit for each rank whose start is known here
        self.too_often = contributions(range(size)) << BITS - 1  # the highest bit of each rank's count
        self.rounds = [0] * size
        self.pending = [0] * size  # unmatched moves of the current round
        self.landings: list[list[Landing]] = [[] for _ in range(size)]
        self.news = [0] * size
        self.sends: dict[tuple[int, int], deque[Message]] = defaultdict(deque)
        self.receives: dict[tuple[int, int], deque[Message]] = defaultdict(deque)
        self.shared = any(moves and isinstance(moves[0], Rerun) for moves in programs[0])
        self.barriers: dict[tuple[int, ...], list[int]] = defaultdict(list)  # the ranks that have arrived
        self.seen = [[0] * size if self.shared else [] for _ in range(size)]  # rounds of others that are over, for each
        self.writers: dict[tuple[int, int], LastUse] = {}
        self.readers: dict[tuple[int, int], dict[int, int]] = defaultdict(dict)  # since then, with their rounds

    def run(self) -> None:
        ready = list(range(len(self.programs)))
        for rank in list(ready):
            ready += self.post(rank)
        while ready:
            rank = ready.pop()
            while self.rounds[rank] < len(self.programs[rank]) and not self.pending[rank]:
                self.land(rank)
                ready.extend(self.post(rank))
        stuck = [rank for rank, at in enumerate(self.rounds) if at < len(self.programs[rank])]
        if stuck:
            raise ContractError("deadlock: " + "; ".join(self.where(rank) for rank in stuck[:4]))

    def check_result(self, rank: int) -> None:
        for chunk, value in self.after[rank].items():
            if self.vectors[rank].get(chunk) != value:
                raise ContractError(
                    f"{self.name}: rank {rank} ends with "
                    f"{self.vectors[rank].get(chunk, 'nothing')} in [{chunk}], must be {value}"
                )

    def post(self, rank: int) -> list[int]:
        """Post the current round; return the peers that can now proceed."""
        if self.rounds[rank] == len(self.programs[rank]):
            return []
        moves = self.programs[rank][self.rounds[rank]]
        self.check_disjoint(rank, moves)
        self.pending[rank] = sum(isinstance(m, Send | Recv | RecvReduce | Barrier) for m in moves)
        return [peer for move in moves for peer in self.post_move(rank, move)]

    def post_move(self, rank: int, move: Move | Rerun) -> list[int]:
        match move:
            case Send(to, _):
                return self.post_message(rank, move, self.sends, self.receives, (rank, to))
            case Recv(source, _) | RecvReduce(source, _):
                return self.post_message(rank, move, self.receives, self.sends, (source, rank))
            case Barrier(ranks):
                return self.arrive(rank, move, ranks)
            case Copy(source, run):
                self.bring(rank, rank, source, rank, run, move)
            case Get(source, theirs, run):
                self.bring(rank, source, theirs, rank, run, move)
            case Put(to, run, theirs):
                self.bring(rank, rank, run, to, theirs, move)
            case GetReduce(sources, theirs, run):
                for here, there in zip(run, theirs, strict=True):
                    values = [self.value(rank, source, there, move) for source in sources]
                    if len({value.chunk for value in values}) > 1:
                        raise ContractError(f"{self.at(rank)} reduces {' and '.join(map(str, values))} in [{there}]")
                    self.landings[rank].append(Landing(rank, here, reduce(partial(self.reduced, rank), values)))
            case Rerun():
                self.rerun(rank)
        return []

    def rerun(self, rank: int) -> None:
        """Take the result, and overwrite the caller's memory: a race if another rank still reads it."""
        self.check_result(rank)
        self.landings[rank] += [Landing(rank, c, v) for c, v in self.before[rank].items()]

    def bring(self, rank: int, source: int, run: range, to: int, target: range, move: Move) -> None:
        values = [self.value(rank, source, c, move) for c in run]
        self.landings[rank] += [Landing(to, c, v) for c, v in zip(target, values, strict=True)]

    def post_message(self, rank: int, move, mine, theirs, key: tuple[int, int]) -> list[int]:
        if not theirs[key]:
            mine[key].append(Message(rank, move))
            return []
        other = theirs[key].popleft()
        send, receive = (Message(rank, move), other) if isinstance(move, Send) else (other, Message(rank, move))
        self.deliver(send, receive)
        return [other.rank]

    def arrive(self, rank: int, move: Barrier, ranks: tuple[int, ...]) -> list[int]:
        if rank not in ranks or rank in self.barriers[ranks]:
            raise ContractError(f"{self.at(rank)} would {show(move)}, " + ("twice" if rank in ranks else "uninvited"))
        self.barriers[ranks].append(rank)
        if len(self.barriers[ranks]) < len(ranks):
            return []
        del self.barriers[ranks]
        clock = [max(column) for column in zip(*(self.seen[r] for r in ranks), strict=True)]
        news = 0
        for member in ranks:
            clock[member] = self.rounds[member]
            news |= self.heard[member]
        for member in ranks:
            self.seen[member] = clock
            self.news[member] |= news
            self.pending[member] -= 1
        return [member for member in ranks if member != rank]

    def deliver(self, send: Message, receive: Message) -> None:
        if len(send.move.run) != len(receive.move.run):
            raise ContractError(
                f"{self.at(receive.rank)} would {show(receive.move)}, which sends {show_run(send.move.run)}"
            )
        values = [self.value(send.rank, send.rank, c, send.move) for c in send.move.run]
        to, source = receive.rank, send.rank if isinstance(receive.move, RecvReduce) else None
        self.landings[to] += [Landing(to, c, v, source) for c, v in zip(receive.move.run, values, strict=True)]
        self.news[receive.rank] |= self.heard[send.rank]
        self.pending[send.rank] -= 1
        self.pending[receive.rank] -= 1

    def value(self, rank: int, owner: int, chunk: int, move) -> Value:
        """Return the value that `rank` reads in a chunk of `owner`'s."""
        if chunk not in self.vectors[owner]:
            whose = "" if owner == rank else f", where rank {owner}"
            raise ContractError(f"{self.at(rank)} would {show(move)}{whose or ', but'} holds nothing in [{chunk}]")
        if self.shared:
            writer = self.writers.get((owner, chunk))
            if writer and not self.is_over(writer, rank):
                late = f"which rank {writer.rank} may still write"
                raise ContractError(f"race: {self.at(rank)} would {show(move)}, {late}")
            self.readers[owner, chunk][rank] = self.rounds[rank]
        return self.vectors[owner][chunk]

    def is_over(self, use: LastUse, rank: int) -> bool:
        """Return whether `rank` knows that a use is over."""
        return use.rank == rank or use.round < self.seen[rank][use.rank]

    def land(self, rank: int) -> None:
        """End the current round: received chunks take effect."""
        for owner, chunk, value, source in self.in_order_of_moves(rank):
            vector = self.vectors[owner]
            if source is not None:
                own = vector.get(chunk)
                if own is None or own.chunk != value.chunk:
                    raise ContractError(f"{self.at(rank)} reduces {value} into {own or 'nothing'} in [{chunk}]")
                value = self.reduced(rank, value, own) if source < rank else self.reduced(rank, own, value)
            if self.shared:
                self.write(rank, owner, chunk)
            vector[chunk] = value
        self.landings[rank] = []
        self.heard[rank] |= self.news[rank]
        self.rounds[rank] += 1

    def in_order_of_moves(self, rank: int) -> list[Landing]:
        """Return the values of a round: of those that are reduced into one chunk, the first move's first."""
        landings = self.landings[rank]
        if self.in_order and len(landings) > 1:
            sources = [m.source for m in self.programs[rank][self.rounds[rank]] if isinstance(m, RecvReduce)]
            landings.sort(key=lambda landing: -1 if landing.source is None else sources.index(landing.source))
        return landings

    def reduced(self, rank: int, left: Value, right: Value) -> Value:
        if self.in_order:
            last = right.ranks.bit_length() // BITS
            if (left.ranks, right.ranks) != (contributions(range(last)), contributions((last,))):
                raise ContractError(f"{self.at(rank)} adds {right} to {left}: not in the order of the ranks")
        ranks = left.ranks + right.ranks
        if ranks & self.too_often:
            raise ContractError(f"{self.at(rank)} adds a rank {1 << BITS - 1} times or more to chunk {left.chunk}")
        return Value(left.chunk, ranks)

    def write(self, rank: int, owner: int, chunk: int) -> None:
        readers = [LastUse(*reader) for reader in self.readers.pop((owner, chunk), {}).items()]
        writer = self.writers.get((owner, chunk))
        for use in [*readers, *([writer] if writer else [])]:
            if not self.is_over(use, rank):
                verb = "write" if use is writer else "read"
                raise ContractError(
                    f"race: {self.at(rank)} writes [{chunk}] of rank {owner}, which rank {use.rank} may still {verb}"
                )
        self.writers[owner, chunk] = LastUse(rank, self.rounds[rank])

    def check_disjoint(self, rank: int, moves: Round) -> None:
        """Refuse a chunk written twice in a round, or while it is read; RecvReduces write after all Sends, in turn."""
        writers: dict[int, object] = {}
        for move in moves:
            for chunk in move.run if isinstance(move, Recv | RecvReduce | Copy | Get | GetReduce) else ():
                if chunk in writers and not (isinstance(move, RecvReduce) and isinstance(writers[chunk], RecvReduce)):
                    raise ContractError(f"{self.at(rank)} writes [{chunk}] twice: {show(move)}")
                writers[chunk] = move
        for reader in moves:
            for chunk in own_reads(rank, reader):
                writer = writers.get(chunk)
                late = isinstance(reader, Send) and isinstance(writer, RecvReduce)  # a reduction writes after all sends
                in_place = writer is reader and not isinstance(reader, Copy)
                if writer is not None and not late and not in_place:
                    raise ContractError(f"{self.at(rank)} writes [{chunk}] while it would {show(reader)}")

    def at(self, rank: int) -> str:
        return f"rank {rank} in round {self.rounds[rank]}"

    def where(self, rank: int) -> str:
        unmatched = [
            m.move for queue in (*self.sends.values(), *self.receives.values()) for m in queue if m.rank == rank
        ]
        barriers: list[Move] = [Barrier(ranks) for ranks, here in self.barriers.items() if rank in here]
        return f"{self.at(rank)} waits to {', '.join(map(show, [*unmatched, *barriers]))}"


class JoinedWorld(World):
    """A symbolic run with chunks that stand for several: each message must be received where it was sent from."""

    def deliver(self, send: Message, receive: Message) -> None:
        if send.move.run != receive.move.run:
            raise ContractError("chunks change their places")
        super().deliver(send, receive)


def own_reads(rank: int, move: Move) -> range:
    """Return the chunks of its own vector that a rank's move reads."""
    match move:
        case Send(_, run) | Copy(run, _) | Put(_, run, _):
            return run
        case Get(source, theirs, _) if source == rank:
            return theirs
        case GetReduce(sources, theirs, run) if rank in sources and theirs != run:
            return theirs
    return range(0)
