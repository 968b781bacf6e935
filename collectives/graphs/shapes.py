"""Graphs of usual shapes."""

from collections.abc import Iterable, Sequence
from itertools import combinations, pairwise

from collectives.graphs.graph import LinkGraph, connected

Pair = tuple[int, int]


def with_links(size: int, pairs: Iterable[Pair], gb_per_s: float = 12.5, us: float = 1.0) -> LinkGraph:
    """Return ranks with links between some pairs of them."""
    unique = dict.fromkeys((min(pair), max(pair)) for pair in pairs)
    return connected([f"r{rank}" for rank in range(size)], [], [(f"r{a}", f"r{b}", gb_per_s, us) for a, b in unique])


def line(size: int, gb_per_s: float = 12.5, us: float = 1.0) -> LinkGraph:
    """Return ranks in a row, each linked to the next."""
    return with_links(size, pairwise(range(size)), gb_per_s, us)


def ring(size: int, gb_per_s: float = 12.5, us: float = 1.0) -> LinkGraph:
    """Return ranks on a circle, each linked to the next."""
    return with_links(size, [(rank, (rank + 1) % size) for rank in range(size)], gb_per_s, us)


def full(size: int, gb_per_s: float = 12.5, us: float = 1.0) -> LinkGraph:
    """Return ranks that are all linked to each other."""
    return with_links(size, combinations(range(size), 2), gb_per_s, us)


def at_switch(speeds: Sequence[float], us: float = 2.0) -> LinkGraph:
    """Return ranks at one switch, each by a link of its own speed."""
    ranks = [f"r{rank}" for rank in range(len(speeds))]
    links = zip(ranks, speeds, strict=True)
    return connected(ranks, ["switch"], [(rank, "switch", gb_per_s, us) for rank, gb_per_s in links])
