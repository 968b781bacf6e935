"""Neighbour exchange: by turns with the neighbour on one side and on the other, pass on what came last.

Source: Chen, Zhang, Zhang, Yuan, "Performance evaluation of allgather algorithms on terascale Linux cluster with
fast Ethernet", 2005; Open MPI, ompi/mca/coll/base/coll_base_allgather.c.
"""

from collections.abc import Iterator

from collectives.schedule.moves import Recv, Round, Send, chunk


def all_gather(rank: int, size: int) -> Iterator[Round]:
    """Rank r starts owning chunk r; every rank ends with all, in half the rounds of a ring.  `size` is even, or 1.

    Cost: p/2 alpha + n(p-1)/p beta.

    >>> from collectives.schedule.moves import render
    >>> print(render(all_gather, 6))
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
    """The chunks of two ranks that exchange first."""
    return range(2 * index, 2 * index + 2)
