"""Bruck, and dissemination: in round k, exchange with the ranks 2^k away, for any number of ranks.  For small vectors.

Source: Bruck, Ho, Kipnis, Upfal, Weathersby, "Efficient algorithms for all-to-all communications in multiport
message-passing systems", 1997; MPICH, src/mpi/coll/allgather/allgather_intra_brucks.c,
src/mpi/coll/alltoall/alltoall_intra_brucks.c;
Hensgen, Finkel, Manber, "Two algorithms for barrier synchronization", 1988.
"""

from collections.abc import Iterator

from collectives.algorithms.algorithm import EQUAL_CHUNKS, Algorithm
from collectives.algorithms.pairwise import inbox
from collectives.schedule.moves import Copy, Recv, Round, Send, arc, laid


def all_gather(rank: int, size: int) -> Iterator[Round]:
    """Rank r starts owning chunk r; the number of its chunks, from r on round the ring, doubles every round.

    Cost: ceil(log2 p) alpha + n(p-1)/p beta.

    >>> from collectives.schedule.moves import render
    >>> print(render(all_gather, 3))
    round 0:  0->2 [0]   1->0 [1]   2->1 [2]
    round 1:  0->1 [0]   1->2 [1]   2->0 [2]
    """
    for bit in range((size - 1).bit_length()):
        reach = 1 << bit
        dest, source, length = (rank - reach) % size, (rank + reach) % size, min(reach, size - reach)
        sends = [Send(dest, run) for run in arc(rank, length, size)]
        yield (*sends, *(Recv(source, run) for run in arc(source, length, size)))


def all_to_all(rank: int, size: int) -> Iterator[Round]:
    """Chunk d of rank s becomes chunk p+s of rank d: it takes a hop of 2^k for each bit k set in d-s.

    Slot j is for the rank j to the right; round k forwards the slots that have bit k set.  The slots are p chunks of
    working space after the 2p of the collective; the slots of a round are packed where the result will be.  All chunks
    must have one length.

    Cost: ceil(log2 p) alpha + n b/p beta, b being the ones among the bits of 0 to p-1: p/2 log2 p for a power of two.

    >>> from collectives.schedule.moves import render
    >>> print(render(all_to_all, 2))
    round 0:  0: [0-1]>[4-5]   1: [1]>[4]   1: [0]>[5]
    round 1:  0: [5]>[2]   1: [5]>[2]
    round 2:  0->1 [2]   1->0 [2]
    round 3:  0: [3]>[5]   1: [3]>[5]
    round 4:  0: [4]>[2]   0: [5]>[3]   1: [4]>[3]   1: [5]>[2]
    """
    slots, mine = 2 * size, arc(rank, size, size)
    yield pack(mine, slots)
    for bit in range((size - 1).bit_length()):
        reach = 1 << bit
        moving = [range(slots + j, slots + min(j + reach, size)) for j in range(reach, size, 2 * reach)]
        length = sum(map(len, moving))
        packed, arrived = range(size, size + length), range(size + length, size + 2 * length)
        yield pack(moving, packed.start)
        yield Send((rank + reach) % size, packed), Recv((rank - reach) % size, arrived)
        yield tuple(map(Copy, laid(arrived.start, map(len, moving)), moving))
    yield tuple(map(Copy, laid(slots, [1] * size), (inbox((rank - slot) % size, size) for slot in range(size))))


def barrier(rank: int, size: int) -> Iterator[Round]:
    """Send the rank 2^k to the right the news of all ranks known to have started: a dissemination barrier.

    No rank ends before every rank has started.  The messages are empty.

    Cost: ceil(log2 p) alpha.

    >>> from collectives.schedule.moves import render
    >>> print(render(barrier, 3))
    round 0:  0->1 []   1->2 []   2->0 []
    round 1:  0->2 []   1->0 []   2->1 []
    """
    nothing = range(0)
    for bit in range((size - 1).bit_length()):
        reach = 1 << bit
        yield Send((rank + reach) % size, nothing), Recv((rank - reach) % size, nothing)


def pack(runs: list[range], begin: int) -> Round:
    """Copy runs one after the other to chunk `begin` and those behind it."""
    return tuple(map(Copy, runs, laid(begin, map(len, runs))))


ALGORITHMS = (
    Algorithm("all_gather", "bruck", all_gather),
    Algorithm("all_to_all", "bruck", all_to_all, EQUAL_CHUNKS),
    Algorithm("barrier", "dissemination", barrier),
)
