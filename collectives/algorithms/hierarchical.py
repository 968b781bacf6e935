"""Hierarchical algorithms: most data moves inside the nodes; across them a rank exchanges with its counterparts.

Reducing gradients in this way is called hierarchical gradient descent.  `groups` are the nodes, of any sizes and ranks,
by default one node of all ranks; `within` is the module of the algorithms inside them, and `across` the algorithm
between counterparts: any that does the collective on as many ranks as there are nodes, another hierarchical one too,
whose groups are then nodes behind one switch.  In a smaller node each rank is the proxy of several ranks of the largest
one, and so moves more data.

`hierarchical_direct` is the same with direct algorithms inside the nodes, and messages between them: a rank alone in
its node only exchanges messages.  In the cost lines, for k nodes of l ranks, mu is the cost of a barrier in a node.

In the all-to-all a rank sends each counterpart one message with all chunks of its node for it: with k nodes of l ranks,
every rank sends k-1 messages of l chunks across, instead of l(k-1) of one chunk in a flat exchange.  The other textbook
form, in which one rank collects all chunks for another node, is `leaders`.

Source: Träff, "Decomposing collectives for exploiting multi-lane communication", 2019, arXiv 1910.13373; Horovod,
horovod/common/ops/nccl_operations.cc, NCCLHierarchicalAllreduce; MPICH, src/mpi/coll/bcast/bcast_intra_smp.c;
Open MPI, ompi/mca/coll/han/coll_han_alltoall.c.
"""

from collections.abc import Iterator, Sequence
from functools import cache, partial
from itertools import product
from typing import Any

from collectives.algorithms import chain, direct, pairwise, recursive, ring, tree
from collectives.algorithms.algorithm import (
    EQUAL_CHUNKS,
    NOTHING,
    Access,
    Algorithm,
    Groups,
    Precondition,
    Scheduler,
    Unit,
    each_column,
    each_counterpart,
    whole_vector,
)
from collectives.algorithms.bruck import pack
from collectives.algorithms.groups import (
    Grid,
    Task,
    by_owner,
    consecutive,
    group_of,
    interleave,
    singles,
    whole,
    within_groups,
)
from collectives.schedule.moves import MESSAGES, Barrier, Copy, Get, Round, Schedule, even_runs, laid

Datum = tuple[int, int]  # a chunk on its way in an all-to-all, by dest and source


def all_reduce(
    rank: int,
    size: int,
    groups: Groups | None = None,
    within: Any = ring,
    across: Scheduler = ring.all_reduce,
    num_chunks: int = 0,
) -> Iterator[Round]:
    """Reduce-scatter inside the nodes, all-reduce across them, and all-gather inside the nodes.

    With `num_chunks`, a multiple of the largest node's ranks, counterparts exchange as many chunks in each node.

    Cost: with rings, 2(l+k-2) alpha + 2n(p-1)/p beta + n(p-1)/p gamma; direct inside,
    4 mu + 2(k-1) alpha + (2n(k-1)/p + n(l-1)/l) beta + (n + n(k-1)/p) gamma.

    >>> from functools import partial
    >>> from collectives.schedule.moves import render
    >>> print(render(partial(all_reduce, groups=((0, 1), (2, 3, 4))), 5))
    round 0:  0->1 [3-4]+   1->0 [0-2]+   2->3 [3-4]+   3->4 [0-1]+   4->2 [2]+
    round 1:  2->3 [2]+   3->4 [3-4]+   4->2 [0-1]+
    round 2:  0->2 [1]+   0->3 [2]+   1->4 [4]+   2->0 [0]+   4->1 [3]+
    round 3:  0->2 [0]   1->4 [3]   2->0 [1]   3->0 [2]   4->1 [4]
    round 4:  0->1 [0-2]   1->0 [3-4]   2->3 [0-1]   3->4 [2]   4->2 [3-4]
    round 5:  2->3 [3-4]   3->4 [0-1]   4->2 [2]
    >>> print(render(partial(all_reduce, within=direct, groups=((0, 1), (2, 3))), 4))
    round 0:  (0-1)   (2-3)
    round 1:  0-1=>0 [0-1]+   0-1=>1 [2-3]+   2-3=>2 [0-1]+   2-3=>3 [2-3]+
    round 2:  (0-1)   (2-3)
    round 3:  0->2 [1]+   1->3 [3]+   2->0 [0]+   3->1 [2]+
    round 4:  0->2 [0]   1->3 [2]   2->0 [1]   3->1 [3]
    round 5:  (0-1)   (2-3)
    round 6:  1=>0 [2-3]   0=>1 [0-1]   3=>2 [2-3]   2=>3 [0-1]
    round 7:  (0-1)   (2-3)
    """
    groups = whole(groups, size)
    grid = Grid.of(groups)
    if num_chunks:
        in_nodes = partial(grid.node_rounds, num_chunks=num_chunks)
        yield from within_groups(rank, groups, partial(in_nodes, algorithm=within.reduce_scatter))
        yield from grid.column_rounds(rank, num_chunks, across, cuts=across is tree.double_all_reduce)
        yield from within_groups(rank, groups, partial(in_nodes, algorithm=within.all_gather))
        return
    owner = grid.order()
    yield from on_proxies(rank, groups, grid, owner, within.reduce_scatter)
    yield from grid.across_groups(rank, owner, across)
    yield from on_proxies(rank, groups, grid, owner, within.all_gather)


