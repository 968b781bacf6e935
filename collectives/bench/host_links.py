"""Measure the links between all hosts, and describe them as a graph: ranks, hosts with a port each, and switches."""

import time
from collections.abc import Iterator, Sequence
from itertools import combinations
from pathlib import Path

import numpy as np

from collectives.bench.constants import FAR_BYTES, Action, link_of_pairs
from collectives.communicator import Communicator
from collectives.graphs.graph import LinkGraph, connected
from collectives.graphs.links_file import links_text
from collectives.job.system import write
from collectives.runtime.choose.network_file import host_names
from collectives.schedule import draw

REPEATS = 3
AS_FAST = 0.8  # of the slower host's port: two hosts that exchange at that rate are behind one switch
Pairs = Sequence[tuple[int, int]]  # of hosts
Matrix = np.ndarray  # of hosts x hosts


def main(comm: Communicator, path: Path) -> None:
    """Measure, print and write a file of links.  Collective."""
    hosts = host_names(comm.host_names(), comm.topology.nodes)
    with comm.agreed():
        if len(hosts) == 1:
            raise ValueError(f"--links {path}: the job's one host has no links: start ranks on several hosts")
        if comm.rank == 0:
            draw.refuse(str(path), "--links ")
    graph, slow = measure(comm, hosts)
    with comm.agreed():
        if comm.rank == 0:
            write(path, "".join(f"# {line}\n" for line in slow) + links_text(graph))
            print(*table(graph, hosts), *slow, sep="\n")
            print(f"wrote {path}, which algorithm='auto' follows under COLLECTIVES_TUNING={path}")


def measure(comm: Communicator, hosts: Sequence[str]) -> tuple[LinkGraph, list[str]]:
    """Return a graph of the job's ranks, and a line for each two hosts that are slower than it says.  Collective.

    A host's port is as fast as its fastest exchange.  Hosts that exchange at the rates of their ports are behind one
    switch; two switches are linked at the rate of all exchanges between their hosts at once.
    """
    nodes = comm.topology.nodes
    inside = [(node, node) for node, ranks in enumerate(nodes) if len(ranks) > 1]
    rounds = [inside] * bool(inside) + list(round_robin(len(nodes)))
    us, rates = exchanges(comm, rounds)
    others = ~np.eye(len(nodes), dtype=bool)
    # A host may have paused: rounds of what seems slow are measured again, and the faster time counts.
    is_slow = others & (rates < AS_FAST * port_rates(rates * others)[1])
    again_us, again = exchanges(comm, [pairs for pairs in rounds if any(is_slow[pair] for pair in pairs)])
    us, rates = np.where(again > rates, again_us, us), np.maximum(rates, again)
    (ports, expected), half_us = port_rates(rates * others), np.where(others, us, np.inf).min(0) / 2
    groups = islands(others & (rates >= AS_FAST * expected))
    names = [f"switch{number}" for number in range(1, len(groups) + 1)]
    ranks = {f"{host}.{nth}": node for node, host in enumerate(hosts) for nth in range(len(nodes[node]))}
    links = [
        (rank, hosts[node], *speed(rates[node, node] or ports[node], us[node, node] / 2))
        for rank, node in ranks.items()
    ]
    for group, name in zip(groups, names, strict=True):
        links += [(hosts[host], name, *speed(ports[host], half_us[host])) for host in group]
    for a, b in combinations(range(len(groups)), 2):
        pairs = list(zip(groups[a], groups[b], strict=False))
        at_once = exchanges(comm, [pairs])[1]
        far_us = min(us[pair] - half_us[pair[0]] - half_us[pair[1]] for pair in pairs)
        links.append((names[a], names[b], *speed(sum(at_once[pair] for pair in pairs), max(far_us, 0.0))))
    slow = [
        f"{hosts[a]} and {hosts[b]}: {rates[a, b]:.3g} GB/s, {rates[a, b] / expected[a, b]:.0%} of their ports', which "
        "no switch explains"
        for group in groups
        for a, b in combinations(group, 2)
        if rates[a, b] < AS_FAST * expected[a, b]
    ]
    return connected([*ranks], [*hosts, *names], links), slow


