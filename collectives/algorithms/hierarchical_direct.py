"""Hierarchies whose innermost groups read each other's memory: direct inside the nodes, messages between them.

Each is the hierarchical algorithm of its name, with direct algorithms in the innermost groups.  These must be parts of
nodes; a rank that has its node to itself only sends messages.  In the cost lines, for k groups of l ranks, mu is for a
barrier in a group.

Source: as of `hierarchical` and `direct`.
"""

from collections.abc import Callable, Iterator

from collectives.algorithms import direct, hierarchical, pairwise, ring, tree
from collectives.algorithms.algorithm import EQUAL_CHUNKS, NOTHING, Algorithm, Groups, Precondition, Reach
from collectives.schedule.moves import Round, Schedule

TO_OWNERS = ring.reduce_scatter, direct.reduce_scatter
TO_ALL = ring.all_gather, direct.all_gather


def all_reduce(rank: int, size: int, groups: Groups | None = None) -> Iterator[Round]:
    """Reduce what the group's ranks have, all-reduce that across the groups, read the others' results.

    Cost: 4 mu + 2(k-1) alpha + (2n(k-1)/p + n(l-1)/l) beta + (n + n(k-1)/p) gamma.

    >>> from functools import partial
    >>> from collectives.schedule.moves import render
    >>> print(render(partial(all_reduce, groups=((0, 1), (2, 3))), 4))
    round 0:  (0-1)   (2-3)
    round 1:  0-1=>0 [0-1]+   0-1=>1 [2-3]+   2-3=>2 [0-1]+   2-3=>3 [2-3]+
    round 2:  (0-1)   (2-3)
    round 3:  0->2 [1]+   1->3 [3]+   2->0 [0]+   3->1 [2]+
    round 4:  0->2 [0]   1->3 [2]   2->0 [1]   3->1 [3]
    round 5:  (0-1)   (2-3)
    round 6:  1=>0 [2-3]   0=>1 [0-1]   3=>2 [2-3]   2=>3 [0-1]
    round 7:  (0-1)   (2-3)
    """
    yield from hierarchical.all_reduce(rank, size, groups, scatter=TO_OWNERS, gather=TO_ALL)


def reduce_scatter(rank: int, size: int, groups: Groups | None = None) -> Iterator[Round]:
    """Rank r ends owning chunk r: r's stand-in in each group reduces it there, then r reduces those sums.

    Cost: 2 mu + (k-1) alpha + n(k-1)/p beta + (n + n(k-1)/p) gamma.

    >>> from functools import partial
    >>> from collectives.schedule.moves import render
    >>> print(render(partial(reduce_scatter, groups=((0, 1), (2,))), 3))
    round 0:  (0-1)
    round 1:  0-1=>0 [0]+   0-1=>0 [2]+   0-1=>1 [1]+
    round 2:  (0-1)
    round 3:  0->2 [2]+   2->0 [0]+   2->1 [1]+
    """
    yield from hierarchical.reduce_scatter(rank, size, groups, algorithms=TO_OWNERS)


def all_gather(rank: int, size: int, groups: Groups | None = None) -> Iterator[Round]:
    """Rank r starts owning chunk r: its counterparts get it across, and the others of their groups read it there.

    Cost: 2 mu + (k-1) alpha + (n(k-1)/p + n(l-1)/l) beta.

    >>> from functools import partial
    >>> from collectives.schedule.moves import render
    >>> print(render(partial(all_gather, groups=((0, 1), (2, 3))), 4))
    round 0:  0->2 [0]   1->3 [1]   2->0 [2]   3->1 [3]
    round 1:  (0-1)   (2-3)
    round 2:  1=>0 [1]   1=>0 [3]   0=>1 [0]   0=>1 [2]   3=>2 [1]   3=>2 [3]   2=>3 [0]   2=>3 [2]
    round 3:  (0-1)   (2-3)
    """
    yield from hierarchical.all_gather(rank, size, groups, algorithms=TO_ALL)


def all_to_all(rank: int, size: int, groups: Groups | None = None) -> Iterator[Round]:
    """Chunk d of rank s becomes chunk p+s of rank d: d's stand-in in the group of s reads it there, then sends it.

    Cost: 2 mu + (k-1) alpha + 3n beta, of which n is for putting it in the order of the dests.

    >>> from functools import partial
    >>> from collectives.schedule.moves import render
    >>> print(render(partial(all_to_all, groups=((0,), (1, 2))), 3))
    round 0:  (1-2)
    round 1:  1: [0-1]>[10-11]   2=>1 [0-1]>[12-13]   1=>2 [2]>[3]   2: [2]>[4]
    round 2:  (1-2)
    round 3:  0: [0-2]>[6-8]   1: [10]>[6]   1: [12]>[7]   1: [11]>[8]   1: [13]>[9]   2: [3-4]>[6-7]
    round 4:  0: [6]>[3]   1: [8-9]>[4-5]   2: [6-7]>[4-5]
    round 5:  0->1 [7]   0->2 [8]   1->0 [6-7]
    """
    algorithms = pairwise.all_to_all, direct.all_to_all
    yield from hierarchical.all_to_all(rank, size, groups, algorithms)


def broadcast(rank: int, size: int, root: int = 0, groups: Groups | None = None) -> Iterator[Round]:
    """The root starts with the vector: its counterparts get it across, and the others of their groups read it there.

    Cost: 2 mu + ceil(log2 k) (alpha + n beta) + n(l-1)/l beta.

    >>> from functools import partial
    >>> from collectives.schedule.moves import render
    >>> print(render(partial(broadcast, groups=((0, 1), (2, 3)), root=3), 4))
    round 0:  3->1 [0-3]
    round 1:  (0-1)   (2-3)
    round 2:  1=>0 [2-3]   1~>0 [0-1]   3=>2 [2-3]   3~>2 [0-1]
    round 3:  (0-1)   (2-3)
    """
    yield from hierarchical.broadcast(rank, size, root, groups, algorithms=(tree.broadcast, direct.broadcast))


def in_nodes(collective: str, schedule: Callable[..., Schedule], needs: Precondition = NOTHING) -> Algorithm:
    return Algorithm(collective, "hierarchical_direct", schedule, needs, over_nodes=True, reach=Reach.NODES)


ALGORITHMS = (
    in_nodes("all_reduce", all_reduce),
    in_nodes("reduce_scatter", reduce_scatter),
    in_nodes("all_gather", all_gather),
    in_nodes("all_to_all", all_to_all, EQUAL_CHUNKS),
    in_nodes("broadcast", broadcast),
)
