"""Prefix reductions: rank r gets the reduction over ranks 0 to r; in an exclusive scan, over ranks 0 to r-1.

An exclusive scan begins by handing every vector to the rank above, and is then a scan on ranks 1 to p-1.

Source: Hillis and Steele, "Data parallel algorithms", 1986; MPICH, src/mpi/coll/scan/scan_intra_recursive_doubling.c;
Open MPI, ompi/mca/coll/base/coll_base_scan.c, ompi_coll_base_scan_intra_linear.
"""

from collections.abc import Callable, Iterator
from functools import partial

from collectives.algorithms.algorithm import Algorithm, whole_vector
from collectives.algorithms.chain import climb
from collectives.algorithms.direct import phase, results, staging
from collectives.schedule.moves import Copy, GetReduce, Recv, RecvReduce, Round, Schedule, Send, among, even_runs


def linear(rank: int, size: int, num_chunks: int = 0) -> Iterator[Round]:
    """Reduce along the chain from rank 0, chunk by chunk; each rank keeps its sums.  Reduces in rank order.

    Cost: (p+c-2) (alpha + n/c (beta + gamma)), with c chunks, by default one for each rank.

    >>> from collectives.schedule.moves import render
    >>> print(render(linear, 3))
    round 0:  0->1 [0]+
    round 1:  0->1 [1]+   1->2 [0]+
    round 2:  0->1 [2]+   1->2 [1]+
    round 3:  1->2 [2]+
    """
    num_chunks = num_chunks or size
    for step in range(size + num_chunks - 2 if size > 1 else 0):
        yield tuple(climb(rank, size, step, num_chunks))


def doubling(rank: int, size: int) -> Iterator[Round]:
    """Send the sum of the 2^k ranks up to this one to the rank 2^k above, in round k.

    Cost: ceil(log2 p) (alpha + n beta + n gamma).

    >>> from collectives.schedule.moves import render
    >>> print(render(doubling, 4))
    round 0:  0->1 [0-3]+   1->2 [0-3]+   2->3 [0-3]+
    round 1:  0->2 [0-3]+   1->3 [0-3]+
    """
    everything = range(size)
    for bit in range((size - 1).bit_length()):
        above, below = rank + (1 << bit), rank - (1 << bit)
        sends = [Send(above, everything)] if above < size else []
        yield (*sends, *([RecvReduce(below, everything)] if below >= 0 else []))


def exclusive(rank: int, size: int, scan: Callable[[int, int], Schedule]) -> Iterator[Round]:
    """Hand the own vector to the rank above, by way of scratch chunks; then scan among ranks 1 to p-1.

    Cost: that of p-1 ranks' scan + alpha + n beta.

    >>> from collectives.schedule.moves import render
    >>> print(render(partial(exclusive, scan=doubling), 3))
    round 0:  0->1 [0-2]   1->2 [0-2]
    round 1:  1: [3-5]>[0-2]   2: [3-5]>[0-2]
    round 2:  1->2 [0-2]+
    """
    everything, scratch, above = range(size), range(size, 2 * size), range(1, size)
    if not above:
        return
    sends = (Send(rank + 1, everything),) if rank + 1 in above else ()
    yield (*sends, Recv(rank - 1, scratch)) if rank else sends
    yield (Copy(scratch, everything),) if rank else ()
    yield from among(rank, above, even_runs(size, size - 1), scan)


def staged(rank: int, size: int, apart: bool = False, inclusive: bool = True) -> Iterator[Round]:
    """Read and reduce the staging buffers of the ranks below.

    Cost: alpha + n beta + np gamma; exclusive, n(p-1) gamma.

    >>> from collectives.schedule.moves import render
    >>> print(render(staged, 3))
    round 0:  0: [0-2]>[3-5]   1: [0-2]>[3-5]   2: [0-2]>[3-5]
    round 1:  (0-2)
    round 2:  0=>0 [3-5]>[0-2]+   0-1=>1 [3-5]>[0-2]+   0-2=>2 [3-5]>[0-2]+
    """
    sources = tuple(range(rank + inclusive))
    moves = [GetReduce(sources, range(size), results(size, apart))] if sources else []
    return phase(size, apart, True, range(size), *moves)


ALGORITHMS = (
    Algorithm("scan", "linear", linear, in_order=True, unit=whole_vector),
    Algorithm("scan", "recursive_doubling", doubling),
    staging("scan", "staged", staged, apart=True, in_order=True),
    Algorithm("exscan", "linear", partial(exclusive, scan=linear), in_order=True),
    Algorithm("exscan", "recursive_doubling", partial(exclusive, scan=doubling)),
    staging("exscan", "staged", partial(staged, inclusive=False), apart=True, in_order=True),
)
