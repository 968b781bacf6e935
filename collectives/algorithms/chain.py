"""The chain: chunks are pipelined through all ranks in turn.

Source: Open MPI, ompi/mca/coll/base/coll_base_bcast.c, ompi_coll_base_bcast_intra_pipeline;
ompi/mca/coll/base/coll_base_reduce.c, ompi_coll_base_reduce_intra_pipeline.
"""

from collections.abc import Callable, Iterator

from collectives.algorithms.algorithm import Algorithm
from collectives.schedule.moves import Move, Recv, RecvReduce, Round, Send, chunk


def broadcast(rank: int, size: int, root: int = 0) -> Iterator[Round]:
    """Pass the root's vector from rank to rank, chunk by chunk.  For large vectors.

    Cost: 2(p-1) (alpha + n/p beta).

    >>> from collectives.schedule.moves import render
    >>> print(render(broadcast, 3))
    round 0:  0->1 [0]
    round 1:  0->1 [1]   1->2 [0]
    round 2:  0->1 [2]   1->2 [1]
    round 3:  1->2 [2]
    """
    right, left, relative_rank = (rank + 1) % size, (rank - 1) % size, (rank - root) % size
    for step in range(2 * (size - 1)):
        send = [Send(right, run) for run in nth(step - relative_rank, size) if relative_rank < size - 1]
        recv = [Recv(left, run) for run in nth(step - relative_rank + 1, size) if relative_rank > 0]
        yield (*send, *recv)


def all_reduce(rank: int, size: int) -> Iterator[Round]:
    """Reduce along the chain from rank 0 to the last rank, and pass the sums back.  Reduces in rank order.

    Cost: 3(p-1) alpha + n(4p-5)/p beta + 2n(p-1)/p gamma.

    >>> from collectives.schedule.moves import render
    >>> print(render(all_reduce, 3))
    round 0:  0->1 [0]+
    round 1:  0->1 [1]+   1->2 [0]+
    round 2:  0->1 [2]+   1->2 [1]+   2->1 [0]
    round 3:  1->2 [2]+   1->0 [0]   2->1 [1]
    round 4:  1->0 [1]   2->1 [2]
    round 5:  1->0 [2]
    """
    for step in range(3 * (size - 1)):
        down = step - 2 * (size - 1) + rank
        send = [Send(rank - 1, run) for run in nth(down, size) if rank > 0]
        recv = [Recv(rank + 1, run) for run in nth(down + 1, size) if rank < size - 1]
        yield (*climb(rank, size, step), *send, *recv)


def reduce_scatter(rank: int, size: int) -> Iterator[Round]:
    """Reduce along the chain from rank 0 to the last rank, which sends chunk r to rank r.  Reduces in rank order.

    Cost: 2(p-1) alpha + 2n(p-1)/p (beta + gamma).

    >>> from collectives.schedule.moves import render
    >>> print(render(reduce_scatter, 3))
    round 0:  0->1 [0]+
    round 1:  0->1 [1]+   1->2 [0]+
    round 2:  0->1 [2]+   1->2 [1]+   2->0 [0]
    round 3:  1->2 [2]+   2->1 [1]
    """
    for step in range(2 * (size - 1)):
        yield (*climb(rank, size, step), *deliver(rank, size, step, lambda index: index))


def reduce(rank: int, size: int, root: int = 0) -> Iterator[Round]:
    """Reduce along the chain from rank 0 to the last rank, which sends the sums to the root.  Reduces in rank order.

    Cost: (2p-1) alpha + n(2p-1)/p beta + 2n(p-1)/p gamma; to the last rank, one round less.

    >>> from collectives.schedule.moves import render
    >>> print(render(reduce, 3))
    round 0:  0->1 [0]+
    round 1:  0->1 [1]+   1->2 [0]+
    round 2:  0->1 [2]+   1->2 [1]+   2->0 [0]
    round 3:  1->2 [2]+   2->0 [1]
    round 4:  2->0 [2]
    """
    for step in range(2 * (size - 1) + (root < size - 1)):
        yield (*climb(rank, size, step), *deliver(rank, size, step, lambda index: root))


def climb(rank: int, size: int, step: int) -> list[Move]:
    """Return a round on the way up: reduce the incoming chunk into the own one, and send the one reduced before."""
    reductions: list[Move] = [RecvReduce(rank - 1, run) for run in nth(step - rank + 1, size) if rank > 0]
    return [*reductions, *(Send(rank + 1, run) for run in nth(step - rank, size) if rank < size - 1)]


def deliver(rank: int, size: int, step: int, owner: Callable[[int], int]) -> list[Move]:
    """Send, from the last rank, the sum that it completed in the round before to its owner."""
    last = size - 1
    ready = [(owner(run.start), run) for run in nth(step - last, size) if owner(run.start) != last]
    if rank == last:
        return [Send(dest, run) for dest, run in ready]
    return [Recv(last, run) for dest, run in ready if dest == rank]


def nth(index: int, size: int) -> list[range]:
    """Return chunk `index`, if there is one."""
    return [chunk(index, size)] if 0 <= index < size else []


ALGORITHMS = (
    Algorithm("all_reduce", "chain", all_reduce, in_order=True),
    Algorithm("reduce_scatter", "chain", reduce_scatter, in_order=True),
    Algorithm("broadcast", "chain", broadcast),
    Algorithm("reduce", "chain", reduce, in_order=True),
)
