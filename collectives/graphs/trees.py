"""Spanning trees, packed so that their load on each link is in proportion to its speed.

Every tree carries one chunk from its root to all ranks, over routes between ranks; reversed, it gathers a sum.  Trees
are grown one after the other over the links with least load, then single ranks change their parents in them, for as
long as that takes load from a fuller link to emptier ones.  The load that remains is compared with the bound by cuts.
"""

import random
from collections.abc import Iterator, Sequence
from heapq import heappop, heappush
from itertools import count

from collectives.graphs.graph import LinkGraph, Path

SHAKES, SHAKEN = (
    range(6, 61),
    30_000,
)  # how often, about so many parents altogether: rounds of moves that change nothing for the worse, to leave a dead end
NOBODY = -1
Change = tuple[int, int, int]  # in a tree, by its number, a parent and its new child
SLACK = 1e-9


class SpanningTree:
    """The parents of all ranks in a tree, the root's being nobody."""

    def __init__(self, root: int, size: int, upward: bool = False):
        self.root, self.parents, self.upward = root, [NOBODY] * size, upward  # upward: messages go to the parents

    def depth(self, rank: int) -> int:
        depth = 0
        while (rank := self.parents[rank]) != NOBODY:
            depth += 1
        return depth

    def is_above(self, rank: int, other: int) -> bool:
        """Return whether `rank` is `other`, or its ancestor."""
        while other not in (rank, NOBODY):
            other = self.parents[other]
        return other == rank

    def edges(self) -> Iterator[tuple[int, int]]:
        """Yield pairs of a parent and a child."""
        return ((parent, child) for child, parent in enumerate(self.parents) if parent != NOBODY)


