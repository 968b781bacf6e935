"""Pairwise exchange: in round k, send to the rank k to the right, receive from the rank k to the left.

Source: Thakur, Rabenseifner, Gropp, "Optimization of collective communication operations in MPICH", 2005;
MPICH, src/mpi/coll/alltoall/alltoall_intra_pairwise.c,
src/mpi/coll/reduce_scatter/reduce_scatter_intra_pairwise.c.
"""

from collections.abc import Iterator

from collectives.algorithms.algorithm import Algorithm
from collectives.schedule.moves import Copy, Recv, RecvReduce, Round, Send, chunk


def all_to_all(rank: int, size: int) -> Iterator[Round]:
    """Chunk d of rank s becomes chunk p+s of rank d: the vector is p chunks out, then p chunks in.

    Cost: (p-1) alpha + n(p-1)/p beta.

    >>> from collectives.schedule.moves import render
    >>> print(render(all_to_all, 3))
    round 0:  0: [0]>[3]   1: [1]>[4]   2: [2]>[5]
    round 1:  0->1 [1]   1->2 [2]   2->0 [0]
    round 2:  0->2 [2]   1->0 [0]   2->1 [1]
    """
    yield (Copy(chunk(rank, size), inbox(rank, size)),)
    for step in range(1, size):
        dest, source = (rank + step) % size, (rank - step) % size
        yield Send(dest, chunk(dest, size)), Recv(source, inbox(source, size))


def inbox(source: int, size: int) -> range:
    return range(size + source, size + source + 1)


def reduce_scatter(rank: int, size: int) -> Iterator[Round]:
    """Rank r ends owning chunk r, to which each rank's is added as it arrives: only input is sent.

    Cost: (p-1) alpha + n(p-1)/p (beta + gamma).

    >>> from collectives.schedule.moves import render
    >>> print(render(reduce_scatter, 3))
    round 0:  0->1 [1]+   1->2 [2]+   2->0 [0]+
    round 1:  0->2 [2]+   1->0 [0]+   2->1 [1]+
    """
    for step in range(1, size):
        dest, source = (rank + step) % size, (rank - step) % size
        yield Send(dest, chunk(dest, size)), RecvReduce(source, chunk(rank, size))


ALGORITHMS = (
    Algorithm("reduce_scatter", "pairwise", reduce_scatter),
    Algorithm("all_to_all", "pairwise", all_to_all),
)
