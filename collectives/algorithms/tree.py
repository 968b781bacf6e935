"""The binomial tree: the number of ranks that have the vector doubles every round.

Source: Thakur, Rabenseifner, Gropp, "Optimization of collective communication operations in MPICH", 2005;
MPICH, src/mpi/coll/bcast/bcast_intra_binomial.c, bcast_intra_scatter_ring_allgather.c,
src/mpi/coll/scatter/scatter_intra_binomial.c, src/mpi/coll/gather/gather_intra_binomial.c.
"""

from collections.abc import Iterator

from collectives.algorithms import ring
from collectives.algorithms.algorithm import Algorithm
from collectives.schedule.moves import Recv, RecvReduce, Round, Schedule, Send, arc, backwards


def broadcast(rank: int, size: int, root: int = 0) -> Iterator[Round]:
    """The root starts with the vector; every rank ends with it.  For small vectors.

    Cost: ceil(log2 p) (alpha + n beta).

    >>> from collectives.schedule.moves import render
    >>> print(render(broadcast, 5, root=1))
    round 0:  1->0 [0-4]
    round 1:  1->3 [0-4]
    round 2:  1->2 [0-4]   3->4 [0-4]
    """
    everything = range(size)
    place = (rank - root) % size
    for bit in reversed(range((size - 1).bit_length())):
        reach = 1 << bit
        if place % (2 * reach) == reach:
            yield (Recv((rank - reach) % size, everything),)
        elif place % (2 * reach) == 0 and place + reach < size:
            yield (Send((rank + reach) % size, everything),)
        else:
            yield ()


def reduce(rank: int, size: int, root: int = 0) -> Schedule:
    """The root ends with the sum of all: the broadcast, backwards.

    Cost: ceil(log2 p) (alpha + n beta + n gamma).

    >>> from collectives.schedule.moves import render
    >>> print(render(reduce, 5))
    round 0:  1->0 [0-4]+   3->2 [0-4]+
    round 1:  2->0 [0-4]+
    round 2:  4->0 [0-4]+
    """
    return backwards(broadcast(rank, size, root), take=RecvReduce)


def all_reduce(rank: int, size: int) -> Iterator[Round]:
    """Reduce to rank 0, then broadcast.

    Cost: ceil(log2 p) (2 alpha + 2n beta + n gamma).

    >>> from collectives.schedule.moves import render
    >>> print(render(all_reduce, 3))
    round 0:  1->0 [0-2]+
    round 1:  2->0 [0-2]+
    round 2:  0->2 [0-2]
    round 3:  0->1 [0-2]
    """
    yield from reduce(rank, size)
    yield from broadcast(rank, size)


def scatter(rank: int, size: int, root: int = 0) -> Iterator[Round]:
    """The root starts with all chunks; rank r ends with chunk r.  What is sent on is for a whole subtree.

    Cost: ceil(log2 p) alpha + n(p-1)/p beta.

    >>> from collectives.schedule.moves import render
    >>> print(render(scatter, 5, root=2))
    round 0:  2->1 [1]
    round 1:  2->4 [4]   2->4 [0]
    round 2:  2->3 [3]   4->0 [0]
    """
    place = (rank - root) % size
    for bit in reversed(range((size - 1).bit_length())):
        reach = 1 << bit
        if place % (2 * reach) == reach:
            mine = arc(rank, min(reach, size - place), size)
            yield tuple(Recv((rank - reach) % size, run) for run in mine)
        elif place % (2 * reach) == 0 and place + reach < size:
            theirs = arc(rank + reach, min(reach, size - place - reach), size)
            yield tuple(Send((rank + reach) % size, run) for run in theirs)
        else:
            yield ()


def gather(rank: int, size: int, root: int = 0) -> Schedule:
    """Rank r starts with chunk r; the root ends with all: the scatter, backwards.

    Cost: ceil(log2 p) alpha + n(p-1)/p beta.

    >>> from collectives.schedule.moves import render
    >>> print(render(gather, 5))
    round 0:  1->0 [1]   3->2 [3]
    round 1:  2->0 [2-3]
    round 2:  4->0 [4]
    """
    return backwards(scatter(rank, size, root), take=Recv)


def scatter_all_gather(rank: int, size: int, root: int = 0) -> Iterator[Round]:
    """Broadcast as a scatter, then a ring's all-gather, which spares the root what it has.  For large vectors.

    Cost: (ceil(log2 p) + p-1) alpha + 2n(p-1)/p beta.

    >>> from collectives.schedule.moves import render
    >>> print(render(scatter_all_gather, 3))
    round 0:  0->2 [2]
    round 1:  0->1 [1]
    round 2:  0->1 [0]   1->2 [1]
    round 3:  0->1 [2]   1->2 [0]
    """
    yield from scatter(rank, size, root)
    for moves in ring.all_gather(rank, size):
        yield tuple(m for m in moves if root != (m.to if isinstance(m, Send) else rank))


ALGORITHMS = (
    Algorithm("all_reduce", "binomial", all_reduce),
    Algorithm("broadcast", "binomial", broadcast),
    Algorithm("broadcast", "scatter_all_gather", scatter_all_gather),
    Algorithm("reduce", "binomial", reduce),
    Algorithm("gather", "binomial", gather),
    Algorithm("scatter", "binomial", scatter),
)
