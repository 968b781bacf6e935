"""The binomial tree: the number of ranks that have the vector doubles every round.

Source: Thakur, Rabenseifner, Gropp, "Optimization of collective communication operations in MPICH", 2005;
MPICH, src/mpi/coll/bcast/bcast_intra_binomial.c.
"""

from collections.abc import Iterator

from collectives.schedule import Fold, Move, Recv, Round, Send


def broadcast(rank: int, size: int, root: int = 0) -> Iterator[Round]:
    """The root starts with the vector; every rank ends with it.  For small vectors.

    Cost: ceil(log2 p) (alpha + n beta).

    >>> from collectives.schedule import render
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


def reduce(rank: int, size: int, root: int = 0) -> Iterator[Round]:
    """The root ends with the sum of all: the broadcast, backwards.

    Cost: ceil(log2 p) (alpha + n beta + n gamma).

    >>> from collectives.schedule import render
    >>> print(render(reduce, 5))
    round 0:  1->0 [0-4]+   3->2 [0-4]+
    round 1:  2->0 [0-4]+
    round 2:  4->0 [0-4]+
    """
    for moves in reversed(list(broadcast(rank, size, root))):
        yield tuple(backwards(m) for m in moves)


def backwards(move: Move) -> Send | Fold:
    match move:
        case Send(to, run):
            return Fold(to, run)
        case Recv(source, run):
            return Send(source, run)
    raise AssertionError(move)
