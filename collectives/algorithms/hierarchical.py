"""Hierarchies: groups of groups of ranks, where most of the data moves inside the innermost groups.

A rank talks to its neighbours in its own group, and across groups to its counterparts in the neighbouring ones of each
level only: what texts on training call hierarchical gradient descent.  `groups` is a tuple of groups, each of them a
rank or a tuple of groups in turn, of any lengths, depths and ranks; by default, all ranks are one group.

Uneven groups do the same with fewer ranks: each of theirs stands in for several ranks of the largest group, and so
moves more.  `algorithms`, `scatter` and `gather` have an algorithm for each level, the innermost last, and the first
one serves the levels above it too.  The innermost may be direct, where its groups are parts of nodes.  The cost lines
are for two levels, k groups of l ranks; a further level adds its own terms.

In the all-to-all a rank sends each counterpart one message, with all that its group has for it: for k groups of l
ranks, k-1 messages of l chunks across, where a flat exchange has l(k-1) of one chunk, and every rank as many.  The
other textbook form, to collect on one rank all that is for another group, makes fewer messages still, but moves the
data a third time, to spread it there.

Source: Träff, "Decomposing collectives for exploiting multi-lane communication", 2019, arXiv 1910.13373; Horovod,
horovod/common/ops/nccl_operations.cc, NCCLHierarchicalAllreduce; MPICH, src/mpi/coll/bcast/bcast_intra_smp.c;
Open MPI, ompi/mca/coll/han/coll_han_alltoall.c.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product
from typing import NamedTuple

from collectives.algorithms import direct, pairwise, ring, tree
from collectives.algorithms.algorithm import EQUAL_CHUNKS, Algorithm, Group, Groups
from collectives.algorithms.bruck import copies
from collectives.algorithms.groups import (
    Grid,
    Scheduler,
    Schedulers,
    Task,
    abreast,
    by_owner,
    consecutive,
    depth,
    group_of,
    inside,
    laid,
    of_level,
    order,
    whole,
)
from collectives.schedule.moves import Barrier, Copy, Get, Round, shares

Datum = tuple[int, int]  # a chunk on its way in an all-to-all, by dest and source


def all_reduce(
    rank: int,
    size: int,
    groups: Groups | None = None,
    across: Scheduler = ring.all_reduce,
    scatter: Schedulers = (ring.reduce_scatter,),
    gather: Schedulers = (ring.all_gather,),
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
    rank: int, size: int, groups: Groups | None = None, algorithms: Schedulers = (ring.reduce_scatter,)
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
    rank: int, size: int, groups: Groups | None = None, algorithms: Schedulers = (ring.all_gather,)
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


def scatter_in(rank: int, group: Group, owner: Sequence[int], algorithms: Schedulers) -> Iterator[Round]:
    """Rank `owner[c]` ends with the group's sum of chunk c."""
    if isinstance(group, int):
        return
    grid, across = Grid(group), of_level(group, algorithms)
    yield from inside(rank, group, lambda r, child: scatter_in(r, child, grid.stand_ins(r, owner), algorithms))
    yield from grid.cross(rank, owner, across)


def gather_in(rank: int, group: Group, owner: Sequence[int], algorithms: Schedulers) -> Iterator[Round]:
    """Rank `owner[c]` starts with chunk c; every rank of the group ends with it."""
    if isinstance(group, int):
        return
    grid, across = Grid(group), of_level(group, algorithms)
    yield from grid.cross(rank, owner, across)
    yield from inside(rank, group, lambda r, child: gather_in(r, child, grid.stand_ins(r, owner), algorithms))


