"""Graphs of links with which schedules are tested, and those of machines whose links are published."""

import random
from collections.abc import Sequence
from itertools import combinations, product

from collectives.graphs.graph import LinkGraph, connected
from collectives.graphs.shapes import with_links


def torus(width: int, height: int, gb_per_s: float = 12.5, us: float = 1.0) -> LinkGraph:
    """Return a grid of ranks whose rows and columns are rings."""
    pairs = []
    for x, y in product(range(width), range(height)):
        pairs += [(y * width + x, y * width + (x + 1) % width), (y * width + x, (y + 1) % height * width + x)]
    return with_links(width * height, pairs, gb_per_s, us)


def hypercube(dims: int, gb_per_s: float = 12.5, us: float = 1.0) -> LinkGraph:
    """Return 2^dims ranks, linked where their numbers differ in one bit."""
    size = 1 << dims
    return with_links(size, [(rank, rank ^ 1 << bit) for rank in range(size) for bit in range(dims)], gb_per_s, us)


def sparse(size: int, degree: int, seed: int = 0, gb_per_s: float = 12.5, us: float = 1.0) -> LinkGraph:
    """Return a ring with random links besides, `degree` at each rank where that is possible."""
    draw = random.Random(seed)
    pairs = {(rank, (rank + 1) % size) for rank in range(size)}
    links = [2] * size
    for a, b in draw.sample(list(combinations(range(size), 2)), size * (size - 1) // 2):
        if max(links[a], links[b]) < degree and not {(a, b), (b, a)} & pairs:
            pairs.add((a, b))
            links[a] += 1
            links[b] += 1
    return with_links(size, sorted(pairs), gb_per_s, us)


def islands(size: int, thin_gb_per_s: float, gb_per_s: float = 12.5, us: float = 1.0) -> LinkGraph:
    """Return two switches with `size` ranks each, joined by a thin link."""
    ranks = [f"r{rank}" for rank in range(2 * size)]
    links = [(rank, f"switch{number // size}", gb_per_s, us) for number, rank in enumerate(ranks)]
    return connected(ranks, ["switch0", "switch1"], [*links, ("switch0", "switch1", thin_gb_per_s, 2 * us)])


def fat_hosts(hosts: int, ranks: int, inside_gb_per_s: float, gb_per_s: float = 12.5, us: float = 1.0) -> LinkGraph:
    """Return hosts at a switch, with several ranks each on a bus of their own."""
    buses = [f"h{host}" for host in range(hosts)]
    inside = [(f"{bus}.{rank}", bus, inside_gb_per_s, us / 4) for bus in buses for rank in range(ranks)]
    links = [(bus, "switch", gb_per_s, us) for bus in buses]
    return connected([name for name, *_ in inside], [*buses, "switch"], [*inside, *links])


def dgx_a100(boxes: int = 1) -> LinkGraph:
    """Return boxes of 8 A100 at an NVSwitch, 300 GB/s each way; in several boxes, each has a port of 200 Gbit/s.

    Source: NVIDIA, "NVIDIA DGX A100 system architecture", 2020: 12 links of NVLink from each GPU to NVSwitch, 600 GB/s
    for both ways together; a ConnectX-6 of 200 Gbit/s for each GPU.
    """
    gpus = [f"b{box}.gpu{gpu}" for box in range(boxes) for gpu in range(8)]
    links = [(gpu, f"{gpu.split('.')[0]}.nvswitch", 300.0, 1.0) for gpu in gpus]
    switches = [f"b{box}.nvswitch" for box in range(boxes)]
    if boxes > 1:
        links += [(gpu, "infiniband", 25.0, 2.0) for gpu in gpus]
        switches.append("infiniband")
    return connected(gpus, switches, links)


# The links of Infinity Fabric between the 16 dies of 8 MI250, by how many there are in parallel.
MI250_LINKS: dict[int, Sequence[tuple[int, int]]] = {
    4: [(die, die + 1) for die in range(0, 16, 2)],
    2: [(0, 4), (3, 7), (8, 12), (11, 15)],
    1: [
        *((0, 2), (1, 2), (1, 3), (1, 5), (2, 6), (4, 12), (5, 13), (5, 14)),
        *((6, 13), (6, 14), (7, 15), (8, 10), (9, 10), (9, 11), (9, 13), (10, 14)),
    ],
}


def mi250() -> LinkGraph:
    """Return a host of 8 MI250: 16 dies, linked by one, two or four links of 50 GB/s each way.

    Source: ROCm, rccl, tools/topo_expl/models/topo_16p1h.xml; ROCm documentation, "AMD Instinct MI250
    microarchitecture": 25 GT/s and 50 GB/s for a link.
    """
    pairs = [(f"gcd{a}", f"gcd{b}", 50.0 * count, 1.0) for count, pairs in MI250_LINKS.items() for a, b in pairs]
    return connected([f"gcd{die}" for die in range(16)], [], pairs)
