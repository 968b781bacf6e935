"""Two binary trees at once, each for half of the chunks: a rank that is inside one is a leaf of the other.

Chunks follow each other up the trees and down again, so that all levels are busy.

Source: Sanders, Speck, Träff, "Two-tree algorithms for full bandwidth broadcast, reduction and scan", 2009;
NCCL, src/graph/trees.cc, whose trees these are.
"""

from collections.abc import Iterator
from typing import NamedTuple

from collectives.algorithms.algorithm import Algorithm
from collectives.schedule.moves import Move, Recv, RecvReduce, Round, Send, backwards, shares


class Tree(NamedTuple):
    """A tree over places 0 to p-1, in order but for its root 0; place i is rank turn * i + shift, round the ring."""

    size: int
    turn: int
    shift: int
    chunks: range

    def rank(self, place: int) -> int:
        return (self.turn * place + self.shift) % self.size

    def place(self, rank: int) -> int:
        return self.turn * (rank - self.shift) % self.size

    def parent(self, place: int) -> int:
        level = place & -place
        above = place ^ level | level << 1
        return above if above < self.size else place ^ level

    def children(self, place: int) -> list[int]:
        nearby = [place + sign * (1 << bit) for bit in range(self.size.bit_length()) for sign in (-1, 1)]
        return [other for other in nearby if 0 < other < self.size and self.parent(other) == place]

    def start(self, place: int) -> int:
        """Return the round in which a place's first chunk goes up: after its children's, which come one by one."""
        return 2 * ((place & -place).bit_length() - 1) + (place > self.parent(place) > 0)

    def links(self, rank: int) -> Iterator["TreeEdge"]:
        """Yield what a rank does on the way up: first with each child, then with its parent."""
        place = self.place(rank)
        yield from (
            TreeEdge(RecvReduce, self.rank(child), self.start(child), self.chunks) for child in self.children(place)
        )
        if place > 0:
            yield TreeEdge(Send, self.rank(self.parent(place)), self.start(place), self.chunks)


class TreeEdge(NamedTuple):
    """One chunk after the other, from round `start` on, goes from a rank to its parent."""

    take: type[Send] | type[RecvReduce]
    peer: int
    start: int
    chunks: range

    def moves(self, step: int) -> Iterator[Move]:
        if 0 <= step - self.start < len(self.chunks):
            yield self.take(self.peer, self.chunks[step - self.start : step - self.start + 1])


def reduce_up(rank: int, size: int) -> Iterator[Round]:
    """The trees' roots end with the sum of their chunks."""
    first, second = shares(size, 2)
    turn, shift = (1, 1) if size % 2 else (-1, -1)
    trees = Tree(size, 1, 0, first), Tree(size, turn, shift, second)
    links = [link for tree in trees for link in tree.links(rank)]
    for step in range(2 * ((size - 1).bit_length() - 1) + len(first)):
        yield tuple(move for link in links for move in link.moves(step))


def all_reduce(rank: int, size: int) -> Iterator[Round]:
    """Reduce up both trees, then broadcast down them.

    Cost: r alpha + at most 2r n/p beta + r n/p gamma, in r = 2 (2 floor(log2(p-1)) + ceil(p/2)) rounds.

    >>> from collectives.schedule.moves import render
    >>> print(render(all_reduce, 4))
    round 0:  1->2 [0]+   2->1 [2]+
    round 1:  0->1 [2]+   1->2 [1]+   2->1 [3]+   3->2 [0]+
    round 2:  0->1 [3]+   1->3 [2]+   2->0 [0]+   3->2 [1]+
    round 3:  1->3 [3]+   2->0 [1]+
    round 4:  0->2 [1]   3->1 [3]
    round 5:  0->2 [0]   1->0 [3]   2->3 [1]   3->1 [2]
    round 6:  1->2 [3]   1->0 [2]   2->1 [1]   2->3 [0]
    round 7:  1->2 [2]   2->1 [0]
    """
    if size > 1:
        yield from reduce_up(rank, size)
        yield from backwards(reduce_up(rank, size), take=Recv)


ALGORITHMS = (Algorithm("all_reduce", "double_tree", all_reduce),)
