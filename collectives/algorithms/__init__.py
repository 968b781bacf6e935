"""The registry: which algorithms there are for each collective."""

from collections.abc import Callable
from enum import IntEnum
from typing import Any, NamedTuple

from collectives.algorithms import (
    bruck,
    chain,
    direct,
    double_tree,
    hierarchical,
    hierarchical_direct,
    pairwise,
    recursive,
    ring,
    tree,
)
from collectives.algorithms.groups import Groups
from collectives.schedule.moves import Round, Schedule
from collectives.schedule.spec import COLLECTIVES


class Precondition(NamedTuple):
    """What an algorithm needs: `holds(size, equal)`, `equal` being whether all chunks have one length; and in words."""

    holds: Callable[[int, bool], bool]
    words: str


NOTHING = Precondition(lambda size, equal: True, "")
EVEN_SIZE = Precondition(lambda size, equal: size == 1 or size % 2 == 0, "an even number of ranks, or one")
EQUAL_CHUNKS = Precondition(lambda size, equal: equal, "equal chunks")


class Reach(IntEnum):
    """How far ranks reach into each other's memory; each includes those before."""

    MESSAGES = 0  # not at all
    NODES = 1  # in the innermost groups of a hierarchy, each a part of a node
    STAGES = 2  # everywhere, in memory that the library allocates for a plan
    ARRAYS = 3  # in the callers' arrays, too


class Algorithm(NamedTuple):
    """A row of the registry."""

    collective: str
    name: str
    schedule: Callable[..., Schedule]
    precondition: Precondition = NOTHING
    over_nodes: bool = False  # the schedule takes the groups of ranks, nodes or what the user made of them
    reach: Reach = Reach.MESSAGES
    apart: bool = False  # the schedule can put its result in chunks of their own
    segmented: bool = False  # a direct schedule whose phases follow each other, segment by segment
    in_order: bool = False  # reduces ((rank 0 op rank 1) op rank 2) op ..., whatever the chunk

    def rounds(self, rank: int, size: int, root: int, groups: Groups) -> list[Round]:
        """The schedule of a rank, with the arguments that it takes."""
        more: dict[str, Any] = {"root": root} if COLLECTIVES[self.collective].rooted else {}
        more |= {"groups": groups} if self.over_nodes else {}
        more |= {"apart": True} if self.apart else {}
        return list(self.schedule(rank, size, **more))

    def check(self, size: int, equal: bool = True) -> None:
        """Refuse what the algorithm cannot do.

        Raises: ValueError with the names of those that can.
        """
        if not self.precondition.holds(size, equal):
            others = ", ".join(["auto", *names(self.collective, size, equal), "mpi"])
            with_chunks = "" if equal else " with uneven chunks"
            raise ValueError(
                f"algorithm {self.name!r} needs {self.precondition.words}: on {size} ranks{with_chunks}, use {others}"
            )


def staged(
    collective: str, name: str, schedule: Callable[..., Schedule], apart: bool = True, in_order: bool = False
) -> Algorithm:
    return Algorithm(collective, name, schedule, reach=Reach.STAGES, apart=apart, segmented=True, in_order=in_order)


def reading(
    collective: str, name: str, schedule: Callable[..., Schedule], apart: bool = True, in_order: bool = False
) -> Algorithm:
    return Algorithm(collective, name, schedule, reach=Reach.ARRAYS, apart=apart, in_order=in_order)


def in_nodes(collective: str, schedule: Callable[..., Schedule], needs: Precondition = NOTHING) -> Algorithm:
    return Algorithm(collective, "hierarchical_direct", schedule, needs, over_nodes=True, reach=Reach.NODES)