def broadcast(
    rank: int, size: int, root: int = 0, groups: Groups | None = None, algorithms: Schedulers = (tree.broadcast,)
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


def broadcast_in(rank: int, group: Group, size: int, algorithms: Schedulers, root: int) -> Iterator[Round]:
    if isinstance(group, int):
        return
    grid, across = Grid(group), of_level(group, algorithms)
    column = grid.columns[grid.home[root]]
    task = Task(0, column, shares(size, len(column)))
    yield from abreast(rank, [task], partial(across, root=column.index(root)))
    yield from inside(
        rank, group, lambda r, child: broadcast_in(r, child, size, algorithms, *grid.stand_ins(r, [root]))
    )


def all_to_all(
    rank: int, size: int, groups: Groups | None = None, algorithms: Schedulers = (pairwise.all_to_all,)
) -> Iterator[Round]:
    """Chunk d of rank s becomes chunk p+s of rank d: inside to d's stand-in, then across.

    What is under way is packed in working space after the 2p chunks of the collective: all chunks must have one
    length.  Of the algorithms, those that pack in turn, as Bruck's, need even groups; `direct.all_to_all`, in innermost
    groups only, reads from the others' `x` what each has for a rank's counterparts.

    Cost: (l+k-2) alpha + n((l-1)/l + (k-1)/k) beta.

    >>> from functools import partial
    >>> from collectives.schedule.moves import render
    >>> print(render(partial(all_to_all, groups=((0,), (1, 2))), 3))
    round 0:  1: [0-1]>[10-11]   2: [2]>[4]
    round 1:  1->2 [2]   2->1 [0-1]
    round 2:  0: [0-2]>[6-8]   1: [10]>[6]   1: [12]>[7]   1: [11]>[8]   1: [13]>[9]   2: [3-4]>[6-7]
    round 3:  0: [6]>[3]   1: [8-9]>[4-5]   2: [6-7]>[4-5]
    round 4:  0->1 [7]   0->2 [8]   1->0 [6-7]
    """
    groups, everyone = whole(groups, size), range(size)
    in_order = [other for group in groups for other in sorted(order(group))] == list(everyone)
    room = largest_load(rank, groups, everyone)
    packed, spare = 2 * size, 2 * size + room
    areas = Areas(packed, arrived=size if room <= size else spare, more=spare + room)
    landing = size if in_order else spare
    yield from exchange_in(rank, groups, everyone, landing, areas, algorithms)
    if not in_order:
        yield rearranged(load(rank, groups, everyone), landing, [(rank, source) for source in everyone], size)


class Areas(NamedTuple):
    """The first chunks of a rank's working spaces, in its vector."""

    packed: int  # for what is to leave
    arrived: int  # for what has come
    more: int  # for the chunks that an algorithm needs besides those in and out


def load(rank: int, group: Group, owner: Sequence[int]) -> list[Datum]:
    """List what a rank has when its group has exchanged what it had: all for the chunks that it owns."""
    dests = by_owner(owner)[rank]
    children = (group,) if isinstance(group, int) else group
    return [datum for child in children for datum in product(dests, sorted(order(child)))]


def largest_load(rank: int, group: Group, owner: Sequence[int]) -> int:
    """Return the most chunks that a rank has at any level."""
    if isinstance(group, int):
        return len(owner)
    below = largest_load(rank, group_of(rank, group), Grid(group).stand_ins(rank, owner))
    return max(below, len(load(rank, group, owner)))


def rearranged(data: list[Datum], begin: int, wanted: list[Datum], target: int) -> Round:
    """The copies that bring data from one order into another."""
    at = {datum: place for place, datum in enumerate(data, begin)}
    runs = consecutive([at[datum] for datum in wanted])
    return copies(runs, laid(target, map(len, runs)))


def exchange_in(
    rank: int, group: Group, owner: Sequence[int], landing: int, areas: Areas, algorithms: Schedulers
) -> Iterator[Round]:
    """Rank `owner[d]` ends with all that the group has for rank d: its `load`, from chunk `landing` on."""
    if isinstance(group, int):
        return
    grid, across = Grid(group), of_level(group, algorithms)
    if across is direct.all_to_all:
        yield from collected_in(rank, order(group), by_owner(owner)[rank], landing)
        return
    yield from inside(
        rank, group, lambda r, child: exchange_in(r, child, grid.stand_ins(r, owner), areas.arrived, areas, algorithms)
    )
    own, held = group_of(rank, group), by_owner(owner)
    places = [place for place, other in enumerate(grid.row_of(rank)) if other == rank]
    blocks = [list(product(dests, sorted(order(own)))) for p in places for dests in grid.sets(p, held)]
    data, leaving = load(rank, own, grid.stand_ins(rank, owner)), [datum for block in blocks for datum in block]
    if data == leaving and all(isinstance(child, int) for child in group):
        begin = 0  # what leaves lies in the outbox as it should
    else:
        begin = areas.packed
        yield rearranged(data, 0 if isinstance(own, int) else areas.arrived, leaving, begin)
    outs = laid(begin, map(len, blocks))
    ins = laid(landing, [len(held[rank]) * len(order(child)) for child in group])
    yield from abreast(rank, [*ports(grid, places, outs, ins, areas.more)], across)


def collected_in(rank: int, group: Sequence[int], dests: list[int], landing: int) -> Iterator[Round]:
    """Read what the ranks of an innermost group have for some dests, in the order of their `load`."""
    outs = consecutive(dests)
    ins = laid(landing, [len(run) for _ in group for run in outs])
    pairs = zip(product(group, outs), ins, strict=True)
    barrier = (Barrier(tuple(sorted(group))),)
    yield barrier
    yield tuple(Copy(run, to) if source == rank else Get(source, run, to) for (source, run), to in pairs)
    yield barrier


def ports(grid: Grid, places: list[int], outs: list[range], ins: list[range], more: int) -> Iterator[Task]:
    """Yield a rank's all-to-all in each of its columns: what leaves, what comes home, and working space."""
    size = len(ins)
    scratch = laid(more, [len(outs[0])] * size)
    for place, column in enumerate(grid.columns):
        nth = places.index(place) if place in places else None
        came = ins if nth == 0 else [range(0)] * size
        runs = [] if nth is None else [*outs[nth * size : (nth + 1) * size], *came, *scratch]
        yield Task(place % grid.in_common, column, runs)


ALGORITHMS = (
    Algorithm("all_reduce", "hierarchical", all_reduce, over_nodes=True),
    Algorithm("reduce_scatter", "hierarchical", reduce_scatter, over_nodes=True),
    Algorithm("all_gather", "hierarchical", all_gather, over_nodes=True),
    Algorithm("all_to_all", "hierarchical", all_to_all, EQUAL_CHUNKS, over_nodes=True),
    Algorithm("broadcast", "hierarchical", broadcast, over_nodes=True),
)
