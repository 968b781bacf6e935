"""Hierarchies: groups of groups of ranks, where most of the data moves inside the innermost groups.

A rank talks to its neighbours in its own group, and across groups to its counterparts in the neighbouring ones of each
level only: what texts on training call hierarchical gradient descent.  `groups` is a tuple of groups, each of them a
rank or a tuple of groups in turn, of any lengths, depths and ranks; by default, all ranks are one group.

Uneven groups do the same with fewer ranks: each of theirs stands in for several ranks of the largest group, and so
moves more.  `algorithms`, `scatter` and `gather` have an algorithm for each level, the innermost last, and the first
one serves the levels above it too.  The innermost may be direct, where its groups are parts of nodes.  The cost lines
are for two levels, k groups of l ranks; a further level adds its own terms.

Source: Träff, "Decomposing collectives for exploiting multi-lane communication", 2019, arXiv 1910.13373; Horovod,
horovod/common/ops/nccl_operations.cc, NCCLHierarchicalAllreduce; MPICH, src/mpi/coll/bcast/bcast_intra_smp.c.
"""

from collections.abc import Iterator, Sequence
from functools import partial

from collectives.algorithms import ring, tree
from collectives.algorithms.groups import (
    Algorithm,
    Algorithms,
    Grid,
    Group,
    Groups,
    Task,
    abreast,
    depth,
    inside,
    of_level,
    order,
    whole,
)
from collectives.schedule.moves import Round, shares


def all_reduce(
    rank: int,
    size: int,
    groups: Groups | None = None,
    across: Algorithm = ring.all_reduce,
    scatter: Algorithms = (ring.reduce_scatter,),
    gather: Algorithms = (ring.all_gather,),
) -> Iterator[Round]:
    """Reduce-scatter inside the groups, all-reduce across them, all-gather inside the groups.

    Cost: with rings, 2(l+k-2) alpha + 2n(p-1)/p beta + n(p-1)/p gamma.

    >>> from functools import partial
    >>> from collectives.schedule.moves import render
    >>> print(render(partial(all_reduce, groups=((0, 1), (2, 3, 4))), 5))
    round 0:  0->1 [3-4]+   1->0 [0-2]+   2->3 [3-4]+   3->4 [0-1]+   4->2 [2]+
    round 1:  2->3 [2]+   3->4 [3-4]+   4->2 [0-1]+
    round 2:  0->2 [1]+   0->3 [2]+   1->4 [4]+   2->0 [0]+   4->1 [3]+
    round 3:  0->2 [0]   1->4 [3]   2->0 [1]   3->0 [2]   4->1 [4]
    round 4:  0->1 [0-2]   1->0 [3-4]   2->3 [0-1]   3->4 [2]   4->2 [3-4]
    round 5:  2->3 [3-4]   3->4 [0-1]   4->2 [2]
    """
    groups = whole(groups, size)
    groups = groups if depth(groups) > 1 else (groups,)
    grid, owner = Grid(groups), order(groups)
    yield from inside(rank, groups, lambda r, group: scatter_in(r, group, grid.stand_ins(r, owner), scatter))
    yield from grid.cross(rank, owner, across)
    yield from inside(rank, groups, lambda r, group: gather_in(r, group, grid.stand_ins(r, owner), gather))


def reduce_scatter(
    rank: int, size: int, groups: Groups | None = None, algorithms: Algorithms = (ring.reduce_scatter,)
) -> Iterator[Round]:
    """Rank r ends owning chunk r: r's stand-in in each group reduces it inside, then r reduces those sums.

    A rank stands in for k ranks, whose chunks do not follow each other: it takes several messages to send them.

    Cost: with rings, if ranks follow each other in groups, (ceil(k/8) (l-1) + k-1) alpha + n(p-1)/p (beta + gamma).

    >>> from functools import partial
    >>> from collectives.schedule.moves import render
    >>> print(render(partial(reduce_scatter, groups=((0, 1), (2, 3))), 4))
    round 0:  0->1 [1]+   0->1 [3]+   1->0 [0]+   1->0 [2]+   2->3 [1]+   2->3 [3]+   3->2 [0]+   3->2 [2]+
    round 1:  0->2 [2]+   1->3 [3]+   2->0 [0]+   3->1 [1]+
    """
    yield from scatter_in(rank, whole(groups, size), range(size), algorithms)


def all_gather(
    rank: int, size: int, groups: Groups | None = None, algorithms: Algorithms = (ring.all_gather,)
) -> Iterator[Round]:
    """Rank r starts owning chunk r: its counterparts get it across, and pass it on inside their groups.

    Cost: with rings, if ranks follow each other in groups, (ceil(k/8) (l-1) + k-1) alpha + n(p-1)/p beta.

    >>> from functools import partial
    >>> from collectives.schedule.moves import render
    >>> print(render(partial(all_gather, groups=((0, 1), (2, 3))), 4))
    round 0:  0->2 [0]   1->3 [1]   2->0 [2]   3->1 [3]
    round 1:  0->1 [0]   0->1 [2]   1->0 [1]   1->0 [3]   2->3 [0]   2->3 [2]   3->2 [1]   3->2 [3]
    """
    yield from gather_in(rank, whole(groups, size), range(size), algorithms)


def scatter_in(rank: int, group: Group, owner: Sequence[int], algorithms: Algorithms) -> Iterator[Round]:
    """Rank `owner[c]` ends with the group's sum of chunk c."""
    if isinstance(group, int):
        return
    grid, across = Grid(group), of_level(group, algorithms)
    yield from inside(rank, group, lambda r, child: scatter_in(r, child, grid.stand_ins(r, owner), algorithms))
    yield from grid.cross(rank, owner, across)


def gather_in(rank: int, group: Group, owner: Sequence[int], algorithms: Algorithms) -> Iterator[Round]:
    """Rank `owner[c]` starts with chunk c; every rank of the group ends with it."""
    if isinstance(group, int):
        return
    grid, across = Grid(group), of_level(group, algorithms)
    yield from grid.cross(rank, owner, across)
    yield from inside(rank, group, lambda r, child: gather_in(r, child, grid.stand_ins(r, owner), algorithms))


def broadcast(
    rank: int, size: int, root: int = 0, groups: Groups | None = None, algorithms: Algorithms = (tree.broadcast,)
) -> Iterator[Round]:
    """The root starts with the vector: its counterparts get it across, and are the roots inside their groups.

    Cost: (ceil(log2 k) + ceil(log2 l)) (alpha + n beta).

    >>> from functools import partial
    >>> from collectives.schedule.moves import render
    >>> print(render(partial(broadcast, groups=((0, 1), (2, 3)), root=3), 4))
    round 0:  3->1 [0-3]
    round 1:  1->0 [0-3]   3->2 [0-3]
    """
    yield from broadcast_in(rank, whole(groups, size), size, algorithms, root)


def broadcast_in(rank: int, group: Group, size: int, algorithms: Algorithms, root: int) -> Iterator[Round]:
    if isinstance(group, int):
        return
    grid, across = Grid(group), of_level(group, algorithms)
    column = grid.columns[grid.home[root]]
    task = Task(0, column, shares(size, len(column)))
    yield from abreast(rank, [task], partial(across, root=column.index(root)))
    yield from inside(
        rank, group, lambda r, child: broadcast_in(r, child, size, algorithms, *grid.stand_ins(r, [root]))
    )
