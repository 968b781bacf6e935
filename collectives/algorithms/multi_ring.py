"""Several rings at once, each for a part of the vector, and each leaving the nodes by other ranks.

A ring over nodes leaves a node by one rank only, and so uses the port of one.  For large vectors, on nodes whose ranks
have a port each, or whose inner links are much faster than their ports.

Source: NVIDIA/nccl, src/graph/rings.cc, whose channels are such rings.
"""

from collections.abc import Iterator, Sequence

from collectives.algorithms.algorithm import Algorithm, Groups, Precondition
from collectives.schedule.moves import Recv, RecvReduce, Round, Send

MOST_RINGS = 8  # ports of a node
MOST_RANKS = Precondition(lambda size, equal: size <= 4096, "at most 4096 ranks")  # with more, all that counts is alpha


def num_rings(groups: Groups) -> int:
    """Return the number of rings: as many as the smallest node has ranks, 8 at most; one on one node."""
    return min(MOST_RINGS, *map(len, groups)) if len(groups) > 1 else 1


def chunks_of_rings(size: int, groups: Groups) -> int:
    return num_rings(groups) * size


def all_reduce(rank: int, size: int, groups: Groups | None = None, num_chunks: int = 0) -> Iterator[Round]:
    """All-reduce a part of the vector in each ring, whose last rank in a node is another one.

    `num_chunks` is a multiple of the ranks times the rings; without it, all is one ring.

    Cost: 2(p-1) alpha + 2n(p-1)/p beta + n(p-1)/p gamma, of which each of l ports has 1/l of the bytes.

    >>> from functools import partial
    >>> from collectives.schedule.moves import render
    >>> print(render(partial(all_reduce, groups=((0, 1), (2, 3)), num_chunks=8), 4))
    round 0:  0->3 [0]+   0->1 [7]+   1->0 [3]+   1->2 [4]+   2->1 [2]+   2->3 [5]+   3->2 [1]+   3->0 [6]+
    round 1:  0->3 [3]+   0->1 [6]+   1->0 [2]+   1->2 [7]+   2->1 [1]+   2->3 [4]+   3->2 [0]+   3->0 [5]+
    round 2:  0->3 [2]+   0->1 [5]+   1->0 [1]+   1->2 [6]+   2->1 [0]+   2->3 [7]+   3->2 [3]+   3->0 [4]+
    round 3:  0->3 [1]   0->1 [4]   1->0 [0]   1->2 [5]   2->1 [3]   2->3 [6]   3->2 [2]   3->0 [7]
    round 4:  0->3 [0]   0->1 [7]   1->0 [3]   1->2 [4]   2->1 [2]   2->3 [5]   3->2 [1]   3->0 [6]
    round 5:  0->3 [3]   0->1 [6]   1->0 [2]   1->2 [7]   2->1 [1]   2->3 [4]   3->2 [0]   3->0 [5]
    """
    nodes = groups or (tuple(range(size)),)
    number_of = num_rings(nodes) if num_chunks else 1
    length = max(1, num_chunks // (number_of * size))
    rings = []
    for number in range(number_of):
        order = [node[(number + 1 + index) % len(node)] for node in nodes for index in range(len(node))]
        runs = [range(begin * length, (begin + 1) * length) for begin in range(number * size, (number + 1) * size)]
        rings.append(one_ring(order.index(rank), order, runs))
    return (sum(moves, ()) for moves in zip(*rings, strict=True))


def one_ring(position: int, order: Sequence[int], runs: Sequence[range]) -> Iterator[Round]:
    """Reduce-scatter and all-gather in a ring of ranks in this order, whose chunks are these runs."""
    size = len(order)
    right, left = order[(position + 1) % size], order[position - 1]
    for step in range(2 * (size - 1)):
        take, sent = RecvReduce if step < size - 1 else Recv, position - 1 - step
        yield Send(right, runs[sent % size]), take(left, runs[(sent - 1) % size])


ALGORITHMS = (Algorithm("all_reduce", "multi_ring", all_reduce, MOST_RANKS, over_nodes=True, unit=chunks_of_rings),)
