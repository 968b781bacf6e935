"""Exercises whose schedules are rounds of messages: their instances, their proof and their price."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from collectives.algorithms.algorithm import Groups
from collectives.schedule.moves import Round, Schedule, render
from collectives.schedule.proof import Value, Vector, World, after, before
from collectives.schedule.spec import spec_of
from teaching.exercise.exercise import Exercise, Instance, MistakeError, counted
from teaching.exercise.explain import check_results
from teaching.exercise.history import follow
from teaching.exercise.messages import check_messages, check_moves, to_round
from teaching.exercise.price import BETWEEN, MEASURES, prices

LARGEST, PRICED, DRAWN = 16, 8, 8  # ranks
NODES: tuple[Groups, ...] = tuple(
    tuple(tuple(range(node * length, (node + 1) * length)) for node in range(count))
    for count, length in ((1, 2), (2, 1), (2, 2), (2, 3), (3, 2), (4, 2), (2, 4), (4, 4))
)
PRICED_NODES = NODES[-2]
STEPS = (
    "Yield the rank's rounds, each a tuple of moves: Send(to, run), Recv(source, run), which replaces what is there, "
    "RecvReduce(source, run), which adds to it, and Copy(source_run, run).  A run is a range of chunks; chunk(i, size) "
    "is chunk i, counted round the ring.  A message has both its ends in one round, and carries what was there before "
    "it.  Yield () in a round in which the rank has nothing to do."
)


@dataclass
class MessageExercise(Exercise):
    """An exercise on the schedule of a collective, beside an algorithm of the library's own."""

    name: str
    title: str
    idea: str
    collective: str
    algorithm: Callable[..., Schedule]
    textbook: str
    powers: bool = False  # powers of two only
    nodes: bool = False

    imports = "from collectives.schedule.moves import Copy, Recv, RecvReduce, Send, chunk"
    steps = STEPS

    def __post_init__(self) -> None:
        self.spec = spec_of(self.collective)
        self.measures = (*MEASURES, BETWEEN) if self.nodes else MEASURES
        self.function = self.collective
        self.parameters = "rank, size" + ", root" * self.spec.rooted + ", nodes" * self.nodes
        if self.nodes:
            self.instances = [node_instance(nodes) for nodes in NODES]
            self.tried = f"{len(NODES)} divisions into nodes, of up to {LARGEST} ranks"
            priced = node_instance(PRICED_NODES)
        else:
            sizes = [size for size in range(1, LARGEST + 1) if not self.powers or size & (size - 1) == 0]
            roots = [range(size) if self.spec.rooted else [None] for size in sizes]
            self.instances = [
                rank_instance(size, root) for size, some in zip(sizes, roots, strict=True) for root in some
            ]
            self.tried = f"1 to {LARGEST} ranks" + ", powers of two" * self.powers
            priced = rank_instance(PRICED, 0 if self.spec.rooted else None)
        self.priced = priced._replace(words=f"{priced.words}, a vector of {PRICED} MiB")

    def contract(self) -> str:
        size = 4 if self.nodes or self.powers else 3
        tables = [[cells(state(self.spec, rank, size, 0)) for rank in range(size)] for state in (before, after)]
        width = max(len(cell) for table in tables for row in table for cell in row)
        lines = [f"On {size} ranks, where b2 is rank 1's chunk 2, the vectors hold"]
        for words, table in zip(("before", "after"), tables, strict=True):
            rows = ["  ".join(f"{cell:{width}}" for cell in row) or "anything" for row in table]
            lines += [f"{words:6}  rank {rank}  {row}".rstrip() for rank, row in enumerate(rows)]
        return "\n".join(lines)

    def step(self, value: Any) -> Round:
        return to_round(value)

    def check(self, instance: Instance, schedules: list[list[Round]]) -> None:
        spec, size = self.spec, instance.num_ranks
        root = instance.arguments[1] if spec.rooted else 0
        programs = padded(schedules)
        for index in range(len(programs[0])):
            for rank, rounds in enumerate(programs):
                check_moves(rank, index, rounds[index], size, 2 * size if spec.exchanges else size)
            check_messages(index, programs)
        start, goal = ([state(spec, rank, size, root) for rank in range(size)] for state in (before, after))
        world = World(instance.words, programs, start, goal, in_order=False)
        try:
            check_results(spec, world, follow(world))
        except MistakeError as mistake:
            if size <= DRAWN:
                mistake.picture = render(lambda rank, size: programs[rank], size)
            raise

    def book(self) -> list[list[Round]]:
        return [list(self.algorithm(rank, *self.priced.arguments)) for rank in range(self.priced.num_ranks)]

    def costs(self, schedules: list[list[Round]]) -> list[float]:
        return prices(padded(schedules), nodes=self.priced.arguments[1] if self.nodes else ())


def rank_instance(size: int, root: int | None) -> Instance:
    words = counted(size, "rank")
    return Instance(size, (size,), words) if root is None else Instance(size, (size, root), f"{words}, root {root}")


def node_instance(nodes: Groups) -> Instance:
    size = sum(map(len, nodes))
    return Instance(size, (size, nodes), f"{size} ranks in nodes of {len(nodes[0])}")


def cells(vector: Vector) -> list[str]:
    """Write a rank's chunks: a letter for each contributing rank, with the chunk's number; a dot for nothing."""
    values = [vector.get(chunk) for chunk in range(1 + max(vector, default=-1))]
    return [symbols(value) if value else "." for value in values]


def symbols(value: Value) -> str:
    return "+".join(f"{chr(ord('a') + rank)}{value.chunk}" for rank in value.counts)


def padded(schedules: list[list[Round]]) -> list[list[Round]]:
    """Return all ranks' rounds, as many of each: a rank whose function ends early has nothing to do at the end."""
    longest = max(map(len, schedules))
    return [rounds + [()] * (longest - len(rounds)) for rounds in schedules]