def reduce_scatter(
    rank: int,
    size: int,
    groups: Groups | None = None,
    within: Any = ring,
    across: Scheduler = ring.reduce_scatter,
) -> Iterator[Round]:
    """Rank r ends owning chunk r: its proxy in each node reduces it inside, then r reduces those sums.

    A rank is the proxy of k ranks, whose chunks are not consecutive and so take several messages.

    Cost: with rings, if ranks follow each other in nodes, (ceil(k/8) (l-1) + k-1) alpha + n(p-1)/p (beta + gamma);
    direct inside, 2 mu + (k-1) alpha + n(k-1)/p beta + (n + n(k-1)/p) gamma.

    >>> from functools import partial
    >>> from collectives.schedule.moves import render
    >>> print(render(partial(reduce_scatter, groups=((0, 1), (2, 3))), 4))
    round 0:  0->1 [1]+   0->1 [3]+   1->0 [0]+   1->0 [2]+   2->3 [1]+   2->3 [3]+   3->2 [0]+   3->2 [2]+
    round 1:  0->2 [2]+   1->3 [3]+   2->0 [0]+   3->1 [1]+
    """
    groups, owner = whole(groups, size), range(size)
    grid = Grid.of(groups)
    yield from on_proxies(rank, groups, grid, owner, within.reduce_scatter)
    yield from grid.across_groups(rank, owner, across)


def all_gather(
    rank: int, size: int, groups: Groups | None = None, within: Any = ring, across: Scheduler = ring.all_gather
) -> Iterator[Round]:
    """Rank r starts owning chunk r: r sends it to its counterparts, which pass it on inside their nodes.

    Cost: with rings, if ranks follow each other in nodes, (ceil(k/8) (l-1) + k-1) alpha + n(p-1)/p beta;
    direct inside, 2 mu + (k-1) alpha + (n(k-1)/p + n(l-1)/l) beta.

    >>> from functools import partial
    >>> from collectives.schedule.moves import render
    >>> print(render(partial(all_gather, groups=((0, 1), (2, 3))), 4))
    round 0:  0->2 [0]   1->3 [1]   2->0 [2]   3->1 [3]
    round 1:  0->1 [0]   0->1 [2]   1->0 [1]   1->0 [3]   2->3 [0]   2->3 [2]   3->2 [1]   3->2 [3]
    """
    groups, owner = whole(groups, size), range(size)
    grid = Grid.of(groups)
    yield from grid.across_groups(rank, owner, across)
    yield from on_proxies(rank, groups, grid, owner, within.all_gather)


def on_proxies(rank: int, groups: Groups, grid: Grid, owner: Sequence[int], algorithm: Scheduler) -> Iterator[Round]:
    """Run an algorithm in every node, where each rank works for the owners whose proxy it is."""
    return within_groups(
        rank, groups, lambda r, node: Grid(singles(node)).across_groups(r, grid.proxies(r, owner), algorithm)
    )


