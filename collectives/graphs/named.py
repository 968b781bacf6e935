"""The named algorithms on a graph: their times, and the best of them."""

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

from collectives import algorithms
from collectives.algorithms import Access, Algorithm, variants
from collectives.algorithms.algorithm import Groups
from collectives.algorithms.groups import whole
from collectives.graphs import transit
from collectives.graphs.bound import components
from collectives.graphs.graph import LinkGraph


class NamedTime(NamedTuple):
    """An algorithm, and the seconds that it takes."""

    seconds: float
    name: str


def named_times(graph: LinkGraph, collective: str, nbytes: float, root: int = 0) -> list[NamedTime]:
    """Return the times of all algorithms that work by messages, the fastest first.

    Of those over groups of ranks, which need islands of faster links, it is the time with the best groups, and of
    those that cut the vector by its length, with the best number of chunks.

    >>> from collectives.graphs.shapes import at_switch
    >>> best, *_ = named_times(at_switch([12.5] * 4), "broadcast", 8)
    >>> best.name, f"{best.seconds * 1e6:.1f} us"
    ('binomial', '8.0 us')
    """
    routes = graph.routes()

    def price(groups: Groups, row: Algorithm) -> float:
        rounds = [row.rounds(rank, graph.size, root, groups) for rank in range(graph.size)]
        return transit.seconds(graph, rounds.__getitem__, nbytes / row.num_chunks(graph.size, groups), routes)

    times: dict[str, float] = {}
    for row in algorithms.rows(collective, graph.size):
        if row.access == Access.MESSAGES:
            for groups in groupings(graph) if row.over_nodes else [whole(None, graph.size)]:
                best, taken = variants.best(row, int(nbytes), groups, partial(price, groups))
                times[best.name] = min(taken, times.get(best.name, taken))
    return sorted(NamedTime(seconds, name) for name, seconds in times.items())


def groupings(graph: LinkGraph) -> Iterator[Groups]:
    """Yield partitions of the ranks into islands of faster links."""
    for limit in sorted({link.gb_per_s for link in graph.links}):
        islands = [tuple(sorted(rank for rank in part if rank < graph.size)) for part in components(graph, limit)]
        groups = tuple(sorted(island for island in islands if island))
        if 1 < len(groups) < graph.size:
            yield groups


def is_one_switch(graph: LinkGraph) -> bool:
    """Return whether a switch with one equal link to every rank is all there is.

    >>> from collectives.graphs.shapes import at_switch
    >>> is_one_switch(at_switch([12.5, 12.5, 12.5])), is_one_switch(at_switch([12.5, 12.5, 4.0]))
    (True, False)
    """
    speeds = {link[2:] for link in graph.links}
    return len(graph.switches) == 1 and len(speeds) == 1 and all(graph.size in link[:2] for link in graph.links)
