"""Groups of ranks: nodes, and the ranks of a node that are proxies for those of other nodes.

Building blocks of hierarchical algorithms: `within_groups` runs a schedule in every node, and `Grid.across_groups` an
algorithm among the counterparts of all nodes, as one task for each run of consecutive chunks.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import chain, count, groupby, zip_longest
from typing import NamedTuple, TypeVar

from collectives.algorithms import direct
from collectives.algorithms.algorithm import Groups, Scheduler
from collectives.schedule.moves import MESSAGES, Barrier, Round, Schedule, embed, even_runs, laid

G = TypeVar("G", bound=Sequence[int])


class Task(NamedTuple):
    """One execution of an algorithm: its ranks, and the runs that are its chunks.

    Two ranks share at most one task of each `turn`.
    """

    turn: int
    ranks: Sequence[int]
    runs: Sequence[range]


class Grid:
    """The groups as rows of the length of the largest: the ranks of a column are counterparts.

    In smaller groups one rank serves several adjacent columns.

    >>> Grid(((0, 1, 2), (3, 4))).rows
    [[0, 1, 2], [3, 3, 4]]
    """

    @classmethod
    @lru_cache(maxsize=4)
    def of(cls, groups: Groups) -> "Grid":
        """Return the grid of these groups, which many ranks ask for."""
        return cls(groups)

    def __init__(self, groups: Groups):
        lengths = sorted(map(len, groups))
        width, second = lengths[-1], lengths[:2][-1]
        self.rows = [[ranks[i * len(ranks) // width] for i in range(width)] for ranks in groups]
        self.columns = list(zip(*self.rows, strict=True))
        self.first_column = {rank: i for row in self.rows for i, rank in reversed([*enumerate(row)])}
        self.in_common = -(-width // second)  # the most columns that two ranks of different groups share

    def order(self) -> tuple[int, ...]:
        """Return all ranks, column by column."""
        return tuple(r for i, column in enumerate(self.columns) for r in column if self.first_column[r] == i)

    def node_rounds(self, rank: int, node: Sequence[int], num_chunks: int, algorithm: Scheduler) -> Iterator[Round]:
        """Run an algorithm in a node, where each rank works for its columns, each of as many of `num_chunks`."""
        each, row = num_chunks // len(self.columns), group_of(rank, self.rows)
        runs = laid(0, (each * row.count(member) for member in node))
        return interleave(rank, [Task(0, node, runs)], algorithm)

    def proxies(self, rank: int, owner: Sequence[int]) -> list[int]:
        """Return, for each chunk, its owner's proxy in `rank`'s group: the owner itself, if it is in that group."""
        row = group_of(rank, self.rows)
        return [row[self.first_column[other]] for other in owner]

    def chunks_by_rank(self, column: int, chunks_of: dict[int, list[int]]) -> list[list[int]]:
        """Return the chunks of each rank of a column; none for a rank whose first column is another one."""
        return [chunks_of.get(rank, []) if self.first_column[rank] == column else [] for rank in self.columns[column]]

    def across_groups(self, rank: int, owner: Sequence[int], algorithm: Scheduler) -> Iterator[Round]:
        """Run an algorithm in every column, on the chunks of owners whose first column it is, each for its row."""
        chunks_of, tasks = by_owner(owner), []
        for i, column in enumerate(self.columns):
            runs_of_tasks = zip_longest(*map(consecutive, self.chunks_by_rank(i, chunks_of)), fillvalue=range(0))
            turns = count(i % self.in_common, self.in_common)
            tasks += [Task(turn, column, runs) for turn, runs in zip(turns, runs_of_tasks, strict=False)]
        return interleave(rank, tasks, algorithm)

    def column_rounds(self, rank: int, num_chunks: int, algorithm: Scheduler, cuts: bool) -> Iterator[Round]:
        """Run an algorithm in every column, on the column's part of `num_chunks`; it `cuts` vectors by their length."""
        each = num_chunks // len(self.columns)
        lengths = [1] * each if cuts else [len(run) for run in even_runs(each, len(self.rows))]
        tasks = [
            Task(i % self.in_common, column, laid(i * each, lengths) if rank in column else ())
            for i, column in enumerate(self.columns)
        ]
        return interleave(rank, tasks, partial(algorithm, num_chunks=each) if cuts else algorithm)


def singles(ranks: Iterable[int]) -> Groups:
    return tuple((rank,) for rank in ranks)


@lru_cache(maxsize=4)
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


def group_of(rank: int, groups: Sequence[G]) -> G:
    return next(group for group in groups if rank in group)


def within_groups(rank: int, groups: Groups, schedule: Callable[[int, tuple[int, ...]], Schedule]) -> Iterator[Round]:
    """Yield the schedule of the rank's own group, padded with empty rounds to the length of the others'."""
    own = group_of(rank, groups)
    rounds = list(schedule(rank, own))
    others = {len(group): group for group in groups if len(group) != len(own)}
    longest = max((len(list(schedule(group[0], group))) for group in others.values()), default=0)
    yield from rounds
    yield from (() for _ in range(longest - len(rounds)))


def interleave(rank: int, tasks: Iterable[Task], algorithm: Scheduler, most: int = MESSAGES) -> Iterator[Round]:
    """Run an algorithm for many tasks: `most` turns at once, or if it is direct, all."""
    tasks = list(tasks)
    size = len(tasks[0].ranks)
    length = len(list(algorithm(0, size)))
    last = max(task.turn for task in tasks)
    at_once = 1 + last if algorithm in (direct.reduce_scatter, direct.all_gather) else most
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
    if len(numbers) == 1:
        return [range(numbers[0], numbers[0] + 1)]
    runs = (list(run) for _, run in groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0]))
    return [range(run[0][1], run[-1][1] + 1) for run in runs]


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
        return tuple(map(tuple, by_owner(self.node_of).values()))

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
