"""The chain: chunks are pipelined through all ranks in turn: c of them, by default one for each rank.

Source: Open MPI, ompi/mca/coll/base/coll_base_bcast.c, ompi_coll_base_bcast_intra_pipeline;
ompi/mca/coll/base/coll_base_reduce.c, ompi_coll_base_reduce_intra_pipeline.
"""

from collections.abc import Callable, Iterator

from collectives.algorithms.algorithm import Algorithm, whole_vector
from collectives.schedule.moves import Move, Recv, RecvReduce, Round, Send


def broadcast(rank: int, size: int, root: int = 0, num_chunks: int = 0) -> Iterator[Round]:
    """Pass the root's vector from rank to rank, chunk by chunk.  For large vectors.

    Cost: (p+c-2) (alpha + n/c beta).

    >>> from collectives.schedule.moves import render
    >>> print(render(broadcast, 3))
    round 0:  0->1 [0]
    round 1:  0->1 [1]   1->2 [0]
    round 2:  0->1 [2]   1->2 [1]
    round 3:  1->2 [2]
    """
    right, left, relative_rank = (rank + 1) % size, (rank - 1) % size, (rank - root) % size
    num_chunks = num_chunks or size
    for step in range(size + num_chunks - 2 if size > 1 else 0):
        send = [Send(right, run) for run in nth(step - relative_rank, num_chunks) if relative_rank < size - 1]
        recv = [Recv(left, run) for run in nth(step - relative_rank + 1, num_chunks) if relative_rank > 0]
        yield (*send, *recv)


def all_reduce(rank: int, size: int, num_chunks: int = 0) -> Iterator[Round]:
    """Reduce along the chain from rank 0 to the last rank, and pass the sums back.  Reduces in rank order.

    Cost: with p chunks, 3(p-1) alpha + n(4p-5)/p beta + 2n(p-1)/p gamma; 2p+c-3 rounds with c.

    >>> from collectives.schedule.moves import render
    >>> print(render(all_reduce, 3))
    round 0:  0->1 [0]+
    round 1:  0->1 [1]+   1->2 [0]+
    round 2:  0->1 [2]+   1->2 [1]+   2->1 [0]
    round 3:  1->2 [2]+   1->0 [0]   2->1 [1]
    round 4:  1->0 [1]   2->1 [2]
    round 5:  1->0 [2]
    """
    num_chunks = num_chunks or size
    for step in range(2 * (size - 1) + num_chunks - 1 if size > 1 else 0):
        down = step - 2 * (size - 1) + rank
        send = [Send(rank - 1, run) for run in nth(down, num_chunks) if rank > 0]
        recv = [Recv(rank + 1, run) for run in nth(down + 1, num_chunks) if rank < size - 1]
        yield (*climb(rank, size, step, num_chunks), *send, *recv)


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
        yield (*climb(rank, size, step, size), *deliver(rank, size, step, size, lambda index: index))


def reduce(rank: int, size: int, root: int = 0, num_chunks: int = 0) -> Iterator[Round]:
    """Reduce along the chain from rank 0 to the last rank, which sends the sums to the root.  Reduces in rank order.

    Cost: with p chunks, (2p-1) alpha + n(2p-1)/p beta + 2n(p-1)/p gamma; p+c-1 rounds with c; to the last rank, one
    round less.

    >>> from collectives.schedule.moves import render
    >>> print(render(reduce, 3))
    round 0:  0->1 [0]+
    round 1:  0->1 [1]+   1->2 [0]+
    round 2:  0->1 [2]+   1->2 [1]+   2->0 [0]
    round 3:  1->2 [2]+   2->0 [1]
    round 4:  2->0 [2]
    """
    num_chunks = num_chunks or size
    for step in range(size + num_chunks - 2 + (root < size - 1) if size > 1 else 0):
        yield (*climb(rank, size, step, num_chunks), *deliver(rank, size, step, num_chunks, lambda index: root))


def climb(rank: int, size: int, step: int, num_chunks: int) -> list[Move]:
    """Return a round on the way up: reduce the incoming chunk into the own one, and send the one reduced before."""
    reductions: list[Move] = [RecvReduce(rank - 1, run) for run in nth(step - rank + 1, num_chunks) if rank > 0]
    return [*reductions, *(Send(rank + 1, run) for run in nth(step - rank, num_chunks) if rank < size - 1)]


def deliver(rank: int, size: int, step: int, num_chunks: int, owner: Callable[[int], int]) -> list[Move]:
    """Send, from the last rank, the sum that it completed in the round before to its owner."""
    last = size - 1
    ready = [(owner(run.start), run) for run in nth(step - last, num_chunks) if owner(run.start) != last]
    if rank == last:
        return [Send(dest, run) for dest, run in ready]
    return [Recv(last, run) for dest, run in ready if dest == rank]


def nth(index: int, num_chunks: int) -> list[range]:
    """Return chunk `index`, if there is one."""
    return [range(index, index + 1)] if 0 <= index < num_chunks else []


ALGORITHMS = (
    Algorithm("all_reduce", "chain", all_reduce, in_order=True, unit=whole_vector),
    Algorithm("reduce_scatter", "chain", reduce_scatter, in_order=True),
    Algorithm("broadcast", "chain", broadcast, unit=whole_vector),
    Algorithm("reduce", "chain", reduce, in_order=True, unit=whole_vector),
)
