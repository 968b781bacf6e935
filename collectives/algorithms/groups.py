"""Groups of ranks: nodes, hierarchies, and which rank of a group stands in for which of the others of its level.

What hierarchical algorithms are made of: `inside` runs a schedule in every group, `Grid.cross` an algorithm among the
counterparts of all groups.  A *lane* is a part of the chunks that an algorithm works on by itself.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, chain, zip_longest
from itertools import pairwise as neighbours
from operator import index
from typing import Any, NamedTuple

from collectives.algorithms import direct, pairwise, ring
from collectives.algorithms.algorithm import Group, Groups
from collectives.schedule.moves import MESSAGES, Barrier, Round, Schedule, embed

Scheduler = Callable[..., Schedule]
Schedulers = Sequence[Scheduler]

# Schedulers that read each other's memory, and so must have a node to themselves.
DIRECT = (direct.reduce_scatter, direct.all_gather)
# Schedulers that move a rank one chunk in a round.  Others may send it two runs, of any length.
ONE_BY_ONE = (ring.reduce_scatter, ring.all_gather, ring.all_reduce, pairwise.reduce_scatter, *DIRECT)


class Task(NamedTuple):
    """Ranks among which an algorithm is to run, and the runs that are its chunks.

    No two ranks have more than one task of a `turn` in common.
    """

    turn: int
    ranks: Sequence[int]
    runs: Sequence[range]


class Grid:
    """The groups of a level as rows, as long as the largest of them: the ranks of a column are counterparts.

    A rank of a smaller group stands in several columns, side by side, and is at home in the first of them.

    >>> Grid(((0, 1, 2), (3, 4))).rows
    [[0, 1, 2], [3, 3, 4]]
    """

    def __init__(self, groups: Groups):
        members = [order(group) for group in groups]
        lengths = sorted(map(len, members))
        width, second = lengths[-1], lengths[:2][-1]
        self.rows = [[ranks[place * len(ranks) // width] for place in range(width)] for ranks in members]
        self.columns = list(zip(*self.rows, strict=True))
        self.home = {rank: place for row in self.rows for place, rank in reversed([*enumerate(row)])}
        self.in_common = -(-width // second)  # the most columns that two ranks of different groups share

    def order(self) -> tuple[int, ...]:
        """Return all ranks, column by column."""
        return tuple(r for place, column in enumerate(self.columns) for r in column if self.home[r] == place)

    def row_of(self, rank: int) -> list[int]:
        return next(row for row in self.rows if rank in row)

    def stand_ins(self, rank: int, owner: Sequence[int]) -> list[int]:
        """Return the rank of `rank`'s group that stands in for each chunk's owner: the owner itself, if it is there."""
        row = self.row_of(rank)
        return [row[self.home[other]] for other in owner]

    def sets(self, place: int, held: dict[int, list[int]]) -> list[list[int]]:
        """Return what each rank of a column holds that belongs there."""
        return [held.get(rank, []) if self.home[rank] == place else [] for rank in self.columns[place]]

    def cross(self, rank: int, owner: Sequence[int], algorithm: Scheduler) -> Iterator[Round]:
        """Run an algorithm in every column, on the chunks that are owned there; the owner's row says whose they are."""
        held, tasks = by_owner(owner), []
        for place, column in enumerate(self.columns):
            sets = self.sets(place, held)
            lanes = lanes_of_pieces(sets) if algorithm in ONE_BY_ONE else lanes_in_order(sets)
            turns = [nth * self.in_common + place % self.in_common for nth in range(len(lanes))]
            tasks += [Task(turn, column, runs) for turn, runs in zip(turns, lanes, strict=True)]
        return abreast(rank, tasks, algorithm)


@lru_cache(maxsize=4096)
def order(group: Group) -> tuple[int, ...]:
    """Return the ranks of a group, counterparts side by side.

    >>> order(((0, 1), (2, 3)))
    (0, 2, 1, 3)
    """
    return (group,) if isinstance(group, int) else Grid(group).order()


def whole(groups: Groups | None, size: int) -> Groups:
    """Return the hierarchy without the levels that have a single group; one of all ranks where there is none."""
    least = simplified(groups or tuple(range(size)))
    assert sorted(order(least)) == list(range(size)), f"{groups} are not ranks 0 to {size - 1}, each once"
    return (least,) if isinstance(least, int) else least


def simplified(group: Group) -> Group:
    if isinstance(group, int):
        return group
    parts = tuple(map(simplified, group))
    return parts[0] if len(parts) == 1 else parts


def depth(group: Group) -> int:
    """Return how many levels a group has: 0 of a rank, 1 of an innermost group, all of whose members are ranks."""
    return 0 if isinstance(group, int) else 1 + max(map(depth, group))


def innermost(group: Group) -> list[tuple[int, ...]]:
    """Return the groups that have ranks only.

    >>> innermost((0, (1, (2, 3))))
    [(2, 3)]
    """
    if isinstance(group, int):
        return []
    ranks = tuple(child for child in group if isinstance(child, int))
    if len(ranks) == len(group):
        return [ranks]
    return [ranks for child in group for ranks in innermost(child)]


def of_level(group: Group, algorithms: Schedulers) -> Scheduler:
    """Return the algorithm for a group's level."""
    return algorithms[-min(depth(group), len(algorithms))]


