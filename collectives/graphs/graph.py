"""A network as a value: ranks, switches and directed links, each with a speed and a latency.

Vertices are numbers: rank r is vertex r, and the switches follow.  A message between two ranks takes one route, always
the same: through switches only where there is one, else through other ranks as well.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from heapq import heappop, heappush
from typing import NamedTuple

TYPICAL_BYTES = 1 << 20  # of a message, by which routes are compared
Path = tuple[int, ...]  # the links of a route, by their indices


class DirectedLink(NamedTuple):
    """A link between two vertices, in one direction."""

    source: int
    dest: int
    gb_per_s: float
    us: float

    def seconds(self, nbytes: float) -> float:
        """Return the time for which a message of `nbytes` occupies the link."""
        return nbytes / (self.gb_per_s * 1e9)


class LinkGraph(NamedTuple):
    """Named vertices, the first of which are the ranks, and links between them.

    >>> graph = connected(["a", "b"], ["s"], [("a", "s", 10.0, 1.0), ("b", "s", 10.0, 1.0)])
    >>> graph.size, graph.names, len(graph.links)
    (2, ('a', 'b', 's'), 4)
    """

    names: tuple[str, ...]
    size: int  # the number of ranks
    links: tuple[DirectedLink, ...]

    @property
    def switches(self) -> tuple[str, ...]:
        return self.names[self.size :]

    def transposed(self) -> "LinkGraph":
        """Return the graph with every link turned round; indices of links stay."""
        return self._replace(links=tuple(link._replace(source=link.dest, dest=link.source) for link in self.links))

    def leaving(self) -> list[list[int]]:
        """Return the links that leave each vertex."""
        links_of: list[list[int]] = [[] for _ in self.names]
        for index, link in enumerate(self.links):
            links_of[link.source].append(index)
        return links_of

    def routes(self) -> dict[tuple[int, int], Path]:
        """Return the route of each ordered pair of ranks."""
        leaving = self.leaving()
        routes: dict[tuple[int, int], Path] = {}
        for rank in range(self.size):
            far = self._paths_from(rank, leaving, lambda vertex: True)
            near = self._paths_from(rank, leaving, lambda vertex: vertex >= self.size)
            routes |= {(rank, to): path for to, path in (far | near).items() if to < self.size}
        return routes

    def hops(self) -> list[dict[int, Path]]:
        """Return, for each rank, the ranks that it reaches through switches only, with the routes."""
        leaving = self.leaving()
        through = [self._paths_from(rank, leaving, lambda vertex: vertex >= self.size) for rank in range(self.size)]
        return [{to: path for to, path in sorted(paths.items()) if to < self.size} for paths in through]

    def _paths_from(
        self, rank: int, leaving: Sequence[Sequence[int]], passes: Callable[[int], bool]
    ) -> dict[int, Path]:
        """Return the fastest path to each vertex, through vertices that pass messages on; spread where several are."""
        best: dict[int, Path] = {}
        ahead: list[tuple[float, int, int, Path]] = [(0.0, 0, rank, ())]
        while ahead:
            cost, _, vertex, path = heappop(ahead)
            if vertex in best or (not path and vertex != rank):
                continue
            best[vertex] = path
            if vertex != rank and not passes(vertex):
                continue
            for index in leaving[vertex]:
                link = self.links[index]
                if link.dest not in best:
                    total = cost + link.us * 1e-6 + link.seconds(TYPICAL_BYTES)
                    turn = (link.source * 7 + link.dest * 13 + rank * 31) % len(self.names)  # equal paths take turns
                    heappush(ahead, (round(total, 12), turn, link.dest, (*path, index)))
        del best[rank]
        return best


def connected(
    ranks: Sequence[str], switches: Sequence[str], both_ways: Iterable[tuple[str, str, float, float]]
) -> LinkGraph:
    """Return the graph of links that have the same speed and latency in both directions."""
    pairs = list(both_ways)
    return directed(ranks, switches, [*pairs, *((b, a, gb_per_s, us) for a, b, gb_per_s, us in pairs)])


def directed(
    ranks: Sequence[str], switches: Sequence[str], links: Iterable[tuple[str, str, float, float]]
) -> LinkGraph:
    """Return the graph of directed links between named vertices.

    Raises: ValueError for bad names, speeds and links, and for a graph that isn't connected, with the remedy.
    """
    names = (*ranks, *switches)
    if len(ranks) < 2:
        raise ValueError(f"a graph of {len(ranks)} ranks has nothing to send: name at least 2 ranks")
    if twice := sorted(name for name in set(names) if names.count(name) > 1):
        raise ValueError(f"vertex {twice[0]!r} is named twice: rename one of them")
    number = {name: vertex for vertex, name in enumerate(names)}
    checked: dict[tuple[int, int], DirectedLink] = {}
    for source, dest, gb_per_s, us in links:
        check_link(source, dest, gb_per_s, us, number)
        ends = number[source], number[dest]
        if ends in checked:
            raise ValueError(f"link {source!r} to {dest!r} is there twice: add up their gb_per_s in one")
        checked[ends] = DirectedLink(*ends, float(gb_per_s), float(us))
    graph = LinkGraph(names, len(ranks), tuple(checked.values()))
    check_connected(graph)
    return graph


def check_link(source: str, dest: str, gb_per_s: float, us: float, number: Mapping[str, int]) -> None:
    """Refuse one link that names no vertex, is a loop, or has no speed."""
    where = f"link {source!r} to {dest!r}"
    for name in (source, dest):
        if name not in number:
            raise ValueError(f"{where}: there is no vertex {name!r}: add it to ranks or switches")
    if source == dest:
        raise ValueError(f"{where} is a loop: link two vertices")
    if not 0 < gb_per_s < 1e9:
        raise ValueError(f"{where}: gb_per_s = {gb_per_s} must be above 0 and below 1e9: remove a link that is down")
    if not 0 <= us < 1e9:
        raise ValueError(f"{where}: us = {us} must be at least 0 and below 1e9")


def check_connected(graph: LinkGraph) -> None:
    """Refuse a graph in which some rank doesn't reach another."""
    for side, verb in ((graph, "can't be reached from"), (graph.transposed(), "doesn't reach")):
        leaving, reached, ahead = side.leaving(), {0}, [0]
        while ahead:
            news = {side.links[index].dest for index in leaving[ahead.pop()]} - reached
            reached |= news
            ahead += news
        for rank in range(graph.size):
            if rank not in reached:
                a, b = graph.names[rank], graph.names[0]
                raise ValueError(f"the graph isn't connected: rank {a!r} {verb} rank {b!r}: add a link")