REGISTRY = (
    Algorithm("all_reduce", "ring", ring.all_reduce),
    Algorithm("all_reduce", "recursive_doubling", recursive.all_reduce),
    Algorithm("all_reduce", "rabenseifner", recursive.rabenseifner),
    Algorithm("all_reduce", "binomial", tree.all_reduce),
    Algorithm("all_reduce", "double_tree", double_tree.all_reduce),
    Algorithm("all_reduce", "hierarchical", hierarchical.all_reduce, over_nodes=True),
    Algorithm("all_reduce", "chain", chain.all_reduce, in_order=True),
    Algorithm("reduce_scatter", "ring", ring.reduce_scatter),
    Algorithm("reduce_scatter", "recursive_halving", recursive.reduce_scatter),
    Algorithm("reduce_scatter", "pairwise", pairwise.reduce_scatter),
    Algorithm("reduce_scatter", "hierarchical", hierarchical.reduce_scatter, over_nodes=True),
    Algorithm("reduce_scatter", "chain", chain.reduce_scatter, in_order=True),
    Algorithm("all_gather", "ring", ring.all_gather),
    Algorithm("all_gather", "recursive_doubling", recursive.all_gather),
    Algorithm("all_gather", "bruck", bruck.all_gather),
    Algorithm("all_gather", "neighbor", ring.neighbor_all_gather, EVEN_SIZE),
    Algorithm("all_gather", "hierarchical", hierarchical.all_gather, over_nodes=True),
    Algorithm("all_to_all", "pairwise", pairwise.all_to_all),
    Algorithm("all_to_all", "bruck", bruck.all_to_all, EQUAL_CHUNKS),
    Algorithm("all_to_all", "hierarchical", hierarchical.all_to_all, EQUAL_CHUNKS, over_nodes=True),
    Algorithm("broadcast", "binomial", tree.broadcast),
    Algorithm("broadcast", "scatter_all_gather", tree.scatter_all_gather),
    Algorithm("broadcast", "chain", chain.broadcast),
    Algorithm("broadcast", "hierarchical", hierarchical.broadcast, over_nodes=True),
    Algorithm("reduce", "binomial", tree.reduce),
    Algorithm("reduce", "chain", chain.reduce, in_order=True),
    Algorithm("gather", "binomial", tree.gather),
    Algorithm("scatter", "binomial", tree.scatter),
    Algorithm("barrier", "dissemination", bruck.barrier),
    staged("all_reduce", "one_shot", direct.one_shot, in_order=True),
    Algorithm("all_reduce", "two_shot", direct.two_shot, reach=Reach.ARRAYS, apart=True, segmented=True, in_order=True),
    staged("all_reduce", "staged_two_shot", direct.staged_two_shot, in_order=True),
    reading("reduce_scatter", "direct", direct.reduce_scatter, in_order=True),
    staged("reduce_scatter", "staged", direct.staged_reduce_scatter, in_order=True),
    reading("all_gather", "direct", direct.all_gather),
    staged("all_gather", "staged", direct.staged_all_gather),
    reading("all_to_all", "direct", direct.all_to_all, apart=False),
    staged("all_to_all", "staged", direct.staged_all_to_all, apart=False),
    reading("broadcast", "direct", direct.broadcast, apart=False),
    staged("broadcast", "staged", direct.staged_broadcast, apart=False),
    Algorithm("reduce", "direct", direct.reduce, reach=Reach.ARRAYS, apart=True, segmented=True, in_order=True),
    reading("gather", "direct", direct.gather),
    reading("scatter", "direct", direct.scatter),
    staged("barrier", "direct", direct.barrier, apart=False),
    in_nodes("all_reduce", hierarchical_direct.all_reduce),
    in_nodes("reduce_scatter", hierarchical_direct.reduce_scatter),
    in_nodes("all_gather", hierarchical_direct.all_gather),
    in_nodes("all_to_all", hierarchical_direct.all_to_all, EQUAL_CHUNKS),
    in_nodes("broadcast", hierarchical_direct.broadcast),
)


def names(collective: str, size: int | None = None, equal: bool = True) -> list[str]:
    """The names that `algorithm=` takes for a collective, besides "auto" and "mpi": all, or those for `size` ranks.

    >>> names("broadcast")
    ['binomial', 'scatter_all_gather', 'chain', 'hierarchical', 'direct', 'staged', 'hierarchical_direct']
    >>> names("all_to_all", size=3, equal=False)
    ['pairwise', 'direct', 'staged']
    """
    return [row.name for row in rows(collective, size, equal)]


def rows(collective: str, size: int | None = None, equal: bool = True) -> list[Algorithm]:
    """The registry's rows of a collective: all, or those for `size` ranks."""
    every = [row for row in REGISTRY if row.collective == collective]
    return [row for row in every if size is None or row.precondition.holds(size, equal)]


def find(collective: str, name: str) -> Algorithm:
    """The registry's row of that name.

    Raises: ValueError where there is none, with the names there are.
    """
    for row in REGISTRY:
        if (row.collective, row.name) == (collective, name):
            return row
    known = ", ".join(["auto", *names(collective), "mpi"])
    raise ValueError(f"{collective} has no algorithm {name!r}; it has {known}")
