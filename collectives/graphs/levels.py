"""The levels of a graph: its hosts are nodes, and hosts behind other switches are groups of a higher level."""

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import permutations

from collectives.graphs.graph import LinkGraph, Path
from collectives.schedule.network import NETWORK, Link, Network, Nodes, Tier


def graph_levels(graph: LinkGraph) -> tuple[Nodes, Network, tuple[str, ...]]:
    """Return the ranks of each host, the speeds by level, and the hosts' names.

    Ranks named fat.0 and fat.1, linked to a switch fat, are of host fat; any other rank is a host of its own.  The
    speeds of a level are those of its slowest route, and a port is as fast as the slowest host's.  Groups of hosts
    that no switch connects directly are a level if they have equally many consecutive hosts; otherwise the routes
    between them count as those between hosts.

    >>> from collectives.graphs.graph import connected
    >>> within = [(f"{host}.{rank}", host, 5.0, 1.0) for host in "ab" for rank in (0, 1)]
    >>> ports = [(host, "switch", 1.0, 5.0) for host in "ab"]
    >>> graph = connected(["a.0", "a.1", "b.0", "b.1"], ["a", "b", "switch"], [*within, *ports])
    >>> nodes, network, names = graph_levels(graph)
    >>> nodes, names, network.within.alpha_s, network.between.alpha_s
    (((0, 1), (2, 3)), ('a', 'b'), 2e-06, 1.2e-05)
    """
    routes = graph.routes()
    names = [host_of(graph, rank) for rank in range(graph.size)]
    hosts = tuple(dict.fromkeys(names))
    nodes = tuple(tuple(rank for rank, name in enumerate(names) if name == host) for host in hosts)
    network = NETWORK
    if inside := [routes[pair] for node in nodes for pair in permutations(node, 2)]:
        network = network._replace(within=slowest(graph, inside))
    if len(hosts) == 1:
        return nodes, network, hosts
    across = {(a, b): routes[nodes[a][0], nodes[b][0]] for a, b in permutations(range(len(hosts)), 2)}
    groups = neighbours(graph, hosts, across)
    length = len(groups[0])
    if groups != [list(range(first, first + length)) for first in range(0, len(hosts), length)] or length == 1:
        length = len(hosts)
    near = [path for (a, b), path in across.items() if a // length == b // length]
    far = [path for (a, b), path in across.items() if a // length != b // length]
    vertices = [{name for name in graph.names if is_in(name, host)} for host in hosts]
    network = network._replace(between=slowest(graph, near), nic=port(graph, vertices))
    if far:
        behind = [set().union(*vertices[first : first + length]) for first in range(0, len(hosts), length)]
        tier = Tier(length, slowest(graph, far), port(graph, with_switches(graph, behind)))
        network = network._replace(tiers=(tier,))
    return nodes, network, hosts


def host_of(graph: LinkGraph, rank: int) -> str:
    name = graph.names[rank]
    host, dot, _ = name.rpartition(".")
    return host if dot and host in graph.switches else name


def is_in(vertex: str, host: str) -> bool:
    """Return whether a vertex is a host or one of its ranks."""
    return vertex == host or vertex.rpartition(".")[0] == host


def slowest(graph: LinkGraph, paths: Sequence[Path]) -> Link:
    """Return the greatest latency of some routes, and the least speed."""
    links = [[graph.links[index] for index in path] for path in paths]
    alpha_us = max(sum(link.us for link in path) for path in links)
    return Link(round(alpha_us * 1e-6, 12), 1e-9 / min(link.gb_per_s for path in links for link in path))


def neighbours(graph: LinkGraph, hosts: Sequence[str], across: Mapping[tuple[int, int], Path]) -> list[list[int]]:
    """Return the groups of hosts whose routes to the group's first one pass one switch at most."""
    groups: list[list[int]] = []
    for host in range(len(hosts)):
        for group in groups:
            ends = hosts[host], hosts[group[0]]
            passed = [graph.names[graph.links[index].dest] for index in across[host, group[0]]]
            if sum(not any(is_in(vertex, end) for end in ends) for vertex in passed) <= 1:
                group.append(host)
                break
        else:
            groups.append([host])
    return groups


def port(graph: LinkGraph, groups: Sequence[set[str]]) -> Link:
    """Return the port of the slowest group of vertices: all links that leave it."""
    ends = [(graph.names[link.source], graph.names[link.dest], link.gb_per_s) for link in graph.links]
    slowest_gb_per_s = min(sum(rate for a, b, rate in ends if a in group and b not in group) for group in groups)
    return Link(0.0, 1e-9 / slowest_gb_per_s)


def with_switches(graph: LinkGraph, groups: Sequence[set[str]]) -> list[set[str]]:
    """Add to each group the switches that are linked to no other."""
    ends = [(graph.names[link.source], graph.names[link.dest]) for link in graph.links]
    beside = [{b for a, b in ends if a in group and b in graph.switches} for group in groups]
    times = Counter(switch for switches in beside for switch in switches)
    return [group | {one for one in own if times[one] == 1} for group, own in zip(groups, beside, strict=True)]
