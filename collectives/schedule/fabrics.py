"""Networks to simulate: usual fabrics, each with its sources, nodes x ranks, files, and measured speeds of these hosts.

Values without a source for a fabric are taken from another one.  They describe hardware and libraries in C:
`python -m collectives.bench` shows the overhead of Python.
"""

import argparse
import math
import re
from itertools import accumulate
from operator import mul
from typing import Any, NamedTuple

from collectives.runtime.choose import links, network_file
from collectives.runtime.choose.network_file import RANKS, SPEED, TIME
from collectives.schedule.moves import laid
from collectives.schedule.network import NETWORK, Link, Network, Nodes, Tier

SHAPE = re.compile(r"[1-9]\d{0,19}(x[1-9]\d{0,19}){1,7}", re.ASCII)


class Fabric(NamedTuple):
    """A network, and how many ranks its nodes usually have."""

    words: str
    ranks_per_node: int
    network: Network


# NVIDIA/nccl, src/graph/tuning.cc, hwLat, Ring, Simple: 3.4 us a hop over NVLink, 9.6 us over the network.  A barrier
# in a node counts as a hop over NVLink.
NVLINK_HOP_S, NETWORK_HOP_S = 3.4e-6, 9.6e-6
# NVIDIA/nccl, src/graph/topo.h: bandwidth of a link of NVLink, SM90_NVLINK_BW 20.6 and SM80_NVLINK_BW 20.0 GB/s.
H100_LINK, A100_LINK = 20.6e9, 20.0e9

# NVIDIA, DGX H100 User Guide: 18 links of NVLink from each of 8 GPUs to NVSwitch; each GPU has a ConnectX-7 of its
# own, 400 Gbit/s, eight in a node.  NVIDIA, H100 datasheet: 3.35 TB/s of memory, of which a copy takes two bytes a
# byte; what is in another GPU's memory comes over NVLink, too.  A kernel reduces what it receives as it arrives.
H100 = Network(
    within=Link(NVLINK_HOP_S, 1 / (18 * H100_LINK)),
    between=Link(NETWORK_HOP_S, 8 / 400e9),
    nic=Link(0.0, 1 / 400e9),
    gamma_s_per_byte=0.0,
    copy_s_per_byte=2 / 3.35e12,
    pull_s_per_byte=1 / (18 * H100_LINK),
    meet_s=NVLINK_HOP_S,
)

FABRICS = {
    "ndr": Fabric("InfiniBand NDR, a port for each of a node's 8 H100 on NVLink", 8, H100),
    # Grattafiori et al., "The Llama 3 Herd of Models", arXiv 2407.21783, 3.3.1; glennklockwood.com/garden/systems/
    # meta's-h100-clusters: 400 Gbit/s for each GPU; pods of 384 nodes without oversubscription, 7 : 1 between them.
    # Latency of Ethernet, and between pods: no source; as above.
    "pods": Fabric(
        "400 Gbit/s RoCE, a port for each of a node's 8 H100, pods of 384 nodes, 7:1 oversubscribed between them",
        8,
        H100._replace(tiers=(Tier(384, Link(NETWORK_HOP_S, 8 / 400e9), Link(0.0, 7 * 8 / (384 * 8 * 400e9))),)),
    ),
    # gist.github.com/jfgrimm/3af692a5475bdd4ed836b5a18197a209: MPICH over TCP, osu_latency, 25 us of 8 bytes.
    # NVIDIA/nccl, src/graph/topo.h: NET_BW 12.0 GB/s of 100 Gbit/s.  From one message to the next a core's work for it:
    # no source; a tenth of the latency.  In the node as by default: benchmarks/results of this project.
    "100gbe": Fabric(
        "100 Gbit/s Ethernet by TCP, one port for a node's 16 processes",
        16,
        NETWORK._replace(between=Link(25e-6, 1 / 12e9), nic=Link(2.5e-6, 1 / 12e9)),
    ),
    # docs.nersc.gov/systems/perlmutter/architecture: 4 A100 in a node, of which each two share 4 of their 12 links, and
    # 4 ports of Slingshot-11.  De Sensi et al., "An In-Depth Analysis of the Slingshot Interconnect", SC20, arXiv
    # 2008.08886: ports of 200 Gbit/s.  NVIDIA, A100 datasheet: 1.555 TB/s of memory (40 GB), used as above.
    "slingshot": Fabric(
        "Slingshot-11, a port for each of a node's 4 A100 on NVLink",
        4,
        Network(
            within=Link(NVLINK_HOP_S, 1 / (4 * A100_LINK)),
            between=Link(NETWORK_HOP_S, 8 / 200e9),
            nic=Link(0.0, 1 / 100e9),
            gamma_s_per_byte=0.0,
            copy_s_per_byte=2 / 1.555e12,
            pull_s_per_byte=1 / (4 * A100_LINK),
            meet_s=NVLINK_HOP_S,
        ),
    ),
}


