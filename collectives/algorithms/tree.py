"""Trees: the binomial one, where the number of ranks that have the vector doubles every round, and two binary ones.

Source: Thakur, Rabenseifner, Gropp, "Optimization of collective communication operations in MPICH", 2005;
MPICH, src/mpi/coll/bcast/bcast_intra_binomial.c, bcast_intra_scatter_ring_allgather.c,
src/mpi/coll/scatter/scatter_intra_binomial.c, src/mpi/coll/gather/gather_intra_binomial.c;
Sanders, Speck, Träff, "Two-tree algorithms for full bandwidth broadcast, reduction and scan", 2009;
NCCL, src/graph/trees.cc, whose double tree this is.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

from collectives.algorithms import ring
from collectives.algorithms.algorithm import Algorithm, whole_vector
from collectives.schedule.moves import Move, Recv, RecvReduce, Round, Schedule, Send, arc, backwards, even_runs


def broadcast(rank: int, size: int, root: int = 0) -> Iterator[Round]:
    """Broadcast the vector down a binomial tree.  For small vectors.

    Cost: ceil(log2 p) (alpha + n beta).

    >>> from collectives.schedule.moves import render
    >>> print(render(broadcast, 5, root=1))
    round 0:  1->0 [0-4]
    round 1:  1->3 [0-4]
    round 2:  1->2 [0-4]   3->4 [0-4]
    """
    return down(rank, size, root, lambda first, length: [range(size)])


def down(rank: int, size: int, root: int, runs: Callable[[int, int], list[range]]) -> Iterator[Round]:
    """Go down a binomial tree: a subtree of `length` ranks, from rank `first` on, receives `runs(first, length)`."""
    relative_rank = (rank - root) % size
    for bit in reversed(range((size - 1).bit_length())):
        reach = 1 << bit
        if relative_rank % (2 * reach) == reach:
            yield tuple(Recv((rank - reach) % size, run) for run in runs(rank, min(reach, size - relative_rank)))
        elif relative_rank % (2 * reach) == 0 and relative_rank + reach < size:
            theirs = runs(rank + reach, min(reach, size - relative_rank - reach))
            yield tuple(Send((rank + reach) % size, run) for run in theirs)
        else:
            yield ()


def reduce(rank: int, size: int, root: int = 0) -> Schedule:
    """Reduce to the root: the broadcast, backwards.

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
    """Scatter down a binomial tree: each message carries the chunks of a whole subtree.

    Cost: ceil(log2 p) alpha + n(p-1)/p beta.

    >>> from collectives.schedule.moves import render
    >>> print(render(scatter, 5, root=2))
    round 0:  2->1 [1]
    round 1:  2->4 [4]   2->4 [0]
    round 2:  2->3 [3]   4->0 [0]
    """
    return down(rank, size, root, lambda first, length: arc(first, length, size))


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
    """Broadcast as a scatter, then a ring's all-gather in which the root receives nothing.  For large vectors.

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


class Tree(NamedTuple):
    """A tree over positions 0 to p-1, in-order except for its root 0; position i is rank (turn * i + shift) mod p."""

    size: int
    turn: int
    shift: int
    chunks: range

    def rank(self, position: int) -> int:
        return (self.turn * position + self.shift) % self.size

    def position(self, rank: int) -> int:
        return self.turn * (rank - self.shift) % self.size

    def parent(self, position: int) -> int:
        level = position & -position
        above = position ^ level | level << 1
        return above if above < self.size else position ^ level

    def children(self, position: int) -> list[int]:
        nearby = [position + sign * (1 << bit) for bit in range(self.size.bit_length()) for sign in (-1, 1)]
        return [other for other in nearby if 0 < other < self.size and self.parent(other) == position]

    def start(self, position: int) -> int:
        """Return the round in which a position's first chunk goes up: after its children's, which come together."""
        return (position & -position).bit_length() - 1

    def ups(self, rank: int) -> Iterator[tuple[int, Move]]:
        """Yield a rank's moves on the way up with their rounds: first from its children, then to its parent."""
        position = self.position(rank)
        for child in self.children(position):
            for step, index in enumerate(self.chunks, self.start(child)):
                yield step, RecvReduce(self.rank(child), range(index, index + 1))
        for step, index in enumerate(self.chunks if position else (), self.start(position)):
            yield step, Send(self.rank(self.parent(position)), range(index, index + 1))


def reduce_up(rank: int, size: int, num_chunks: int) -> Iterator[Round]:
    """Reduce the chunks of each tree to its root."""
    first, second = even_runs(num_chunks, 2)
    turn = 1 if size % 2 else -1
    trees = Tree(size, 1, -1, first), Tree(size, turn, 0, second)  # positions 1 to 2^k are 2^k adjacent ranks
    rounds: list[list[Move]] = [[] for _ in range((size - 1).bit_length() - 1 + len(first))]
    for step, move in (up for tree in trees for up in tree.ups(rank)):
        rounds[step].append(move)
    yield from map(tuple, rounds)


def double_all_reduce(rank: int, size: int, num_chunks: int = 0) -> Iterator[Round]:
    """Reduce up two binary trees, each for half of the chunks, then broadcast down them.

    A rank that is inside one tree is a leaf of the other; chunks follow each other, so that all levels are busy.  There
    are c chunks, by default one for each rank: few for short vectors, many for long ones.

    Cost: r alpha + at most 2r n/c beta + r n/c gamma, in r = 2 (floor(log2(p-1)) + ceil(c/2)) rounds.

    >>> from collectives.schedule.moves import render
    >>> print(render(double_all_reduce, 4))
    round 0:  0->1 [0]+   1->2 [2]+   2->1 [0]+   3->2 [2]+
    round 1:  0->1 [1]+   1->3 [0]+   1->2 [3]+   2->1 [1]+   2->0 [2]+   3->2 [3]+
    round 2:  1->3 [1]+   2->0 [3]+
    round 3:  0->2 [3]   3->1 [1]
    round 4:  0->2 [2]   1->0 [1]   1->2 [1]   2->3 [3]   2->1 [3]   3->1 [0]
    round 5:  1->0 [0]   1->2 [0]   2->3 [2]   2->1 [2]
    >>> print(render(double_all_reduce, 4, num_chunks=1))
    round 0:  0->1 [0]+   2->1 [0]+
    round 1:  1->3 [0]+
    round 2:  3->1 [0]
    round 3:  1->0 [0]   1->2 [0]
    """
    if size > 1:
        up = list(reduce_up(rank, size, num_chunks or size))
        yield from up
        yield from backwards(up, take=Recv)


ALGORITHMS = (
    Algorithm("all_reduce", "binomial", all_reduce),
    Algorithm("all_reduce", "double_tree", double_all_reduce, unit=whole_vector),
    Algorithm("broadcast", "binomial", broadcast),
    Algorithm("broadcast", "scatter_all_gather", scatter_all_gather),
    Algorithm("reduce", "binomial", reduce),
    Algorithm("gather", "binomial", gather),
    Algorithm("scatter", "binomial", scatter),
)
