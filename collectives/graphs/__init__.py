"""Schedules for any graph of links: the bound by cuts, trees packed for it, and their time beside named algorithms.

Pure: neither MPI nor an array library is needed, nor a solver.
"""

from collectives.graphs.bound import bound_s_per_byte
from collectives.graphs.graph import DirectedLink, LinkGraph, connected, directed
from collectives.graphs.links_file import parse_links, read_links, write_links
from collectives.graphs.named import is_one_switch, named_times
from collectives.graphs.packed import Packed, packed

__all__ = [
    "DirectedLink",
    "LinkGraph",
    "Packed",
    "bound_s_per_byte",
    "connected",
    "directed",
    "is_one_switch",
    "named_times",
    "packed",
    "parse_links",
    "read_links",
    "write_links",
]