class Forest:
    """Trees on a graph, and the messages that cross each link."""

    def __init__(self, graph: LinkGraph):
        self.graph, self.size = graph, graph.size
        self.hops, self.leaving = graph.hops(), graph.leaving()
        self.into: list[list[int]] = [[a for a in range(self.size) if b in self.hops[a]] for b in range(self.size)]
        self.out: list[list[int]] = [sorted(hops) for hops in self.hops]
        self.s_per_chunk = [1 / link.gb_per_s for link in graph.links]
        self.load = [0] * len(graph.links)
        self.trees: list[SpanningTree] = []
        self.users: list[set[tuple[int, int]]] = [set() for _ in graph.links]  # trees and children, by link
        self.rivals = self._rivals()
        self.draw = random.Random(0)  # the same on all ranks

    @property
    def seconds(self) -> float:
        """The time of the busiest link, in chunks of a GB."""
        return max(load * each for load, each in zip(self.load, self.s_per_chunk, strict=True))

    def path(self, tree: SpanningTree, parent: int, child: int) -> Path:
        return self.hops[child][parent] if tree.upward else self.hops[parent][child]

    def near(self, tree: SpanningTree, child: int) -> list[int]:
        """Return the ranks that can be a rank's parent."""
        return self.out[child] if tree.upward else self.into[child]

    def grow(self, root: int, upward: bool = False, thrifty: bool = False, floor: float = 0.0) -> None:
        """Add a tree over the emptiest links, of those the nearest to the root; a `thrifty` root rarely sends twice."""
        tree = SpanningTree(root, self.size, upward)
        number, turns = len(self.trees), count()
        self.trees.append(tree)
        ahead: list[tuple[float, int, int, int, int, int]] = []
        reached, vertex, depth = {root}, root, 0
        again = 2 * max(self.s_per_chunk) * thrifty

        def price(parent: int, child: int) -> float:
            repeats = parent == root and len(reached) > 1
            return max(floor, self.busiest(self.path(tree, parent, child), 1)) + again * repeats

        while len(reached) < self.size:
            for child in self.out[vertex] if not upward else self.into[vertex]:
                if child not in reached:
                    heappush(ahead, (price(vertex, child), depth, self.onward(child), next(turns), vertex, child))
            while True:
                before, depth, onward, turn, parent, child = heappop(ahead)
                if child in reached:
                    continue
                if (now := price(parent, child)) <= before + SLACK:
                    break
                heappush(ahead, (now, depth, onward, turn, parent, child))
            self.attach(number, parent, child)
            reached.add(child)
            vertex, depth = child, depth + 1

    def onward(self, rank: int) -> int:
        """Return the load of the links that leave a rank: an idle one can forward more."""
        return sum(self.load[index] for index in self.leaving[rank])

    def busiest(self, path: Sequence[int], more: int = 0) -> float:
        """Return the seconds of the busiest of some links, with so many more messages."""
        return max([(self.load[index] + more) * self.s_per_chunk[index] for index in path], default=0.0)

    def attach(self, number: int, parent: int, child: int) -> None:
        tree = self.trees[number]
        for step, links in ((-1, self._links(tree, child)), (1, self.path(tree, parent, child))):
            for index in links:
                self.load[index] += step
                (self.users[index].add if step > 0 else self.users[index].discard)((number, child))
        tree.parents[child] = parent

    def _links(self, tree: SpanningTree, child: int) -> Path:
        parent = tree.parents[child]
        return self.path(tree, parent, child) if parent != NOBODY else ()

    def improve(self, enough: float) -> None:
        """Move load off the busiest links until they take `enough` seconds, or nothing helps."""
        best, parents = self.seconds, [list(tree.parents) for tree in self.trees]
        shakes = min(max(SHAKEN // (len(self.trees) * self.size), SHAKES.start), SHAKES.stop)
        for shake in range(shakes + 1):
            self.settle(enough)
            if self.seconds < best - SLACK:
                best, parents = self.seconds, [list(tree.parents) for tree in self.trees]
            if best <= enough + SLACK or shake == shakes:
                break
            self.shake()
        for number, tree in enumerate(self.trees):
            for child, parent in enumerate(parents[number]):
                if parent != tree.parents[child]:
                    self.attach(number, parent, child)

    def settle(self, enough: float) -> None:
        """Let ranks change parents as long as that lowers a link's load and raises none as high."""
        stuck: set[int] = set()
        while True:
            moving = [index for index in range(len(self.load)) if index not in stuck and self.load[index]]
            index = max(moving, key=lambda index: self.load[index] * self.s_per_chunk[index], default=None)
            if index is None or self.seconds <= enough + SLACK:
                return
            changes = self.better(index)
            if not changes:
                stuck.add(index)
            for number, parent, child in changes:
                relieved = self._links(self.trees[number], child)
                self.attach(number, parent, child)
                stuck -= self.beside(relieved)

    def beside(self, links: Path) -> set[int]:
        """Return the links from whose users a lower load of `links` may now attract some."""
        return {other for index in links for other in self.rivals[index]}

    def _rivals(self) -> list[set[int]]:
        """Return, for each link, the links that load may move between it and."""
        rivals: list[set[int]] = [set() for _ in self.load]
        for rank in range(self.size):
            arriving = {index for a in self.into[rank] for index in self.hops[a][rank]}
            leaving = {index for path in self.hops[rank].values() for index in path}
            for links in (arriving, leaving):
                for index in links:
                    rivals[index] |= links
        return rivals

    def better(self, index: int) -> list[Change]:
        """Return changes of parents that take load off a link, and leave no link as busy as it was."""
        limit = self.load[index] * self.s_per_chunk[index] - SLACK
        best, choice = limit, []
        for number, child in sorted(self.users[index]):
            tree = self.trees[number]
            for parent in self.near(tree, child):
                path = self.path(tree, parent, child)
                if parent == tree.parents[child] or index in path:
                    continue
                after = self.after(tree, child, path)
                if after < best:
                    changes = [(number, parent, child)]
                    if tree.is_above(child, parent):
                        changes = self.freed(number, parent, child, best) + changes
                    if len(changes) > 1 or not tree.is_above(child, parent):
                        best, choice = after, changes
        return choice

    def freed(self, number: int, rank: int, above: int, limit: float) -> list[Change]:
        """Return a change that takes a rank out of the subtree of the one above it, so that it can be its parent."""
        tree = self.trees[number]
        for parent in self.near(tree, rank):
            path = self.path(tree, parent, rank)
            apart = not {*path} & {*self.path(tree, rank, above)}
            if apart and self.after(tree, rank, path) < limit and not tree.is_above(above, parent):
                return [(number, parent, rank)]
        return []

    def after(self, tree: SpanningTree, child: int, path: Path) -> float:
        """Return the seconds of the busiest link that a change of parent adds load to."""
        now = self._links(tree, child)
        return self.busiest([index for index in path if index not in now], 1)

    def shake(self) -> None:
        """Change parents at random wherever no link gets busier than the busiest."""
        limit = self.seconds - SLACK
        for number, tree in enumerate(self.trees):
            for child in self.draw.sample(range(self.size), max(1, self.size // 4)):
                if child == tree.root:
                    continue
                now = set(self._links(tree, child))
                parent = self.draw.choice(self.near(tree, child))
                path = [index for index in self.path(tree, parent, child) if index not in now]
                if self.busiest(path, 1) < limit and not tree.is_above(child, parent):
                    self.attach(number, parent, child)


def pack(
    graph: LinkGraph,
    roots: Sequence[int],
    enough: float,
    both_ways: bool = False,
    thrifty: bool = False,
    shallow: bool = False,
) -> Forest:
    """Return a forest with a tree from each of the roots; `both_ways`, and one up to it.

    >>> from collectives.graphs.shapes import ring
    >>> forest = pack(ring(4, gb_per_s=1.0), [0, 1, 2, 3] * 2, enough=3.0)
    >>> forest.load
    [3, 3, 3, 3, 3, 3, 3, 3]
    """
    forest = Forest(graph)
    for root in roots:
        forest.grow(root, thrifty=thrifty, floor=enough * shallow)
        if both_ways:
            forest.grow(root, upward=True, floor=enough * shallow)
    forest.improve(enough)
    return forest