def broadcast(
    rank: int,
    size: int,
    root: int = 0,
    groups: Groups | None = None,
    within: Any = tree,
    across: Scheduler = tree.broadcast,
    num_chunks: int = 0,
) -> Iterator[Round]:
    """Broadcast from the root to its counterparts across the nodes, which are the roots inside their nodes.

    Cost: (ceil(log2 k) + ceil(log2 l)) (alpha + n beta); direct inside,
    2 mu + ceil(log2 k) (alpha + n beta) + n(l-1)/l beta.

    >>> from functools import partial
    >>> from collectives.schedule.moves import render
    >>> print(render(partial(broadcast, groups=((0, 1), (2, 3)), root=3), 4))
    round 0:  3->1 [0-3]
    round 1:  1->0 [0-3]   3->2 [0-3]
    """
    groups = whole(groups, size)
    grid = Grid.of(groups)

    def among(rank: int, ranks: Sequence[int], root: int, algorithm: Scheduler) -> Schedule:
        task = Task(0, ranks, even_runs(num_chunks or size, len(ranks)))
        return interleave(rank, [task], partial(algorithm, root=ranks.index(root)))

    column = grid.columns[grid.first_column[root]]
    if num_chunks:
        task = Task(0, column, even_runs(num_chunks, num_chunks))
        yield from interleave(rank, [task], partial(across, root=column.index(root), num_chunks=num_chunks))
    else:
        yield from among(rank, column, root, across)
    yield from within_groups(rank, groups, lambda r, node: among(r, node, grid.proxies(r, [root])[0], within.broadcast))


def all_to_all(rank: int, size: int, groups: Groups | None = None, within: Any = pairwise) -> Iterator[Round]:
    """Chunk d of rank s becomes chunk p+s of rank d: inside to d's proxy, then across.

    Chunks in transit are packed in working space after the 2p chunks of the collective: all chunks must have one
    length.  Direct inside, a rank reads the chunks for its counterparts from the others' `x`.

    Cost: (l+k-2) alpha + n((l-1)/l + (k-1)/k) beta; direct inside, 2 mu + (k-1) alpha + 3n beta, of which n beta is for
    reordering by dests.

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
    grid = Grid.of(groups)
    own = group_of(rank, groups)
    in_order = [other for node in groups for other in sorted(node)] == list(everyone)
    room = max(size, len(load(rank, singles(own), grid.proxies(rank, everyone))))
    spare = 2 * size + room  # behind the outgoing data
    arrived, landing = size if room <= size else spare, size if in_order else spare

    def in_node(r: int, node: tuple[int, ...], owner: Sequence[int], to: int) -> Iterator[Round]:
        if len(node) == 1 < len(groups):
            return
        if within is direct:
            yield from collected(r, node, by_owner(owner)[r], to)
        else:
            yield from exchange(r, singles(node), owner, 0, to)

    if len(groups) == 1:
        yield from in_node(rank, groups[0], everyone, landing)
    else:
        yield from within_groups(rank, groups, lambda r, node: in_node(r, node, grid.proxies(r, everyone), arrived))
        yield from exchange(rank, groups, everyone, arrived if len(own) > 1 else 0, landing)
    if not in_order:
        yield rearranged(load(rank, groups, everyone), landing, [(rank, source) for source in everyone], size)


def load(rank: int, groups: Groups, owner: Sequence[int]) -> list[Datum]:
    """List what a rank holds after an exchange among these groups: the data for the chunks that it owns."""
    dests = by_owner(owner)[rank]
    return [datum for group in groups for datum in product(dests, sorted(group))]


def rearranged(data: list[Datum], begin: int, order: list[Datum], target: int) -> Round:
    """Return the copies that put data, which are in the chunks from `begin` on, in an order from chunk `target` on."""
    at = {datum: chunk for chunk, datum in enumerate(data, begin)}
    return pack(consecutive([at[datum] for datum in order]), target)


def exchange(rank: int, groups: Groups, owner: Sequence[int], begin: int, landing: int) -> Iterator[Round]:
    """Send what the groups hold for rank d to rank `owner[d]`, which stores its `load` from chunk `landing` on.

    A rank's outgoing data, its own vector or the result of an exchange in its group, begin at chunk `begin`.  They are
    packed after the 2p chunks of the collective.
    """
    grid, chunks_of = Grid(groups), by_owner(owner)
    own = group_of(rank, groups)
    columns = [i for i, other in enumerate(group_of(rank, grid.rows)) if other == rank]
    blocks = [list(product(dests, sorted(own))) for i in columns for dests in grid.chunks_by_rank(i, chunks_of)]
    data = load(rank, singles(own), grid.proxies(rank, owner))
    leaving = [datum for block in blocks for datum in block]
    if data != leaving or max(map(len, groups)) > 1:  # else outgoing data are in order in the vector
        yield rearranged(data, begin, leaving, 2 * len(owner))
        begin = 2 * len(owner)
    outs = laid(begin, map(len, blocks))
    ins = laid(landing, [len(chunks_of[rank]) * len(group) for group in groups])
    yield from interleave(rank, column_tasks(grid, columns, outs, ins), pairwise.all_to_all, MESSAGES // 2)


def collected(rank: int, node: Sequence[int], dests: list[int], landing: int) -> Iterator[Round]:
    """Read the data of a node's ranks for some dests, in the order of their `load`."""
    outs = consecutive(dests)
    ins = laid(landing, [len(run) for _ in node for run in outs])
    pairs = zip(product(node, outs), ins, strict=True)
    barrier = (Barrier(tuple(sorted(node))),)
    yield barrier
    yield tuple(Copy(run, to) if source == rank else Get(source, run, to) for (source, run), to in pairs)
    yield barrier


