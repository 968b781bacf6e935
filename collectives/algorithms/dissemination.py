"""Dissemination: in round k, tell the rank 2^k to the right all that you have heard.

Source: Hensgen, Finkel, Manber, "Two algorithms for barrier synchronization", 1988.
"""

from collections.abc import Iterator

from collectives.schedule.moves import Recv, Round, Send


def barrier(rank: int, size: int) -> Iterator[Round]:
    """No rank ends before every rank has started.  The messages are empty.

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
