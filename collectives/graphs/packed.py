"""Schedules of trees that are packed for a graph, as objects that run, prove and draw like any other schedule."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import NamedTuple

from collectives.graphs import transit
from collectives.graphs.bound import bound_s_per_byte
from collectives.graphs.graph import LinkGraph
from collectives.graphs.rounds import HEIGHT, SHUFFLED, WAVE, Dag, Order, Planner, moves_of
from collectives.graphs.trees import Forest, pack
from collectives.schedule.moves import RecvReduce, Round, backwards

LONG_BYTES = 1 << 30  # of a vector, unless a caller names another length
NEAR = 0.97  # of the bound by cuts that trees should reach, before chunks are cut smaller
CLOSE, FAST, GOOD = 1e-3, 0.95, 0.8  # what is not worth a longer search, nor another kind of schedule
FEW = 8  # trees from each root that may be nearly good enough
ORDERS = (HEIGHT, WAVE)
ORDERS_OF_SWITCHES = (SHUFFLED[0], WAVE, SHUFFLED[1])
FINALISTS = 3  # of the first schedules, that are tried with other chunks
FIRST_MESSAGES, FIRST_CHUNKS = 1500, 128  # of the first schedules that are tried
TREES = (1, 2, 3, 4, 6, 8, 12, 13, 16, 18, 24)  # from each root
MOST_MESSAGES = 70_000  # of one chunk, in a schedule


@dataclass(frozen=True, eq=False)
class Packed:
    """A schedule for one graph: callable with a rank, as algorithms are, and the vector is cut into `num_chunks`.

    >>> from collectives.graphs.shapes import ring
    >>> from collectives.schedule.moves import render
    >>> schedule = packed(ring(3), "all_gather", chunks_per_rank=1)
    >>> print(render(schedule, 3))
    round 0:  0->1 [0]   0->2 [0]   1->0 [1]   1->2 [1]   2->0 [2]   2->1 [2]
    >>> schedule.num_chunks, f"{schedule.efficiency(256 << 20):.3f}"
    (3, '1.000')
    """

    graph: LinkGraph
    collective: str
    root: int
    num_chunks: int
    rounds: Sequence[Sequence[Round]]  # of each rank
    bound_s_per_byte: float
    trees_s_per_byte: float  # of the busiest link, if it were busy all the time

    def __call__(self, rank: int, size: int, root: int | None = None) -> Iterator[Round]:
        """Yield a rank's rounds.

        Raises: ValueError for another number of ranks or another root than those that it is for.
        """
        if size != self.graph.size:
            raise ValueError(f"this schedule is for {self.graph.size} ranks, not {size}: pack one for their graph")
        if root not in (None, self.root):
            raise ValueError(f"this schedule is for root {self.root}, not {root}: pack one for that root")
        return iter(self.rounds[rank])

    @property
    def num_rounds(self) -> int:
        return len(self.rounds[0])

    def seconds(self, nbytes: float) -> float:
        """Return the simulated time for a vector of `nbytes`."""
        return transit.seconds(self.graph, self.rounds.__getitem__, nbytes / self.num_chunks, self.graph.routes())

    def efficiency(self, nbytes: float) -> float:
        """Return the bound as a fraction of the simulated time."""
        return self.bound_s_per_byte * nbytes / self.seconds(nbytes)


def packed(
    graph: LinkGraph, collective: str, root: int = 0, chunks_per_rank: int | None = None, nbytes: int = LONG_BYTES
) -> Packed:
    """Pack trees for a collective; into as many chunks as are best for a vector of `nbytes`, by default.

    Of a broadcast, `chunks_per_rank` is the number of all chunks.

    Raises: ValueError for a collective without trees, a root out of range, or chunks that are too few or many.
    """
    if not 0 <= root < graph.size:
        raise ValueError(f"root={root} is out of range: there are ranks 0 to {graph.size - 1}")
    bound = bound_s_per_byte(graph, collective, root)
    packers: list[Packer | TwoPhases] = [Packer(graph, collective, root, bound)]
    if chunks_per_rank is not None and not 1 <= chunks_per_rank <= packers[0].most:
        raise ValueError(f"chunks_per_rank={chunks_per_rank} must be from 1 to {packers[0].most}")
    if collective == "all_reduce" and (phases := TwoPhases(graph, bound)).is_good:
        packers.insert(0, phases)
    return fastest(packers, bound, nbytes, chunks_per_rank)


def most_chunks(graph: LinkGraph, collective: str) -> int:
    """Return the most chunks a rank, for schedules that are still quick to compute and to prove."""
    roots = 1 if collective == "broadcast" else graph.size
    messages = (graph.size - 1) * roots * (2 if collective == "all_reduce" else 1)
    return max(1, MOST_MESSAGES // messages)


class Manner(NamedTuple):
    """How trees are grown: with a root that rarely sends twice; as low as the bound allows, or over empty links."""

    thrifty: bool
    shallow: bool


class Packer:
    """Schedules of one collective on one graph, with more or fewer chunks."""

    def __init__(self, graph: LinkGraph, collective: str, root: int, bound: float):
        self.graph, self.collective, self.root, self.bound = graph, collective, root, bound
        self.reversed = collective == "reduce_scatter"
        self.forward = graph.transposed() if self.reversed else graph
        self.roots = [root] if collective == "broadcast" else list(range(graph.size))
        self.manners = [Manner(False, True), Manner(False, False)]
        if collective == "broadcast":
            self.manners = [Manner(True, True), Manner(True, False), Manner(False, False)]
        self.forests: dict[tuple[int, Manner], Forest] = {}
        self.most = most_chunks(graph, collective)

    def forest(self, trees: int, manner: Manner) -> Forest:
        """Return a number of trees from each root."""
        if (trees, manner) not in self.forests:
            enough = self.bound * 1e9 * trees * len(self.roots)
            both = self.collective == "all_reduce"
            self.forests[trees, manner] = pack(self.forward, self.roots * trees, enough, both, *manner)
        return self.forests[trees, manner]

    def quality(self, trees: int, manner: Manner) -> float:
        """Return the bound as a fraction of the time of the busiest link."""
        return self.bound * 1e9 * trees * len(self.roots) / self.forest(trees, manner).seconds

    def best_trees(self, manner: Manner, chunks: int | None = None) -> int:
        """Return the number of trees that are good enough: the fewest that are as good as the bound, or nearly.

        With a number of chunks a rank, a divisor of it.
        """
        counts = sorted({*TREES, *self.turns()})
        if manner.shallow and self.graph.switches and self.turns():
            counts = self.turns()
        qualities: dict[int, float] = {}
        for trees in counts if not chunks else [each for each in sorted({1, *counts}) if chunks % each == 0]:
            if trees <= self.most or not qualities:
                qualities[trees] = self.quality(trees, manner)
                if qualities[trees] > 1 - CLOSE or (trees >= FEW and max(qualities.values()) > NEAR):
                    break
        return max(qualities, key=qualities.__getitem__)

    def turns(self) -> list[int]:
        """Return the number of trees in which a broadcast's root can send once to each rank that it reaches."""
        return [len(self.forward.hops()[self.root])] if len(self.roots) == 1 else []

    def first_repeats(self, trees: int) -> int:
        """Return about as many chunks down a tree as a first try should have."""
        chunks = max(FIRST_MESSAGES // self.graph.size, FIRST_CHUNKS * (len(self.roots) == 1))
        return max(1, min(chunks // (trees * len(self.roots)), self.most // trees))

    def schedule(self, trees: int, repeats: int, manner: Manner, order: Order = HEIGHT) -> Packed:
        """Return the schedule of trees that each carry `repeats` chunks."""
        forest, each = self.forest(trees, manner), trees * repeats
        dag = Dag(forest)
        ups = 2 if self.collective == "all_reduce" else 1
        for number in range(trees * len(self.roots)):
            turn, owner = divmod(number, len(self.roots))
            up = forest.trees[ups * number + 1] if ups == 2 else None
            for repeat in range(repeats):
                chunk, wave = owner * each + turn * repeats + repeat, repeat * trees + turn
                dag.add(chunk, wave, forest.trees[ups * number], up)
        rounds = moves_of(Planner(dag, order, one_each=self.reversed).rounds(), self.graph.size)
        if self.reversed:
            rounds = [list(backwards(own, take=RecvReduce)) for own in rounds]
        busiest = forest.seconds * 1e-9 / (trees * len(self.roots))
        num_chunks = each * len(self.roots)
        return Packed(self.graph, self.collective, self.root, num_chunks, rounds, self.bound, busiest)


class TwoPhases:
    """A reduce-scatter, then an all-gather, both at their best: an all-reduce for graphs that both fill evenly."""

    collective = "all_reduce"

    def __init__(self, graph: LinkGraph, bound: float):
        each = bound_s_per_byte(graph, "reduce_scatter"), bound_s_per_byte(graph, "all_gather")
        names = "reduce_scatter", "all_gather"
        self.parts = [Packer(graph, name, 0, least) for name, least in zip(names, each, strict=True)]
        self.graph, self.bound, self.most, self.manners = graph, bound, self.parts[0].most // 2, self.parts[0].manners
        self.is_good = sum(each) < bound / NEAR

    def best_trees(self, manner: Manner, chunks: int | None = None) -> int:
        return self.parts[1].best_trees(manner, chunks)

    def first_repeats(self, trees: int) -> int:
        return self.parts[1].first_repeats(trees)

    def schedule(self, trees: int, repeats: int, manner: Manner, order: Order = HEIGHT) -> Packed:
        """Return the schedule of trees that each carry `repeats` chunks, up and down."""
        first, second = (part.schedule(trees, repeats, manner, order) for part in self.parts)
        rounds = [[*one, *other] for one, other in zip(first.rounds, second.rounds, strict=True)]
        busiest = first.trees_s_per_byte + second.trees_s_per_byte
        return replace(
            second, collective="all_reduce", rounds=rounds, bound_s_per_byte=self.bound, trees_s_per_byte=busiest
        )


def search(packer: Packer | TwoPhases, nbytes: int, chunks: int | None) -> Iterator[tuple[float, Packed]]:
    """Yield schedules with their seconds: with all manners and orders first, then with other chunks for the best.

    With a number of chunks a rank, only those that have as many.
    """

    def timed(trees: int, repeats: int, manner: Manner, order: Order) -> tuple[float, Packed]:
        schedule = packer.schedule(trees, repeats, manner, order)
        return schedule.seconds(nbytes), schedule

    orders = ORDERS_OF_SWITCHES if packer.graph.switches else ORDERS
    probes: list[tuple[float, int, int, Manner, Order]] = []
    for manner in packer.manners:
        fewest = packer.best_trees(manner, chunks)
        doubled = not chunks and packer.collective != "broadcast" and 2 * fewest <= packer.most
        for trees in (fewest, 2 * fewest) if doubled else (fewest,):
            firsts = [chunks // trees] if chunks else sorted({1, packer.first_repeats(trees)})
            for first, order in product(firsts, orders):
                taken, schedule = timed(trees, first, manner, order)
                yield taken, schedule
                probes.append((taken, trees, first, manner, order))
    probes.sort(key=lambda probe: probe[0])
    for best, trees, first, manner, order in probes[:FINALISTS] if not chunks else ():
        for factor in (2.0, 0.5):
            least, repeats = best, int(first * factor)
            while 1 <= trees * repeats <= packer.most:
                taken, schedule = timed(trees, repeats, manner, order)
                yield taken, schedule
                if taken > least * 1.02:
                    break
                least, repeats = min(taken, least), int(repeats * factor)


def fastest(packers: Sequence[Packer | TwoPhases], bound: float, nbytes: int, chunks: int | None) -> Packed:
    """Return the fastest schedule of some packers', or the first one that is fast enough."""
    best: tuple[float, Packed] | None = None
    for packer in packers:
        for taken, schedule in search(packer, nbytes, chunks):
            if best is None or taken < best[0]:
                best = taken, schedule
            if bound * nbytes / best[0] > FAST:
                return best[1]
        if best and bound * nbytes / best[0] > GOOD:
            break
    assert best
    return best[1]