def by_owner(owner: Sequence[int]) -> dict[int, list[int]]:
    """Return the chunks that each rank owns."""
    held: dict[int, list[int]] = {}
    for chunk, rank in enumerate(owner):
        held.setdefault(rank, []).append(chunk)
    return held


def group_of(rank: int, groups: Groups) -> Group:
    return next(group for group in groups if rank in order(group))


def shape(group: Group) -> Group:
    """Return what a group has in common with those that are built like it."""
    return 0 if isinstance(group, int) else tuple(map(shape, group))


def inside(rank: int, groups: Groups, schedule: Callable[[int, Group], Schedule]) -> Iterator[Round]:
    """The schedule of the rank's own group, and as many empty rounds as the others' takes longer."""
    own = group_of(rank, groups)
    rounds = list(schedule(rank, own))
    others = {shape(group): group for group in groups if shape(group) != shape(own)}
    longest = max((len(list(schedule(order(group)[0], group))) for group in others.values()), default=0)
    yield from rounds
    yield from (() for _ in range(longest - len(rounds)))


def abreast(rank: int, tasks: Iterable[Task], algorithm: Scheduler) -> Iterator[Round]:
    """Run an algorithm for many tasks, as many turns at once as two ranks may exchange messages in a round."""
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
    """Return numbers as runs, in their order.

    >>> consecutive([4, 5, 0, 1])
    [range(4, 6), range(0, 2)]
    """
    breaks = [place for place, (a, b) in enumerate(neighbours(numbers), 1) if b != a + 1]
    parts = [numbers[a:b] for a, b in neighbours([0, *breaks, len(numbers)])]
    return [range(part[0], part[-1] + 1) for part in parts if part]


def laid(begin: int, lengths: Iterable[int]) -> list[range]:
    """Return runs of these lengths, one after the other."""
    return [range(a, b) for a, b in neighbours(accumulate(lengths, initial=begin))]


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
    breaks = [i for i, (a, b) in enumerate(neighbours(placed), 1) if b[0] != a[0] + 1 or b[1] < a[1]]
    lanes = []
    for start, stop in neighbours([0, *breaks, len(placed)]):
        lengths = Counter(nth for _, nth in placed[start:stop])
        lanes.append(laid(placed[start][0], (lengths[nth] for nth in range(len(sets)))))
    return lanes


@dataclass(frozen=True)
class Topology:
    """The nodes of ranks: `node_of[r]` is rank r's; nodes are numbered in the order of their first rank.

    `levels` are the lengths of the groups of consecutive ranks, the outermost first, that take the nodes' place.
    """

    node_of: tuple[int, ...]
    levels: tuple[int, ...] = ()

    @classmethod
    def from_ids(cls, ids: Sequence[int], levels: Sequence[int] | None = None) -> "Topology":
        """Make one from any number that ranks of a node have in common.

        >>> Topology.from_ids([7, 7, 3, 3]).nodes
        ((0, 1), (2, 3))
        """
        order = {node: number for number, node in enumerate(dict.fromkeys(ids))}
        return cls(tuple(order[node] for node in ids), tuple(levels or ()))

    @property
    def nodes(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each node."""
        return tuple(
            tuple(rank for rank, at in enumerate(self.node_of) if at == node) for node in range(max(self.node_of) + 1)
        )

    @property
    def groups(self) -> Groups:
        """The hierarchy of ranks: by `levels`, if there are any, else the nodes.

        >>> Topology.from_ids([0] * 7, levels=[4, 2]).groups
        (((0, 1), (2, 3)), ((4, 5), (6,)))
        """
        return divided(range(len(self.node_of)), self.levels) if self.levels else self.nodes

    @property
    def is_flat(self) -> bool:
        """Whether all ranks are one group, or each is one of its own."""
        return depth(whole(self.groups, len(self.node_of))) <= 1

    @property
    def has_groups_in_nodes(self) -> bool:
        """Whether the hierarchy's innermost groups are parts of nodes.

        >>> [Topology.from_ids(nodes).has_groups_in_nodes for nodes in ([0, 0, 1], [0, 1, 2])]
        [True, False]
        """
        return all(
            len({self.node_of[rank] for rank in ranks}) == 1
            for ranks in innermost(whole(self.groups, len(self.node_of)))
        )


def divided(ranks: Sequence[int], levels: Sequence[int]) -> Groups:
    """Divide consecutive ranks into groups of `levels[0]`, and so on inside; the last group may be smaller."""
    if not levels:
        return tuple(ranks)
    length, *below = levels
    return tuple(divided(ranks[first : first + length], below) for first in range(0, len(ranks), length))


def refuse_levels(levels: Any) -> str:
    """Return what is wrong with a caller's `levels`, if anything is.

    >>> refuse_levels([4, 4])[:67]
    'levels=[4, 4] must be positive integers, each smaller than the one '
    """
    try:
        lengths = [index(length) for length in levels] if levels is not None else [1]
    except TypeError:  # what is not a sequence, or not of integers
        lengths = []
    if lengths and lengths[-1] > 0 and all(outer > inner for outer, inner in neighbours(lengths)):
        return ""
    return (
        f"{levels=} must be positive integers, each smaller than the one before: pass lengths of groups, the outermost "
        "first, as in [8, 4], or None for the nodes"
    )
