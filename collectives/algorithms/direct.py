"""Direct algorithms: the ranks of a node read each other's memory, without messages.

Each is one or two phases between barriers.  *In place* the ranks read the callers' arrays themselves, with a barrier
before, so that all arrays are ready, and one after, so that all have been read.  *Staged*, each rank first copies the
data for the others to a staging buffer of its own; there are two, used in turn, so that one barrier per run is enough.

`apart`: the result is chunks p to 2p-1 of the working vector, otherwise chunks 0 to p-1, over the input.  In the cost
lines, gamma is per byte read and reduced, beta per byte copied, and alpha per barrier.

Source: vLLM, csrc/custom_all_reduce.cuh, cross_device_reduce_1stage and _2stage: the same among the GPUs of a node.
"""

from collections.abc import Iterator
from functools import partial

from collectives.algorithms.algorithm import Access, Algorithm
from collectives.schedule.moves import Barrier, Copy, Get, GetReduce, Move, Put, Round, chunk


def two_shot(rank: int, size: int, apart: bool = False) -> Iterator[Round]:
    """Reduce chunk r of all ranks on rank r, then read all the results: an all-reduce for large vectors.

    Cost: 3 alpha + n(p-1)/p beta + n gamma.

    >>> from collectives.schedule.moves import render
    >>> print(render(two_shot, 3))
    round 0:  (0-2)
    round 1:  0-2=>0 [0]+   0-2=>1 [1]+   0-2=>2 [2]+
    round 2:  (0-2)
    round 3:  1=>0 [1]   2=>0 [2]   2=>1 [2]   0=>1 [0]   0=>2 [0]   1=>2 [1]
    round 4:  (0-2)
    """
    yield arrival(size)
    yield (GetReduce(everyone(size), chunk(rank, size), into(rank, size, apart)),)
    yield arrival(size)
    yield tuple(Get(s, into(s, size, apart), into(s, size, apart)) for s in others(rank, size))
    yield arrival(size)


def two_shot_put(rank: int, size: int, apart: bool = False) -> Iterator[Round]:
    """Reduce chunk r of all ranks on rank r, and write the result to all the others: an all-reduce.

    Cost: 2 alpha + n(p-1)/p beta + n gamma.

    >>> from collectives.schedule.moves import render
    >>> print(render(two_shot_put, 2))
    round 0:  (0-1)
    round 1:  0-1=>0 [0]+   0-1=>1 [1]+
    round 2:  0~>1 [0]   1~>0 [1]
    round 3:  (0-1)
    """
    own = into(rank, size, apart)
    yield arrival(size)
    yield (GetReduce(everyone(size), chunk(rank, size), own),)
    yield tuple(Put(d, own, own) for d in others(rank, size))
    yield arrival(size)


def staged_two_shot(rank: int, size: int, apart: bool = False) -> Iterator[Round]:
    """All-reduce in two shots by way of two staging buffers, one for the inputs and one for the results.

    Cost: 2 alpha + 2n beta + n gamma.

    >>> from collectives.schedule.moves import render
    >>> print(render(staged_two_shot, 2))
    round 0:  0: [0-1]>[2-3]   1: [0-1]>[2-3]
    round 1:  (0-1)
    round 2:  0-1=>0 [2]>[4]+   0-1=>1 [3]>[5]+
    round 3:  (0-1)
    round 4:  1=>0 [5]>[1]   0=>0 [4]>[0]   0=>1 [4]>[0]   1=>1 [5]>[1]
    """
    first = scratch(size, apart)
    second = shift(first, size)
    yield (Copy(range(size), first),)
    yield arrival(size)
    yield (GetReduce(everyone(size), one(first, rank), one(second, rank)),)
    yield arrival(size)
    yield tuple(Get(s, one(second, s), into(s, size, apart)) for s in (*others(rank, size), rank))


def one_shot(rank: int, size: int, apart: bool = False) -> Iterator[Round]:
    """Read and reduce the staged vectors of all ranks on each rank: an all-reduce for small vectors.

    Cost: alpha + n beta + np gamma.

    >>> from collectives.schedule.moves import render
    >>> print(render(one_shot, 2))
    round 0:  0: [0-1]>[2-3]   1: [0-1]>[2-3]
    round 1:  (0-1)
    round 2:  0-1=>0 [2-3]>[0-1]+   0-1=>1 [2-3]>[0-1]+
    """
    return phase(size, apart, True, range(size), GetReduce(everyone(size), range(size), results(size, apart)))


