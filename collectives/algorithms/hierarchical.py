"""Hierarchies: most of the data moves inside a node, and each rank talks to its counterparts in other nodes only.

Source: Horovod, horovod/common/ops/nccl_operations.cc, NCCLHierarchicalAllreduce.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import chain

from collectives.algorithms import ring
from collectives.schedule import Fold, Recv, Round, Schedule, Send, backwards, embed, shares

Algorithm = Callable[[int, int], Schedule]
Nodes = tuple[tuple[int, ...], ...]


def all_reduce(
    rank: int,
    size: int,
    nodes: Nodes | None = None,
    scatter: Algorithm = ring.reduce_scatter,
    across: Algorithm = ring.all_reduce,
    gather: Algorithm = ring.all_gather,
) -> Iterator[Round]:
    """Reduce-scatter in the node, all-reduce across nodes, all-gather in the node.

    `nodes` has the ranks of each, by default of a single one; `scatter`, `across` and `gather` may be any algorithms,
    `across` hierarchical in turn.  Where nodes are uneven, as many ranks of each as the smallest has do this; a node's
    other ranks are *extras*, each of which first gives all it has to one of those, and gets the result from it in the
    end.

    Cost: with rings, for k nodes of l ranks, 2(l+k-2) alpha + 2n(p-1)/p beta + n(p-1)/p gamma.  With up to d extras
    for a rank, 2d alpha + 2nd beta + nd gamma more, and shares that may be uneven.

    >>> from functools import partial
    >>> from collectives.schedule import render
    >>> print(render(partial(all_reduce, nodes=((0, 1), (2, 3, 4))), 5))
    round 0:  4->2 [0-4]+
    round 1:  0->1 [3-4]+   1->0 [0-2]+   2->3 [3-4]+   3->2 [0-2]+
    round 2:  0->2 [2]+   1->3 [4]+   2->0 [0-1]+   3->1 [3]+
    round 3:  0->2 [0-1]   1->3 [3]   2->0 [2]   3->1 [4]
    round 4:  0->1 [0-2]   1->0 [3-4]   2->3 [0-2]   3->2 [3-4]
    round 5:  2->4 [0-4]
    """
    nodes = nodes or (tuple(range(size)),)
    width, largest = min(map(len, nodes)), max(map(len, nodes))
    at, node = next((at, node) for at, node in enumerate(nodes) if rank in node)
    local = node.index(rank)
    given = [hand_over(local, node, range(first, first + width), size) for first in range(width, largest, width)]
    yield from given
    parts = shares(size, width)
    counterparts, runs = [other[local % width] for other in nodes], divide(parts[local % width], len(nodes))
    working = chain(
        embed(scatter(local % width, width), node[:width], parts),
        embed(across(at, len(nodes)), counterparts, runs),
        embed(gather(local % width, width), node[:width], parts),
    )
    yield from working if local < width else (() for _ in working)
    yield from backwards(given, take=Recv)


def hand_over(local: int, node: Sequence[int], extras: range, size: int) -> Round:
    """The round in which some extras of a node give what they have, one to each of its first ranks."""
    everything, width = range(size), len(extras)
    if local in extras:
        return (Send(node[local % width], everything),)
    extra = extras.start + local
    return (Fold(node[extra], everything),) if local < width and extra < len(node) else ()


def divide(run: range, parts: int) -> list[range]:
    return [run[share.start : share.stop] for share in shares(len(run), parts)]
