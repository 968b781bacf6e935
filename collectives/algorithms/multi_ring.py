"""Several rings at once, each for a part of the vector, and each leaving the nodes by other ranks.

A ring over nodes leaves a node by one rank only, and so uses the port of one.  For long vectors between nodes: all
ports and the links inside the nodes are busy at once.

Source: NVIDIA/nccl, src/graph/rings.cc, whose channels are such rings.
"""

from collections import defaultdict
from collections.abc import Iterator

from collectives.algorithms.algorithm import Algorithm, Groups, Precondition
from collectives.algorithms.groups import consecutive
from collectives.schedule.moves import Recv, RecvReduce, Round, Send

MOST_RINGS = 8  # ports of a node
FEW_RANKS = Precondition(lambda size, equal: size <= 1024, "at most 1024 ranks")  # of more, latencies alone take 20 ms


def num_rings(groups: Groups) -> int:
    """Return the number of rings: as many as the smallest node has ranks, 8 at most; one on one node."""
    return min(MOST_RINGS, *map(len, groups)) if len(groups) > 1 else 1


def chunks_of_rings(size: int, groups: Groups) -> int:
    return num_rings(groups) * size


def all_reduce(rank: int, size: int, groups: Groups | None = None, num_chunks: int = 0) -> Iterator[Round]:
    """All-reduce a part of the vector in each ring, which leaves each node by another of its ranks.

    `num_chunks` is the number of ranks times that of rings.  With as many chunks as ranks, the default, there is one
    ring.  A rank's chunks for the next one are consecutive, so that they are one or two messages.

    Cost: 2(p-1) alpha + 2n(p-1)/p beta + n(p-1)/p gamma, of which each of l ports has 1/l of the bytes.

    >>> from functools import partial
    >>> from collectives.schedule.moves import render
    >>> print(render(partial(all_reduce, groups=((0, 1), (2, 3)), num_chunks=8), 4))
    round 0:  0->3 [0]+   0->1 [1]+   1->0 [6]+   1->2 [3]+   2->1 [4]+   2->3 [5]+   3->2 [2]+   3->0 [7]+
    round 1:  0->3 [6]+   0->1 [7]+   1->0 [4]+   1->2 [1]+   2->1 [2]+   2->3 [3]+   3->2 [0]+   3->0 [5]+
    round 2:  0->3 [4]+   0->1 [5]+   1->0 [2]+   1->2 [7]+   2->1 [0]+   2->3 [1]+   3->2 [6]+   3->0 [3]+
    round 3:  0->3 [2]   0->1 [3]   1->0 [0]   1->2 [5]   2->1 [6]   2->3 [7]   3->2 [4]   3->0 [1]
    round 4:  0->3 [0]   0->1 [1]   1->0 [6]   1->2 [3]   2->1 [4]   2->3 [5]   3->2 [2]   3->0 [7]
    round 5:  0->3 [6]   0->1 [7]   1->0 [4]   1->2 [1]   2->1 [2]   2->3 [3]   3->2 [0]   3->0 [5]
    """
    nodes = groups or (tuple(range(size)),)
    number = max(1, num_chunks // size)
    orders = [[node[(ring + 1 + i) % len(node)] for node in nodes for i in range(len(node))] for ring in range(number)]
    positions = [order.index(rank) for order in orders]
    for step in range(2 * (size - 1)):
        sends: dict[int, list[int]] = defaultdict(list)
        takes: dict[int, list[int]] = defaultdict(list)
        for ring, (order, position) in enumerate(zip(orders, positions, strict=True)):
            sent = position - 1 - step
            sends[order[(position + 1) % size]].append((sent + ring) % size * number + ring)
            takes[order[position - 1]].append((sent - 1 + ring) % size * number + ring)
        take = RecvReduce if step < size - 1 else Recv
        out = [Send(peer, run) for peer, chunks in sends.items() for run in consecutive(chunks)]
        yield *out, *(take(peer, run) for peer, chunks in takes.items() for run in consecutive(chunks))


ALGORITHMS = (
    Algorithm("all_reduce", "multi_ring", all_reduce, FEW_RANKS, over_nodes=True, unit=chunks_of_rings, cut=1),
)
