"""Groups of ranks: nodes, and the ranks of a node that stand in for those of other nodes.

Building blocks of hierarchical algorithms: `inside` runs a schedule in every node, `Grid.cross` an algorithm among the
counterparts of all nodes.  A *lane* is a subset of the chunks, on which an algorithm works independently.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise, zip_longest
from typing import NamedTuple

from collectives.algorithms import direct, ring
from collectives.algorithms.algorithm import Groups
from collectives.algorithms.pairwise import reduce_scatter as pairwise_reduce_scatter
from collectives.schedule.moves import MESSAGES, Barrier, Round, Schedule, embed, laid

Scheduler = Callable[..., Schedule]

# Schedulers of ranks that read each other's memory, and so must be on one node.
DIRECT = (direct.reduce_scatter, direct.all_gather)
# Schedulers that send a rank one chunk in a round.  Others may send it two runs, of any length.
ONE_BY_ONE = (ring.reduce_scatter, ring.all_gather, ring.all_reduce, pairwise_reduce_scatter, *DIRECT)


class Task(NamedTuple):
    """One execution of an algorithm: its ranks, and the runs that are its chunks.

    Two ranks share at most one task of each `turn`.
    """

    turn: int
    ranks: Sequence[int]
    runs: Sequence[range]


class Grid:
    """The groups as rows of the length of the largest: the ranks of a column are counterparts.

    In smaller groups one rank serves several adjacent columns; its home column is the first.

    >>> Grid(((0, 1, 2), (3, 4))).rows
    [[0, 1, 2], [3, 3, 4]]
    """

    def __init__(self, groups: Groups):
        lengths = sorted(map(len, groups))
        width, second = lengths[-1], lengths[:2][-1]
        self.rows = [[ranks[place * len(ranks) // width] for place in range(width)] for ranks in groups]
        self.columns = list(zip(*self.rows, strict=True))
        self.home = {rank: place for row in self.rows for place, rank in reversed([*enumerate(row)])}
        self.in_common = -(-width // second)  # the most columns that two ranks of different groups share

    def order(self) -> tuple[int, ...]:
        """Return all ranks, column by column."""
        return tuple(r for place, column in enumerate(self.columns) for r in column if self.home[r] == place)

    def row_of(self, rank: int) -> list[int]:
        return next(row for row in self.rows if rank in row)

    def stand_ins(self, rank: int, owner: Sequence[int]) -> list[int]:
        """Return, for each chunk, the stand-in for its owner in `rank`'s group: the owner itself, if it is there."""
        row = self.row_of(rank)
        return [row[self.home[other]] for other in owner]

    def sets(self, place: int, chunks_of: dict[int, list[int]]) -> list[list[int]]:
        """Return the chunks of each rank of a column; none for a rank whose home is another column."""
        return [chunks_of.get(rank, []) if self.home[rank] == place else [] for rank in self.columns[place]]

    def cross(self, rank: int, owner: Sequence[int], algorithm: Scheduler) -> Iterator[Round]:
        """Run an algorithm in every column, on the chunks of the owners at home there, each for its owner's row."""
        chunks_of, tasks = by_owner(owner), []
        for place, column in enumerate(self.columns):
            sets = self.sets(place, chunks_of)
            lanes = lanes_of_pieces(sets) if algorithm in ONE_BY_ONE else lanes_in_order(sets)
            turns = [nth * self.in_common + place % self.in_common for nth in range(len(lanes))]
            tasks += [Task(turn, column, runs) for turn, runs in zip(turns, lanes, strict=True)]
        return abreast(rank, tasks, algorithm)


def singles(ranks: Iterable[int]) -> Groups:
    return tuple((rank,) for rank in ranks)


def whole(groups: Groups | None, size: int) -> Groups:
    """Return the nodes, or all ranks as one group where no node has several ranks."""
    groups = groups or (tuple(range(size)),)
    assert sorted(chain(*groups)) == list(range(size)), f"{groups} are not ranks 0 to {size - 1}, each once"
    return groups if max(map(len, groups)) > 1 else (tuple(chain(*groups)),)


def by_owner(owner: Sequence[int]) -> dict[int, list[int]]:
    """Return the chunks that each rank owns."""
    chunks_of: dict[int, list[int]] = {}
    for chunk, rank in enumerate(owner):
        chunks_of.setdefault(rank, []).append(chunk)
    return chunks_of


