"""Recursive doubling and halving: in each round, exchange with the rank whose number differs in one bit.

Off a power of two q, each of the first p-q even ranks is an *extra*: it gives its data to the odd rank after it,
its *proxy*, and gets the result back at the end.

Source: Thakur, Rabenseifner, Gropp, "Optimization of collective communication operations in MPICH", 2005;
MPICH, src/mpi/coll/allreduce/allreduce_intra_recursive_doubling.c, allreduce_intra_reduce_scatter_allgather.c,
src/mpi/coll/reduce_scatter/reduce_scatter_intra_recursive_halving.c,
src/mpi/coll/allgather/allgather_intra_recursive_doubling.c.
"""

from collections.abc import Callable, Iterator
from functools import lru_cache

from collectives.algorithms.algorithm import Algorithm
from collectives.schedule.moves import Recv, RecvReduce, Round, Schedule, Send, among, backwards, chunk, even_runs


def exchanges(rank: int, size: int) -> Iterator[Round]:
    """All-reduce the whole vector among a power of two of ranks."""
    everything = range(size)
    for bit in range(size.bit_length() - 1):
        peer = rank ^ (1 << bit)
        yield Send(peer, everything), RecvReduce(peer, everything)


def halving(rank: int, size: int) -> Iterator[Round]:
    """Reduce-scatter among a power of two of ranks: each keeps the half that contains its own chunk."""
    for bit in reversed(range(size.bit_length() - 1)):
        peer = rank ^ (1 << bit)
        yield Send(peer, block(peer, bit)), RecvReduce(peer, block(rank, bit))


def doubling(rank: int, size: int) -> Schedule:
    """All-gather among a power of two of ranks."""
    return backwards(halving(rank, size), take=Recv)


def halving_doubling(rank: int, size: int) -> Iterator[Round]:
    yield from halving(rank, size)
    yield from doubling(rank, size)


def block(rank: int, bit: int) -> range:
    """Return the chunks of those ranks that differ from `rank` below `bit` only."""
    first = rank >> bit << bit
    return range(first, first + (1 << bit))


def with_extras(
    rank: int, size: int, algorithm: Callable[[int, int], Schedule], result: Callable[[int, int], range]
) -> Iterator[Round]:
    """Yield a power of two's schedule on any number of ranks: extras give their data first, and get the result last."""
    extras, group, own = proxies(size)
    if extras:
        yield hand_over(rank, extras, range(size), range(size))
    yield from among(rank, group, own, algorithm)
    if extras:
        yield from backwards([hand_over(rank, extras, result(rank, size), result(rank - 1, size))], take=Recv)


@lru_cache(maxsize=8)
def proxies(size: int) -> tuple[range, list[int], list[range]]:
    """Return the extras, the other ranks, and for each of those its chunks and its extra's."""
    power = 1 << (size.bit_length() - 1)
    extras = range(0, 2 * (size - power), 2)
    return extras, [rank for rank in range(size) if rank not in extras], even_runs(size, power)


def hand_over(rank: int, extras: range, own: range, of_extra: range) -> Round:
    """Return the round in which extras give to their proxies."""
    if rank in extras:
        return (Send(rank + 1, own),)
    return (RecvReduce(rank - 1, of_extra),) if rank - 1 in extras else ()


def whole(rank: int, size: int) -> range:
    return range(size)


def all_reduce(rank: int, size: int) -> Schedule:
    """All-reduce the whole vector, paired as a balanced tree over neighbours.  For small vectors.

    Cost: log2 p (alpha + n beta + n gamma); off the power of two log2 q + 2 rounds, no gamma in the last.

    >>> from collectives.schedule.moves import render
    >>> print(render(all_reduce, 4))
    round 0:  0->1 [0-3]+   1->0 [0-3]+   2->3 [0-3]+   3->2 [0-3]+
    round 1:  0->2 [0-3]+   1->3 [0-3]+   2->0 [0-3]+   3->1 [0-3]+
    >>> print(render(all_reduce, 3))
    round 0:  0->1 [0-2]+
    round 1:  1->2 [0-2]+   2->1 [0-2]+
    round 2:  1->0 [0-2]
    """
    return with_extras(rank, size, exchanges, result=whole)


def rabenseifner(rank: int, size: int) -> Schedule:
    """Reduce-scatter by halving, then all-gather by doubling: an all-reduce for large vectors.

    Cost: 2 log2 p alpha + 2n(p-1)/p beta + n(p-1)/p gamma; off the power of two, two rounds of n beta more, of
    which one has n gamma, and h for p-1, as in `reduce_scatter`.

    >>> from collectives.schedule.moves import render
    >>> print(render(rabenseifner, 4))
    round 0:  0->2 [2-3]+   1->3 [2-3]+   2->0 [0-1]+   3->1 [0-1]+
    round 1:  0->1 [1]+   1->0 [0]+   2->3 [3]+   3->2 [2]+
    round 2:  0->1 [0]   1->0 [1]   2->3 [2]   3->2 [3]
    round 3:  0->2 [0-1]   1->3 [0-1]   2->0 [2-3]   3->1 [2-3]
    >>> print(render(rabenseifner, 3))
    round 0:  0->1 [0-2]+
    round 1:  1->2 [2]+   2->1 [0-1]+
    round 2:  1->2 [0-1]   2->1 [2]
    round 3:  1->0 [0-2]
    """
    return with_extras(rank, size, halving_doubling, result=whole)


def reduce_scatter(rank: int, size: int) -> Schedule:
    """Rank r ends owning chunk r; a proxy reduces its extra's chunk too.

    Cost: log2 p alpha + n(p-1)/p (beta + gamma); off the power of two, h for p-1, the sum of m + min(m, p-q) over
    m = q/2, q/4, ... 1, and two rounds more, one of n (beta + gamma) and one of n/p beta.

    >>> from collectives.schedule.moves import render
    >>> print(render(reduce_scatter, 4))
    round 0:  0->2 [2-3]+   1->3 [2-3]+   2->0 [0-1]+   3->1 [0-1]+
    round 1:  0->1 [1]+   1->0 [0]+   2->3 [3]+   3->2 [2]+
    >>> print(render(reduce_scatter, 3))
    round 0:  0->1 [0-2]+
    round 1:  1->2 [2]+   2->1 [0-1]+
    round 2:  1->0 [0]
    """
    return with_extras(rank, size, halving, result=chunk)


def all_gather(rank: int, size: int) -> Schedule:
    """Rank r starts owning chunk r; every rank ends with all: the reduce-scatter, backwards.

    Cost: log2 p alpha + n(p-1)/p beta; off the power of two, h for p-1, as in `reduce_scatter`, and two rounds
    more, one of n/p beta and one of n beta.

    >>> from collectives.schedule.moves import render
    >>> print(render(all_gather, 4))
    round 0:  0->1 [0]   1->0 [1]   2->3 [2]   3->2 [3]
    round 1:  0->2 [0-1]   1->3 [0-1]   2->0 [2-3]   3->1 [2-3]
    >>> print(render(all_gather, 3))
    round 0:  0->1 [0]
    round 1:  1->2 [0-1]   2->1 [2]
    round 2:  1->0 [0-2]
    """
    return backwards(reduce_scatter(rank, size), take=Recv)


ALGORITHMS = (
    Algorithm("all_reduce", "recursive_doubling", all_reduce),
    Algorithm("all_reduce", "rabenseifner", rabenseifner),
    Algorithm("reduce_scatter", "recursive_halving", reduce_scatter),
    Algorithm("all_gather", "recursive_doubling", all_gather),
)