def column_tasks(grid: Grid, own_columns: list[int], outs: list[range], ins: list[range]) -> Iterator[Task]:
    """Yield a rank's all-to-all in each of its columns: outgoing runs and incoming runs."""
    size = len(ins)
    for i, column in enumerate(grid.columns):
        nth = own_columns.index(i) if i in own_columns else None
        came = ins if nth == 0 else [range(0)] * size
        runs = [] if nth is None else [*outs[nth * size : (nth + 1) * size], *came]
        yield Task(i % grid.in_common, column, runs)


def pair_of_rows(collective: str, schedule: Scheduler, needs: Precondition = NOTHING) -> tuple[Algorithm, Algorithm]:
    row = Algorithm(collective, "hierarchical", schedule, needs, over_nodes=True)
    reading = partial(schedule, within=direct)
    return row, row._replace(name="hierarchical_direct", schedule=reading, access=Access.INTRA_NODE)


def composed(row: Algorithm, inside: dict[str, Any], across: dict[str, Scheduler]) -> Iterator[Algorithm]:
    """Yield the variants of a row: these modules inside the nodes, by name, with these algorithms across them."""
    units: dict[Scheduler, tuple[Unit, int]] = {
        tree.double_all_reduce: (each_column, 0),
        chain.broadcast: (whole_vector, 0),
        recursive.all_reduce: (each_column, 1),
        ring.all_reduce: (each_counterpart, 1),
        recursive.rabenseifner: (each_counterpart, 1),
    }
    for (inner, within), (outer, algorithm) in product(inside.items(), across.items()):
        schedule = partial(row.schedule, within=within, across=algorithm)
        name = "/".join(filter(None, (row.name, inner, outer)))
        unit, cut = units.get(algorithm, (None, 0))
        yield row._replace(name=name, schedule=schedule, unit=unit, cut=cut)


ALGORITHMS = (
    *pair_of_rows("all_reduce", all_reduce),
    *pair_of_rows("reduce_scatter", reduce_scatter),
    *pair_of_rows("all_gather", all_gather),
    *pair_of_rows("all_to_all", all_to_all, EQUAL_CHUNKS),
    *pair_of_rows("broadcast", broadcast),
)


