"""The ring: every rank exchanges with its two neighbours only, and each chunk goes round once.

Bandwidth-optimal: a rank sends (p-1)/p of the vector a pass, whatever p.  For large vectors.

Source: Patarasuk, Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009;
of the neighbour exchange: Chen, Zhang, Zhang, Yuan, "Performance evaluation of allgather algorithms on terascale Linux
cluster with fast Ethernet", 2005; Open MPI, ompi/mca/coll/base/coll_base_allgather.c.
"""

from collections.abc import Iterator

from collectives.algorithms.algorithm import EVEN_SIZE, Algorithm
from collectives.schedule.moves import Recv, RecvReduce, Round, Schedule, Send, chunk


def ring_pass(rank: int, size: int, first: int, take: type[Recv] | type[RecvReduce]) -> Iterator[Round]:
    """Send chunk `first` to the right, then p-2 times forward the chunk received from the left."""
    right, left = (rank + 1) % size, (rank - 1) % size
    for step in range(size - 1):
        yield Send(right, chunk(first - step, size)), take(left, chunk(first - step - 1, size))


def reduce_scatter(rank: int, size: int) -> Schedule:
    """Rank r ends owning chunk r, the sum starting at rank r+1 and going right.

    Cost: (p-1) alpha + n(p-1)/p (beta + gamma).

    >>> from collectives.schedule.moves import render
    >>> print(render(reduce_scatter, 4))
    round 0:  0->1 [3]+   1->2 [0]+   2->3 [1]+   3->0 [2]+
    round 1:  0->1 [2]+   1->2 [3]+   2->3 [0]+   3->0 [1]+
    round 2:  0->1 [1]+   1->2 [2]+   2->3 [3]+   3->0 [0]+
    """
    return ring_pass(rank, size, first=rank - 1, take=RecvReduce)


def all_gather(rank: int, size: int) -> Schedule:
    """Rank r starts owning chunk r; every rank ends with all.

    Cost: (p-1) alpha + n(p-1)/p beta.

    >>> from collectives.schedule.moves import render
    >>> print(render(all_gather, 3))
    round 0:  0->1 [0]   1->2 [1]   2->0 [2]
    round 1:  0->1 [2]   1->2 [0]   2->0 [1]
    """
    return ring_pass(rank, size, first=rank, take=Recv)


def all_reduce(rank: int, size: int) -> Iterator[Round]:
    """Reduce-scatter, then all-gather.

    Cost: 2(p-1) alpha + 2n(p-1)/p beta + n(p-1)/p gamma.

    >>> from collectives.schedule.moves import render
    >>> print(render(all_reduce, 3))
    round 0:  0->1 [2]+   1->2 [0]+   2->0 [1]+
    round 1:  0->1 [1]+   1->2 [2]+   2->0 [0]+
    round 2:  0->1 [0]   1->2 [1]   2->0 [2]
    round 3:  0->1 [2]   1->2 [0]   2->0 [1]
    """
    yield from reduce_scatter(rank, size)
    yield from all_gather(rank, size)


def neighbor_all_gather(rank: int, size: int) -> Iterator[Round]:
    """Neighbour exchange: alternately with either neighbour, forward the chunks received last.

    Rank r starts owning chunk r; every rank ends with all, in half the rounds of a ring.  `size` is even, or 1.

    Cost: p/2 alpha + n(p-1)/p beta.

    >>> from collectives.schedule.moves import render
    >>> print(render(neighbor_all_gather, 6))
    round 0:  0->1 [0]   1->0 [1]   2->3 [2]   3->2 [3]   4->5 [4]   5->4 [5]
    round 1:  0->5 [0-1]   1->2 [0-1]   2->1 [2-3]   3->4 [2-3]   4->3 [4-5]   5->0 [4-5]
    round 2:  0->1 [4-5]   1->0 [2-3]   2->3 [0-1]   3->2 [4-5]   4->5 [2-3]   5->4 [0-1]
    """
    if size == 1:
        return
    side = -1 if rank % 2 else 1  # the neighbour of the same pair
    yield Send(rank + side, chunk(rank, size)), Recv(rank + side, chunk(rank + side, size))
    own = latest = rank // 2
    for step in range(1, size // 2):
        side = -side
        peer, incoming = (rank + side) % size, (own + side * ((step + 1) // 2)) % (size // 2)
        yield Send(peer, pair(latest)), Recv(peer, pair(incoming))
        latest = incoming


def pair(index: int) -> range:
    """Return the chunks of two ranks that exchange first."""
    return range(2 * index, 2 * index + 2)


ALGORITHMS = (
    Algorithm("all_reduce", "ring", all_reduce),
    Algorithm("reduce_scatter", "ring", reduce_scatter),
    Algorithm("all_gather", "ring", all_gather),
    Algorithm("all_gather", "neighbor", neighbor_all_gather, EVEN_SIZE),
)
