"""Networks to simulate: usual fabrics, each with its sources, nodes x ranks, and measured speeds of these hosts.

Values without a source for a fabric are taken from another one.  They describe hardware and libraries in C:
`python -m collectives.bench` shows the overhead of Python.
"""

import argparse
import re
from typing import Any, NamedTuple

from collectives.job.settings import Range
from collectives.runtime.choose import links
from collectives.schedule.cost import NETWORK, Link, Network, Nodes
from collectives.schedule.moves import laid

RANKS = Range(1, 2**17, unit="ranks")  # more would take longer than minutes
TIME, SPEED = Range(0, 10**9, unit="us"), Range(0, 10**9, open="above", unit="GB/s")


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

FABRICS = {
    # NVIDIA, DGX H100 User Guide: 18 links of NVLink from each of 8 GPUs to NVSwitch; each GPU has a ConnectX-7 of its
    # own, 400 Gbit/s, eight in a node.  NVIDIA, H100 datasheet: 3.35 TB/s of memory, of which a sum takes three bytes a
    # byte, and a copy two.
    "ndr": Fabric(
        "InfiniBand NDR, a port for each of a node's 8 H100 on NVLink",
        8,
        Network(
            within=Link(NVLINK_HOP_S, 1 / (18 * H100_LINK)),
            between=Link(NETWORK_HOP_S, 8 / 400e9),
            nic=Link(0.0, 1 / 400e9),
            gamma_s_per_byte=3 / 3.35e12,
            copy_s_per_byte=2 / 3.35e12,
            meet_s=NVLINK_HOP_S,
        ),
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
            gamma_s_per_byte=3 / 1.555e12,
            copy_s_per_byte=2 / 1.555e12,
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
    if not (match := re.fullmatch(r"([1-9]\d{0,19})x([1-9]\d{0,19})", text, re.ASCII)):
        raise ValueError(f"--topology {text!r}: write nodes x ranks, as 512x8, or {', '.join([*FABRICS, 'measured'])}")
    num_nodes, length = int(match[1]), int(match[2])
    refuse_too_many(num_nodes * length, f"--topology {text}")
    if ranks not in (None, num_nodes * length):
        raise ValueError(f"--topology {text} has {num_nodes * length} ranks, but --ranks is {ranks}: omit --ranks")
    return in_nodes(num_nodes * length, length), NETWORK, "default speeds, except those set by flags"


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
