"""Recursive doubling: in round k, exchange with the rank whose number differs in bit k.

Source: Thakur, Rabenseifner, Gropp, "Optimization of collective communication operations in MPICH", 2005;
MPICH, src/mpi/coll/allreduce/allreduce_intra_recursive_doubling.c.
"""

from collections.abc import Iterator

from collectives.schedule import Fold, Recv, Round, Send, embed, shares


def doubling(rank: int, size: int) -> Iterator[Round]:
    """All-reduce of the whole vector among a power of two of ranks."""
    everything = range(size)
    for bit in range(size.bit_length() - 1):
        peer = rank ^ (1 << bit)
        yield Send(peer, everything), Fold(peer, everything)


def all_reduce(rank: int, size: int) -> Iterator[Round]:
    """Every rank ends with the whole sum, paired as a balanced tree over neighbours.

    Off a power of two q, each of the first p-q even ranks is an *extra*: it folds into the odd rank after it,
    its *proxy*, and gets the result back at the end.  For small vectors.

    Cost: log2 p (alpha + n beta + n gamma); off the power of two log2 q + 2 rounds, no gamma in the last.

    >>> from collectives.schedule import render
    >>> print(render(all_reduce, 4))
    round 0:  0->1 [0-3]+   1->0 [0-3]+   2->3 [0-3]+   3->2 [0-3]+
    round 1:  0->2 [0-3]+   1->3 [0-3]+   2->0 [0-3]+   3->1 [0-3]+
    >>> print(render(all_reduce, 3))
    round 0:  0->1 [0-2]+
    round 1:  1->2 [0-2]+   2->1 [0-2]+
    round 2:  1->0 [0-2]
    """
    power = 1 << (size.bit_length() - 1)
    extras = range(0, 2 * (size - power), 2)
    group = [other for other in range(size) if other not in extras]
    everything = range(size)
    if extras:
        yield fold_extras(rank, extras, everything)
    if rank in extras:
        yield from ((),) * (power.bit_length() - 1)
    else:
        yield from embed(doubling(group.index(rank), power), group, shares(size, power))
    if extras:
        yield return_to_extras(rank, extras, everything)


def fold_extras(rank: int, extras: range, everything: range) -> Round:
    if rank in extras:
        return (Send(rank + 1, everything),)
    return (Fold(rank - 1, everything),) if rank - 1 in extras else ()


def return_to_extras(rank: int, extras: range, everything: range) -> Round:
    if rank in extras:
        return (Recv(rank + 1, everything),)
    return (Send(rank - 1, everything),) if rank - 1 in extras else ()