def reduce_scatter(rank: int, size: int, apart: bool = False, staged: bool = False) -> Iterator[Round]:
    """Rank r reduces chunk r of all.

    Cost: 2 alpha + n gamma; staged, alpha + n beta + n gamma.

    >>> from collectives.schedule.moves import render
    >>> print(render(reduce_scatter, 2))
    round 0:  (0-1)
    round 1:  0-1=>0 [0]+   0-1=>1 [1]+
    round 2:  (0-1)
    """
    move = GetReduce(everyone(size), chunk(rank, size), into(rank, size, apart))
    return phase(size, apart, staged, range(size), move)


def all_gather(rank: int, size: int, apart: bool = False, staged: bool = False) -> Iterator[Round]:
    """Rank r starts owning chunk r; every rank reads all the others'.

    Cost: 2 alpha + n(p-1)/p beta; `apart`, n beta.  Staged, alpha + n beta; `apart`, n(p+1)/p beta.

    >>> from collectives.schedule.moves import render
    >>> print(render(all_gather, 3))
    round 0:  (0-2)
    round 1:  1=>0 [1]   2=>0 [2]   2=>1 [2]   0=>1 [0]   0=>2 [0]   1=>2 [1]
    round 2:  (0-2)
    >>> print(render(partial(all_gather, staged=True), 2))
    round 0:  0: [0]>[2]   1: [1]>[3]
    round 1:  (0-1)
    round 2:  1=>0 [3]>[1]   0=>1 [2]>[0]
    """
    return phase(size, apart, staged, chunk(rank, size), *gather_moves(rank, size, apart))


def gather_moves(rank: int, size: int, apart: bool) -> list[Move]:
    own = [Copy(chunk(rank, size), into(rank, size, apart))] if apart else []
    return [*own, *(Get(s, chunk(s, size), into(s, size, apart)) for s in others(rank, size))]


def all_to_all(rank: int, size: int, staged: bool = False) -> Iterator[Round]:
    """Chunk d of rank s becomes chunk p+s of rank d, which reads it.

    Cost: 2 alpha + n beta; staged, alpha + 2n beta.

    >>> from collectives.schedule.moves import render
    >>> print(render(all_to_all, 2))
    round 0:  (0-1)
    round 1:  0: [0]>[2]   1=>0 [0]>[3]   1: [1]>[3]   0=>1 [1]>[2]
    round 2:  (0-1)
    """
    own = Copy(chunk(rank, size), into(rank, size, apart=True))
    gets = (Get(s, chunk(rank, size), into(s, size, apart=True)) for s in others(rank, size))
    return phase(size, True, staged, range(size), own, *gets)


def broadcast(rank: int, size: int, root: int = 0) -> Iterator[Round]:
    """Read the root's vector, except for one chunk that the root writes, so that all ranks move equally much.

    Cost: 2 alpha + n(p-1)/p beta.

    >>> from collectives.schedule.moves import render
    >>> print(render(broadcast, 3))
    round 0:  (0-2)
    round 1:  0~>1 [1]   0~>2 [2]   0=>1 [0]   0=>1 [2]   0=>2 [0-1]
    round 2:  (0-2)
    """
    if rank == root:
        return in_place(size, *(Put(d, chunk(d, size), chunk(d, size)) for d in others(rank, size)))
    rest = [run for run in (range(rank), range(rank + 1, size)) if run]
    return in_place(size, *(Get(root, run, run) for run in rest))


def staged_broadcast(rank: int, size: int, root: int = 0) -> Iterator[Round]:
    """Read the root's vector from a staging buffer.

    Cost: alpha + 2n beta.

    >>> from collectives.schedule.moves import render
    >>> print(render(staged_broadcast, 3))
    round 0:  0: [0-2]>[3-5]
    round 1:  (0-2)
    round 2:  0=>1 [3-5]>[0-2]   0=>2 [3-5]>[0-2]
    """
    everything, nothing = range(size), range(0)
    if rank == root:
        return phase(size, False, True, everything)
    return phase(size, False, True, nothing, Get(root, everything, everything))


def reduce(rank: int, size: int, root: int = 0, apart: bool = False) -> Iterator[Round]:
    """Rank r reduces chunk r of all to a staging buffer, where the root reads the results.

    Cost: 2 alpha + n beta + n gamma.

    >>> from collectives.schedule.moves import render
    >>> print(render(reduce, 2, root=1))
    round 0:  (0-1)
    round 1:  0-1=>0 [0]>[2]+   0-1=>1 [1]>[3]+
    round 2:  (0-1)
    round 3:  0=>1 [2]>[0]   1=>1 [3]>[1]
    """
    staging = scratch(size, apart)
    yield arrival(size)
    yield (GetReduce(everyone(size), chunk(rank, size), one(staging, rank)),)
    yield arrival(size)
    sources = everyone(size) if rank == root else ()
    yield tuple(Get(s, one(staging, s), into(s, size, apart)) for s in sources)


