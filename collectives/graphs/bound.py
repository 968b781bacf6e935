"""The least time per byte that any schedule can take on a graph, by its cuts.

A set of vertices that lacks a rank must send out all that its own ranks have: its chunks, over the speed of the links
that leave it, bound an all-gather; the least speed of a cut from the root bounds a broadcast.  Both are reached by
trees, in whole or in fractions.

Source: Zhao, Wang, Wang, Fu, Basu, Khoury, Krishnamurthy, "ForestColl: throughput-optimal collective communications on
heterogeneous network fabrics", 2024, arXiv 2402.06787; Edmonds, "Edge-disjoint branchings", 1973; for all_reduce, the
counting of partitions: Nash-Williams, "Edge-disjoint spanning trees of finite graphs", 1961.
"""

from collections.abc import Callable, Iterable, Iterator

from collectives.graphs.flow import FlowNetwork
from collectives.graphs.graph import LinkGraph

CLOSE = 1e-7
COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "broadcast")


def bound_s_per_byte(graph: LinkGraph, collective: str, root: int = 0) -> float:
    """Return the least seconds per byte of the vector, latencies aside.

    >>> from collectives.graphs.shapes import ring
    >>> [round(bound_s_per_byte(ring(4, gb_per_s=1.0), name) * 1e9, 3) for name in COLLECTIVES]
    [0.375, 0.375, 0.75, 0.5]
    """
    bounds: dict[str, Callable[[], float]] = {
        "all_gather": lambda: gather_bound(graph),
        "reduce_scatter": lambda: gather_bound(graph.transposed()),
        "all_reduce": lambda: reduce_bound(graph),
        "broadcast": lambda: broadcast_bound(graph, root),
    }
    if collective not in bounds:
        raise ValueError(f"collective {collective!r} has no trees: use one of {', '.join(COLLECTIVES)}")
    return bounds[collective]() * 1e-9


def gather_bound(graph: LinkGraph) -> float:
    """Return the largest of ranks in S, of all, over GB/s leaving S, over all S that lack a rank.

    The bound grows from cut to cut until every rank's flow passes: the least cut of a flow that doesn't is the next.
    """
    size, source = graph.size, len(graph.names)
    s_per_chunk = 1 / min(speeds(graph, [rank]) for rank in range(size))
    for sink in range(size):
        while True:
            links = ((link.source, link.dest, link.gb_per_s * s_per_chunk) for link in graph.links)
            network = FlowNetwork(source + 1, [*links, *((source, rank, 1.0) for rank in range(size))])
            if network.flow(source, sink) > size * (1 - CLOSE):
                break
            side = network.side - {source}
            before, s_per_chunk = s_per_chunk, sum(vertex < size for vertex in side) / speeds(graph, side)
            if s_per_chunk <= before:  # the flow lacks no more than a rounding error
                s_per_chunk = before
                break
    return s_per_chunk / size


def broadcast_bound(graph: LinkGraph, root: int) -> float:
    """Return one over the least speed of a cut between the root and another rank."""
    network = FlowNetwork(len(graph.names), ((link.source, link.dest, link.gb_per_s) for link in graph.links))
    return 1 / min(network.flow(root, rank) for rank in range(graph.size) if rank != root)


def reduce_bound(graph: LinkGraph) -> float:
    """Return the largest of 2 (k-1) over the speed out of, or into, k disjoint sets of vertices that have ranks.

    A byte's sum takes k-1 messages between the sets, and as many to spread.  Only some partitions are tried, so that
    this is a bound, but perhaps not the best one: single ranks, islands of fast links, and both sides of least cuts.
    """
    return max(
        2 * (len(parts) - 1) / sum(speeds(side, part) for part in parts)
        for parts in partitions(graph)
        for side in (graph, graph.transposed())
    )


def partitions(graph: LinkGraph) -> Iterator[list[set[int]]]:
    """Yield families of disjoint sets of vertices that have ranks."""
    vertices, ranks = set(range(len(graph.names))), range(graph.size)
    yield [{rank} for rank in ranks]
    for limit in sorted({link.gb_per_s for link in graph.links}):
        islands = [part for part in components(graph, limit) if min(part) < graph.size]
        if len(islands) > 1:
            yield islands
    network = FlowNetwork(len(vertices), ((link.source, link.dest, link.gb_per_s) for link in graph.links))
    for rank in ranks[1:]:
        for ends in ((0, rank), (rank, 0)):
            network.flow(*ends)
            yield [network.side, vertices - network.side]


def components(graph: LinkGraph, limit: float) -> list[set[int]]:
    """Return the sets of vertices that links faster than `limit` connect."""
    parts = [{vertex} for vertex in range(len(graph.names))]
    for link in graph.links:
        if link.gb_per_s > limit:
            one, other = (next(part for part in parts if end in part) for end in (link.source, link.dest))
            if one is not other:
                parts.remove(other)
                one |= other
    return parts


def speeds(graph: LinkGraph, vertices: Iterable[int]) -> float:
    """Return the speed of all links that leave a set of vertices."""
    inside = set(vertices)
    return sum(link.gb_per_s for link in graph.links if link.source in inside and link.dest not in inside)