def topology(text: str, ranks: int | None) -> tuple[Nodes, Network, str]:
    """Parse --topology into the nodes' ranks, the speeds, and a description of both.

    Raises: ValueError for invalid values, with the remedy.
    """
    if text in FABRICS:
        fabric = FABRICS[text]
        return in_nodes(ranks or fabric.ranks_per_node, fabric.ranks_per_node), fabric.network, fabric.words
    if text == "measured":
        return measured_topology(ranks)
    if text.endswith(".toml"):
        nodes, network, _ = network_file.read(text)
        return in_nodes(ranks, len(nodes[0])) if ranks else nodes, network, text
    if not SHAPE.fullmatch(text):
        names = ", ".join([*FABRICS, "measured"])
        raise ValueError(f"--topology {text!r}: write nodes x ranks, as 512x8 or 4x128x8, a FILE.toml, or {names}")
    *outer, num_nodes, length = map(int, text.split("x"))
    size = math.prod(outer) * num_nodes * length
    refuse_too_many(size, f"--topology {text}")
    if ranks not in (None, size):
        raise ValueError(f"--topology {text} has {size} ranks, but --ranks is {ranks}: omit --ranks")
    groups = list(accumulate([num_nodes, *reversed(outer[1:])], mul)) if outer else []
    network = NETWORK._replace(tiers=tuple(Tier(nodes, NETWORK.between) for nodes in groups))
    return in_nodes(size, length), network, "default speeds, except those set by flags"


def refuse_too_many(ranks: int, what: str) -> None:
    """Raise ValueError for more ranks than can be simulated."""
    if ranks not in RANKS:
        raise ValueError(f"{what} means {ranks} ranks: use {RANKS.most} at most")


def measured_topology(ranks: int | None) -> tuple[Nodes, Network, str]:
    """Read the latest measured speeds, for the same nodes, or for `ranks` in nodes of that length."""
    latest = links.load_latest()
    if latest is None:
        raise ValueError(
            "--topology measured: no measurements are saved: run python -m collectives.bench on the hosts first"
        )
    lengths = [length for _, length in latest.key.hosts]
    words = f"measured on {', '.join(dict.fromkeys(name for name, _ in latest.key.hosts))}, {latest.key.mpi}"
    if ranks is None:
        return tuple(map(tuple, laid(0, lengths))), latest.network, words
    return in_nodes(ranks, max(lengths)), latest.network, words


def in_nodes(ranks: int, length: int) -> Nodes:
    """Split consecutive ranks into nodes of one length, but for the last.

    >>> in_nodes(5, 2)
    ((0, 1), (2, 3), (4,))
    """
    return tuple(tuple(range(first, min(first + length, ranks))) for first in range(0, ranks, length))


def add_network_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that `with_flags` reads."""
    add = parser.add_argument
    for name, words in (("within", "in a node"), ("between", "between nodes"), ("nic", "of a node, for all its ranks")):
        add(f"--{name}", nargs=2, type=float, metavar=("US", "GB/s"), help=f"a message {words}")


def add_tier_flag(parser: argparse.ArgumentParser) -> None:
    """Add the flag that `with_tiers` reads."""
    text = "a message between groups of nodes, once for each level, the inner first, and the rate of a group's port"
    add = parser.add_argument
    add("--tier", nargs="+", type=float, action="append", metavar=("US GB/s", "GB/s"), help=f"{text} if it is limited")


def with_tiers(network: Network, flags: argparse.Namespace) -> Network:
    """Replace the speeds of the levels beyond the node by those of --tier, which nodes x ranks must have for each."""
    values, num_tiers = flags.tier or [], len(network.tiers)
    if len(values) != num_tiers and (values or SHAPE.fullmatch(flags.topology)):
        there = f"{num_tiers} level{'s' * (num_tiers != 1)} beyond the node's"
        raise ValueError(
            f"--topology {flags.topology} has {there}, but --tier is there {len(values)} times: write it for each"
        )
    tiers = [tier_of(numbers, tier.nodes) for numbers, tier in zip(values, network.tiers, strict=False)]
    return network._replace(tiers=tuple(tiers) or network.tiers)


def tier_of(numbers: list[float], nodes: int) -> Tier:
    """Return a tier with the speeds of a flag, as `2 25` or `2 25 400`."""
    text = f"--tier {' '.join(f'{number:g}' for number in numbers)}"
    if len(numbers) not in (2, 3):
        raise ValueError(f"{text}: write US GB/s of a message, and the GB/s of a group's port if it is limited")
    for value, values in zip(numbers, (TIME, SPEED, SPEED), strict=False):
        if value not in values:
            raise ValueError(f"{text}: {value:g} must be {values}")
    us, rate, *port = numbers
    return Tier(nodes, Link(us * 1e-6, 1e-9 / rate), Link(0.0, 1e-9 / port[0]) if port else None)


def with_flags(network: Network, flags: argparse.Namespace) -> Network:
    """Replace the speeds that flags name."""
    changes: dict[str, Any] = {}
    for name in ("within", "between", "nic"):
        if pair := getattr(flags, name):
            for value, values in zip(pair, (TIME, SPEED), strict=True):
                if value not in values:
                    raise ValueError(f"--{name} {pair[0]:g} {pair[1]:g}: {value:g} must be {values}")
            changes[name] = Link(pair[0] * 1e-6, 1e-9 / pair[1])
    if flags.between and not flags.nic:
        changes["nic"] = changes["between"]._replace(alpha_s=0.0)
    return network._replace(**changes)