def gather(rank: int, size: int, root: int = 0, apart: bool = False) -> Iterator[Round]:
    """Rank r starts owning chunk r; the root reads all of them.

    Cost: 2 alpha + n(p-1)/p beta; `apart`, n beta.

    >>> from collectives.schedule.moves import render
    >>> print(render(gather, 3))
    round 0:  (0-2)
    round 1:  1=>0 [1]   2=>0 [2]
    round 2:  (0-2)
    """
    return in_place(size, *(gather_moves(rank, size, apart) if rank == root else ()))


def scatter(rank: int, size: int, root: int = 0, apart: bool = False) -> Iterator[Round]:
    """Read chunk r of the root's vector on rank r.

    Cost: 2 alpha + n/p beta.

    >>> from collectives.schedule.moves import render
    >>> print(render(scatter, 3))
    round 0:  (0-2)
    round 1:  0=>1 [1]   0=>2 [2]
    round 2:  (0-2)
    """
    own = chunk(rank, size)
    move = Copy(own, into(rank, size, apart)) if rank == root else Get(root, own, into(rank, size, apart))
    return in_place(size, *([] if rank == root and not apart else [move]))


def barrier(rank: int, size: int) -> Iterator[Round]:
    """Wait for all the other ranks.

    Cost: alpha.

    >>> from collectives.schedule.moves import render
    >>> print(render(barrier, 3))
    round 0:  (0-2)
    """
    yield arrival(size)


def phase(size: int, apart: bool, staged: bool, source: range, *moves: Move) -> Iterator[Round]:
    """Return a phase on the callers' own arrays, or on staging buffers: the others read run `source`."""
    if not staged:
        yield from in_place(size, *moves)
        return
    first = scratch(size, apart).start
    yield (Copy(source, shift(source, first)),) if source else ()
    yield arrival(size)
    yield tuple(m._replace(theirs=shift(m.theirs, first)) if isinstance(m, Get | GetReduce) else m for m in moves)


def in_place(size: int, *moves: Move) -> Iterator[Round]:
    yield arrival(size)
    yield moves
    yield arrival(size)


def everyone(size: int) -> tuple[int, ...]:
    return tuple(range(size))


def others(rank: int, size: int) -> list[int]:
    """Return the other ranks, on each rank starting at another one, so that they do not all read from one at once."""
    return [(rank + i) % size for i in range(1, size)]


def arrival(size: int) -> Round:
    return (Barrier(everyone(size)),)


def into(index: int, size: int, apart: bool) -> range:
    """Return the chunk of the result."""
    return one(results(size, apart), index)


def results(size: int, apart: bool) -> range:
    return range(size, 2 * size) if apart else range(size)


def scratch(size: int, apart: bool) -> range:
    """Return the scratch chunks behind the collective's own."""
    return shift(range(size), 2 * size if apart else size)


def shift(run: range, by: int) -> range:
    return range(run.start + by, run.stop + by)


def one(run: range, index: int) -> range:
    return run[index : index + 1]


reading = partial(Algorithm, access=Access.DIRECT)
staging = partial(Algorithm, access=Access.STAGED, segmented=True)
ALGORITHMS = (
    staging("all_reduce", "one_shot", one_shot, apart=True, in_order=True),
    reading("all_reduce", "two_shot", two_shot, apart=True, segmented=True, in_order=True),
    reading("all_reduce", "two_shot_put", two_shot_put, apart=True, segmented=True, in_order=True),
    staging("all_reduce", "staged_two_shot", staged_two_shot, apart=True, in_order=True),
    reading("reduce_scatter", "direct", reduce_scatter, apart=True, in_order=True),
    staging("reduce_scatter", "staged", partial(reduce_scatter, staged=True), apart=True, in_order=True),
    reading("all_gather", "direct", all_gather, apart=True),
    staging("all_gather", "staged", partial(all_gather, staged=True), apart=True),
    reading("all_to_all", "direct", all_to_all),
    staging("all_to_all", "staged", partial(all_to_all, staged=True)),
    reading("broadcast", "direct", broadcast),
    staging("broadcast", "staged", staged_broadcast),
    reading("reduce", "direct", reduce, apart=True, segmented=True, in_order=True),
    reading("gather", "direct", gather, apart=True),
    reading("scatter", "direct", scatter, apart=True),
    staging("barrier", "direct", barrier),
)