def port_rates(rates: Matrix) -> tuple[np.ndarray, Matrix]:
    """Return the rates of hosts' ports, their fastest exchange, and those that two hosts have by their ports."""
    ports = rates.max(0)
    return ports, np.minimum.outer(ports, ports)


def exchanges(comm: Communicator, rounds: Sequence[Pairs]) -> tuple[Matrix, Matrix]:
    """Measure pairs of hosts, those of a round at once: us of a short message, and GB/s each way.  Collective.

    All ranks of both hosts that have a partner take part; a host with itself has its first two ranks.  Others have 0.
    """

    def own_s(action: Action) -> float:
        """Return the least seconds of this rank."""
        times = []
        for _ in range(REPEATS):
            comm.barrier()
            begin_s = time.perf_counter()
            action()
            times.append(time.perf_counter() - begin_s)
        return min(times)

    nodes = comm.topology.nodes
    latency_s, byte_s = np.zeros((2, len(nodes), len(nodes)))
    for pairs in rounds:
        ranks = {pair: [nodes[pair[0]][:2]] if pair[0] == pair[1] else partners(nodes, pair) for pair in pairs}
        alpha_s, beta_s = link_of_pairs(comm, own_s, [two for each in ranks.values() for two in each], FAR_BYTES)
        for (a, b), own in ranks.items():
            if any(comm.rank in two for two in own):
                latency_s[[a, b], [b, a]], byte_s[[a, b], [b, a]] = alpha_s, beta_s / len(own)
    latency_s, byte_s = comm.all_reduce(np.stack((latency_s, byte_s)), op="max")
    return latency_s * 1e6, np.divide(1e-9, byte_s, out=np.zeros_like(byte_s), where=byte_s > 0)


def partners(nodes: Sequence[Sequence[int]], pair: tuple[int, int]) -> list[tuple[int, int]]:
    return list(zip(nodes[pair[0]], nodes[pair[1]], strict=False))


def round_robin(count: int) -> Iterator[Pairs]:
    """Yield rounds of pairs, in which each of `count` hosts is once at most, until all pairs have been.

    >>> [*round_robin(4)]
    [[(0, 3), (1, 2)], [(1, 3), (0, 2)], [(2, 3), (0, 1)]]
    >>> sorted(pair for pairs in round_robin(3) for pair in pairs)
    [(0, 1), (0, 2), (1, 2)]
    """
    last = count + count % 2 - 1  # turns against each in turn, or sits out
    for turn in range(last):
        pairs = [(turn, last)] if last < count else []
        for step in range(1, (last + 1) // 2):
            a, b = (turn - step) % last, (turn + step) % last
            pairs.append((min(a, b), max(a, b)))
        yield pairs


def islands(adjacent: Matrix) -> list[list[int]]:
    """Return the connected components of an undirected graph, in the order of their first vertices.

    >>> islands(np.array([[0, 0, 1], [0, 0, 0], [1, 0, 0]]))
    [[0, 2], [1]]
    """
    groups: list[list[int]] = []
    for vertex in range(len(adjacent)):
        joined = [group for group in groups if adjacent[vertex, group].any()]
        merged = sorted([vertex, *(each for group in joined for each in group)])
        groups = sorted([*(group for group in groups if group not in joined), merged])
    return groups


def speed(gb_per_s: float, us: float) -> tuple[float, float]:
    """Round to what a measurement is good for."""
    return float(f"{gb_per_s:.3g}"), float(f"{us:.3g}")


def table(graph: LinkGraph, hosts: Sequence[str]) -> Iterator[str]:
    """Yield a line for each link of a host, or between switches."""
    yield f"{'link':<40} {'GB/s':>9} {'us':>9}"
    for link in graph.links:
        source, dest = graph.names[link.source], graph.names[link.dest]
        if dest in graph.switches and dest not in hosts and (source in hosts or source < dest):
            yield f"{f'{source} - {dest}':<40} {link.gb_per_s:>9.4g} {link.us:>9.3g}"