def group_of(rank: int, groups: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    return next(group for group in groups if rank in group)


def inside(rank: int, groups: Groups, schedule: Callable[[int, tuple[int, ...]], Schedule]) -> Iterator[Round]:
    """Yield the schedule of the rank's own group, padded with empty rounds to the length of the others'."""
    own = group_of(rank, groups)
    rounds = list(schedule(rank, own))
    others = {len(group): group for group in groups if len(group) != len(own)}
    longest = max((len(list(schedule(group[0], group))) for group in others.values()), default=0)
    yield from rounds
    yield from (() for _ in range(longest - len(rounds)))


def abreast(rank: int, tasks: Iterable[Task], algorithm: Scheduler) -> Iterator[Round]:
    """Run an algorithm for many tasks: as many turns at once as a round allows messages between two ranks."""
    tasks = list(tasks)
    size = len(tasks[0].ranks)
    length = len(list(algorithm(0, size)))
    last = max(task.turn for task in tasks)
    at_once = 1 + last if algorithm in DIRECT else MESSAGES if algorithm in ONE_BY_ONE else MESSAGES // 2
    for first in range(0, 1 + last, at_once):
        mine = [task for task in tasks if task.turn in range(first, first + at_once) and rank in task.ranks]
        schedules = [embed(algorithm(task.ranks.index(rank), size), task.ranks, task.runs) for task in mine]
        for moves in zip([()] * length, *schedules, strict=True):
            joined = tuple(chain(*moves))
            yield joined[:1] if joined and isinstance(joined[0], Barrier) else joined  # once for all tasks


def consecutive(numbers: Sequence[int]) -> list[range]:
    """Group numbers into runs of consecutive ones, in their order.

    >>> consecutive([4, 5, 0, 1])
    [range(4, 6), range(0, 2)]
    """
    breaks = [place for place, (a, b) in enumerate(pairwise(numbers), 1) if b != a + 1]
    parts = [numbers[a:b] for a, b in pairwise([0, *breaks, len(numbers)])]
    return [range(part[0], part[-1] + 1) for part in parts if part]


def lanes_of_pieces(sets: Sequence[Sequence[int]]) -> list[list[range]]:
    """Return lanes that have a run of each set, for algorithms that never send the chunks of two sets as one run.

    >>> lanes_of_pieces([[0, 1, 4], [2, 3]])
    [[range(0, 2), range(2, 4)], [range(4, 5), range(0, 0)]]
    """
    return [list(runs) for runs in zip_longest(*map(consecutive, sets), fillvalue=range(0))]


def lanes_in_order(sets: Sequence[Sequence[int]]) -> list[list[range]]:
    """Return lanes in which the runs of the sets follow each other without a gap.

    >>> lanes_in_order([[0, 1, 4], [2, 3, 6]])
    [[range(0, 2), range(2, 4)], [range(4, 5), range(5, 5)], [range(6, 6), range(6, 7)]]
    """
    placed = sorted((chunk, nth) for nth, chunks in enumerate(sets) for chunk in chunks)
    breaks = [i for i, (a, b) in enumerate(pairwise(placed), 1) if b[0] != a[0] + 1 or b[1] < a[1]]
    lanes = []
    for start, stop in pairwise([0, *breaks, len(placed)]):
        lengths = Counter(nth for _, nth in placed[start:stop])
        lanes.append(laid(placed[start][0], (lengths[nth] for nth in range(len(sets)))))
    return lanes


@dataclass(frozen=True)
class Topology:
    """The nodes of ranks: `node_of[r]` is rank r's; nodes are numbered in the order of their first rank."""

    node_of: tuple[int, ...]

    @classmethod
    def from_ids(cls, ids: Sequence[int]) -> "Topology":
        """Make a topology from numbers that are the same on the ranks of a node.

        >>> Topology.from_ids([7, 7, 3, 3]).nodes
        ((0, 1), (2, 3))
        """
        order = {node: number for number, node in enumerate(dict.fromkeys(ids))}
        return cls(tuple(order[node] for node in ids))

    @property
    def nodes(self) -> Groups:
        """The ranks of each node."""
        return tuple(
            tuple(rank for rank, at in enumerate(self.node_of) if at == node) for node in range(max(self.node_of) + 1)
        )

    @property
    def is_flat(self) -> bool:
        """Whether all ranks are one node, or each is one of its own."""
        return max(self.node_of) in (0, len(self.node_of) - 1)

    @property
    def has_groups_in_nodes(self) -> bool:
        """Whether some node has several ranks.

        >>> [Topology.from_ids(nodes).has_groups_in_nodes for nodes in ([0, 0, 1], [0, 1, 2])]
        [True, False]
        """
        return max(self.node_of) < max(1, len(self.node_of) - 1)
