"""Speeds of usual fabrics, each with its source; what a source does not say of a fabric is another one's.

They are of the hardware and of libraries in C: what Python adds to a message, `python -m collectives.bench` shows.
"""

from typing import NamedTuple

from collectives.cost import NETWORK, Link, Network


class Fabric(NamedTuple):
    """A network, and how many ranks its nodes usually have."""

    network: Network
    ranks_per_node: int
    words: str


# NVIDIA/nccl, src/graph/tuning.cc, hwLat, Ring, Simple: 3.4 us a hop over NVLink, 9.6 us over the network.
NVLINK_HOP_S, NETWORK_HOP_S = 3.4e-6, 9.6e-6
# NVIDIA/nccl, src/graph/topo.h: what comes of a link of NVLink, SM90_NVLINK_BW 20.6 and SM80_NVLINK_BW 20.0 GB/s.
H100_LINK, A100_LINK = 20.6e9, 20.0e9

FABRICS = {
    "ndr": Fabric(
        Network(
            # NVIDIA, DGX H100 User Guide: 18 links of NVLink from each of 8 GPUs to NVSwitch.
            within=Link(NVLINK_HOP_S, 1 / (18 * H100_LINK)),
            # The same: each GPU has a ConnectX-7 of its own, 400 Gbit/s.
            between=Link(NETWORK_HOP_S, 8 / 400e9),
            # Eight of those in a node.
            nic=Link(0.0, 1 / 400e9),
            # NVIDIA, H100 datasheet: 3.35 TB/s of memory, of which a sum takes three bytes a byte, and a copy two.
            gamma_s_per_byte=3 / 3.35e12,
            copy_s_per_byte=2 / 3.35e12,
            # As a hop over NVLink.
            meet_s=NVLINK_HOP_S,
        ),
        ranks_per_node=8,
        words="InfiniBand NDR, a port for each of a node's 8 H100 on NVLink",
    ),
    "100gbe": Fabric(
        NETWORK._replace(
            # gist.github.com/jfgrimm/3af692a5475bdd4ed836b5a18197a209: MPICH over TCP, osu_latency, 25 us of 8 bytes.
            # NVIDIA/nccl, src/graph/topo.h: NET_BW 12.0 GB/s of 100 Gbit/s.
            between=Link(25e-6, 1 / 12e9),
            # From one message to the next a core's work for it: no source; a tenth of the latency.
            nic=Link(2.5e-6, 1 / 12e9),
            # In the node: benchmarks/results of this project, as by default.
        ),
        ranks_per_node=16,
        words="100 Gbit/s Ethernet by TCP, one port for a node's 16 processes",
    ),
    "slingshot": Fabric(
        Network(
            # docs.nersc.gov/systems/perlmutter/architecture: 4 A100 in a node; each two share 4 of their 12 links.
            within=Link(NVLINK_HOP_S, 1 / (4 * A100_LINK)),
            # De Sensi et al., "An In-Depth Analysis of the Slingshot Interconnect", SC20, arXiv 2008.08886: ports of
            # 200 Gbit/s.  The hop as NCCL's.
            between=Link(NETWORK_HOP_S, 8 / 200e9),
            # docs.nersc.gov, as above: 4 ports of Slingshot-11 in a node.
            nic=Link(0.0, 1 / 100e9),
            # NVIDIA, A100 datasheet: 1.555 TB/s of memory (40 GB), used as above.
            gamma_s_per_byte=3 / 1.555e12,
            copy_s_per_byte=2 / 1.555e12,
            # As a hop over NVLink.
            meet_s=NVLINK_HOP_S,
        ),
        ranks_per_node=4,
        words="Slingshot-11, a port for each of a node's 4 A100 on NVLink",
    ),
}
