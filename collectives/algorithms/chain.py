"""The chain: chunks flow through all ranks in turn, one behind the other.

Source: Open MPI, ompi/mca/coll/base/coll_base_bcast.c, ompi_coll_base_bcast_intra_pipeline.
"""

from collections.abc import Iterator

from collectives.schedule import Recv, Round, Send, chunk


def broadcast(rank: int, size: int, root: int = 0) -> Iterator[Round]:
    """The root starts with the vector; every rank ends with it.  For large vectors.

    Cost: 2(p-1) (alpha + n/p beta).

    >>> from collectives.schedule import render
    >>> print(render(broadcast, 3))
    round 0:  0->1 [0]
    round 1:  0->1 [1]   1->2 [0]
    round 2:  0->1 [2]   1->2 [1]
    round 3:  1->2 [2]
    """
    right, left, place = (rank + 1) % size, (rank - 1) % size, (rank - root) % size
    for step in range(2 * (size - 1)):
        arrives, leaves = step - place + 1, step - place
        recv = [Recv(left, chunk(arrives, size))] if place > 0 and 0 <= arrives < size else []
        send = [Send(right, chunk(leaves, size))] if place < size - 1 and 0 <= leaves < size else []
        yield (*send, *recv)