def over_nodes(collective: str, across: Scheduler, inside: str = "ring", groups: Groups | None = None) -> Scheduler:
    """Return the hierarchical algorithm with a schedule of the caller's own across the nodes.

    `groups` are by default the nodes of the communicator that runs it; where it is itself the `across` of another,
    they are needed: nodes behind one switch, by number.

    >>> from collectives.schedule.proof import check
    >>> switches = over_nodes("all_reduce", recursive.all_reduce, groups=((0, 1), (2, 3)))
    >>> check("all_reduce", over_nodes("all_reduce", switches, "recursive", groups=((0, 1), (2, 3), (4, 5), (6, 7))), 8)

    Raises: ValueError for a collective that has no hierarchical algorithm, or an unknown one inside.
    """
    schedules = {row.collective: row.schedule for row in ALGORITHMS if not row.access}
    if collective not in schedules:
        raise ValueError(f"{collective!r} has no hierarchical algorithm: use one of {', '.join(schedules)}")
    modules = {"ring": ring, "recursive": recursive, "binomial": tree, "pairwise": pairwise, "direct": direct}
    able = {name: module for name, module in modules.items() if is_able(module, collective)}
    if inside not in able:
        raise ValueError(f"inside={inside!r} is unknown: for {collective}, use one of {', '.join(able)}")
    schedule, within = schedules[collective], able[inside]

    def composition(rank: int, size: int, root: int = 0, groups: Groups | None = groups) -> Schedule:
        roots = {"root": root} if collective == "broadcast" else {}
        return schedule(rank, size, groups=groups, within=within, across=across, **roots)

    composition.__qualname__ = f"over_nodes.{inside}.{getattr(across, '__name__', 'across')}"
    return composition


def is_able(module: Any, collective: str) -> bool:
    """Return whether a module has what is needed inside the nodes."""
    needs = {"all_reduce": ("reduce_scatter", "all_gather")}.get(collective, (collective,))
    return all(hasattr(module, name) for name in needs)


ACROSS: dict[str, dict[str, Scheduler]] = {
    "all_reduce": {
        "ring": ring.all_reduce,
        "recursive_doubling": recursive.all_reduce,
        "rabenseifner": recursive.rabenseifner,
        "double_tree": tree.double_all_reduce,
    },
    "broadcast": {
        "binomial": tree.broadcast,
        "scatter_all_gather": tree.scatter_all_gather,
        "chain": chain.broadcast,
    },
}
CUT = ("double_tree", "chain")  # whose number of chunks is chosen
INSIDE: dict[str, dict[str, Any]] = {
    "all_reduce": {"ring": ring, "recursive": recursive},
    "broadcast": {"binomial": tree},
}
VARIANTS: tuple[Algorithm, ...] = tuple(
    variant
    for row in ALGORITHMS
    if row.collective in ACROSS
    for variant in composed(row, {"": direct} if row.access else INSIDE[row.collective], ACROSS[row.collective])
)


def in_groups(rank: int, size: int, schedule: Scheduler, length: int, **more: Any) -> Schedule:
    """Run a hierarchical algorithm in which every `length` consecutive ranks are a node."""
    return schedule(rank, size, groups=tuple(map(tuple, laid(0, lengths(size, length)))), **more)


def lengths(size: int, length: int) -> list[int]:
    return [min(length, size - first) for first in range(0, size, length)]


@cache
def three_levels(row: Algorithm, length: int) -> tuple[Algorithm, ...]:
    """Return the variants of a row with a level more: groups of `length` nodes, as behind one switch.

    >>> [each.name for each in three_levels(ALGORITHMS[-1], 16)]
    ['hierarchical_direct/binomial@16/binomial', 'hierarchical_direct/binomial@16/scatter_all_gather']
    """
    across = {name: one for name, one in ACROSS.get(row.collective, {}).items() if name not in CUT}
    by_group: dict[str, Scheduler] = {
        f"{middle}@{length}/{outer}": partial(
            in_groups, schedule=row.schedule, length=length, within=module, across=algorithm
        )
        for (middle, module), (outer, algorithm) in product(INSIDE.get(row.collective, {}).items(), across.items())
    }
    inside = {"": direct} if row.access else INSIDE.get(row.collective, {})
    return tuple(composed(row, inside, by_group))
