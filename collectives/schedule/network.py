"""Networks as values: the speeds of a message by the groups that it leaves, of a rank's memory, and of barriers."""

from itertools import accumulate
from typing import NamedTuple

Nodes = tuple[tuple[int, ...], ...]  # the ranks of each


class Link(NamedTuple):
    """A message of n bytes takes `alpha_s` + n `beta_s_per_byte`."""

    alpha_s: float
    beta_s_per_byte: float

    def seconds(self, nbytes: float) -> float:
        return self.alpha_s + nbytes * self.beta_s_per_byte


class Tier(NamedTuple):
    """A level of groups beyond the node, as of a switch or a pod: so many consecutive nodes, the last ones maybe fewer.

    A message between two such groups takes `link`, unless it leaves a group of a higher tier, too.
    """

    nodes: int  # a multiple of those of the tier before
    link: Link
    port: Link | None = None  # time that a message occupies its group's port, each way; None: as wide as all its nodes'


class Network(NamedTuple):
    """A machine's speeds, which `python -m collectives.bench` measures (bench/constants.py).

    Messages that use a link at once take as long as all their bytes.  Each rank has a port to other nodes, as fast as
    one message, and all ports of a node use its link `nic`: what leaves a node takes as long as the slower of both.

    The defaults are of two cores of a server (benchmarks/results) and of 10 Gbit/s Ethernet.
    """

    within: Link = Link(3e-6, 3e-10)  # between two ranks of a node
    between: Link = Link(3e-5, 8e-10)  # between two nodes, one rank of each communicating: a rank's port
    gamma_s_per_byte: float = 5e-11  # to reduce a byte received by a message or a get, all cores busy
    copy_s_per_byte: float = 8e-11  # to copy a byte, all cores busy
    meet_s: float = 5e-7  # a barrier of a node's ranks, no more than cores
    system: Link = Link(1e-6, 8e-11)  # extra cost of access through the system: per barrier, and per byte
    staged_s_per_byte: float = 8e-11  # the same of a byte that another core has just written to a staging buffer
    pull_s_per_byte: float = 0.0  # the same of a byte in another rank's memory, as one of these
    cores: float = 1 << 20  # of the smallest node; more busy ranks than these slow each other down
    nic: Link | None = None  # time that a message occupies its node's link, each way; None: one pair fills it
    segment_bytes: int = 1 << 20  # of data that are reduced as they arrive from another node
    tiers: tuple[Tier, ...] = ()  # beyond the node, the smallest groups first

    @property
    def gate(self) -> Link:
        """The link that a message occupies on its node's way out and in."""
        return self.nic or Link(0.0, self.between.beta_s_per_byte)

    @property
    def links(self) -> tuple[Link, ...]:
        """The link of a message by the number of tiers whose groups it leaves."""
        return (self.between, *(tier.link for tier in self.tiers))

    @property
    def gates(self) -> tuple[Link | None, ...]:
        """What a message occupies on the way out of its node and of each tier's group, and into another."""
        return (self.gate, *(tier.port for tier in self.tiers))

    @property
    def routes(self) -> tuple[Link, ...]:
        """The link of a lone message by the number of tiers whose groups it leaves, at the rate of its slowest gate."""
        slowest = accumulate((gate.beta_s_per_byte if gate else 0.0 for gate in self.gates), max)
        rates = (max(link.beta_s_per_byte, rate) for link, rate in zip(self.links, slowest, strict=True))
        return tuple(link._replace(beta_s_per_byte=rate) for link, rate in zip(self.links, rates, strict=True))

    def reduction_s(self, nbytes: float) -> float:
        """Return the time from the end of a message between nodes to that of its reduction, which overlaps with it."""
        late = max(0.0, nbytes - self.segment_bytes)
        slower = max(0.0, self.gamma_s_per_byte - self.between.beta_s_per_byte)
        return (nbytes - late) * self.gamma_s_per_byte + late * slower


NETWORK = Network()


def on_device(network: Network, has_barriers: bool = False) -> Network:
    """Return the speeds with arrays in device memory: not measured, orders of magnitude only.

    A message goes through host memory at both ends: 10 us for a copy that the host waits for, and 50 GB/s, a PCIe link
    of the fifth generation.  Another rank's memory is read at 400 GB/s, NVLink's of the fourth.  Barriers take a host's
    flags and two events on streams, or, where devices wait for each other, flags in each other's memory.
    """

    def staged(link: Link) -> Link:
        return Link(link.alpha_s + 2e-5, link.beta_s_per_byte + 4e-11)

    return network._replace(
        within=staged(network.within),
        between=staged(network.between),
        tiers=tuple(tier._replace(link=staged(tier.link)) for tier in network.tiers),
        gamma_s_per_byte=2.5e-12,
        copy_s_per_byte=2.5e-12,
        meet_s=3e-6 if has_barriers else 2e-5,
        system=Link(0.0, 0.0),
        staged_s_per_byte=0.0,
    )


def contended(network: Network, groups: int, leaving: tuple[int, ...] = ()) -> Network:
    """Return the effective network of one of several groups that communicate at once on the same nodes.

    What a group sends through a gate takes so many times as long there, since the gate has the messages of the other
    groups, too; and each waits until those before it have started.  Of each tier, so many groups are `leaving` the same
    port.
    """
    numbers = (groups, *(leaving or (1,) * len(network.tiers)))
    if max(numbers) <= 1:
        return network
    links, gates, wait_s = [], [], 0.0
    for link, gate, number in zip(network.links, network.gates, numbers, strict=True):
        if gate:
            wait_s = max(wait_s, (number - 1) * gate.alpha_s)
        links.append(Link(link.alpha_s + wait_s, link.beta_s_per_byte))
        gates.append(Link(*(number * cost for cost in gate)) if gate else None)
    outer = zip(network.tiers, links[1:], gates[1:], strict=True)
    tiers = tuple(Tier(tier.nodes, link, port) for tier, link, port in outer)
    return network._replace(between=links[0], nic=gates[0], tiers=tiers, cores=network.cores / groups)


def with_rate(network: Network, factor: float) -> Network:
    """Return the network with so many times the rate of a node's link, and of all messages through it."""
    gate, between, *outer = (Link(alpha, beta / factor) for alpha, beta in (network.gate, *network.links))
    tiers = tuple(tier._replace(link=link) for tier, link in zip(network.tiers, outer, strict=True))
    return network._replace(between=between, nic=gate, tiers=tiers)


def check_tiers(tiers: tuple[Tier, ...]) -> None:
    """Raise ValueError for groups that are not made of whole groups of the tier before."""
    before = 1
    for tier in tiers:
        if tier.nodes < 1 or tier.nodes % before:
            raise ValueError(f"groups of {tier.nodes} nodes must be of a multiple of {before} nodes, as those within")
        before = tier.nodes
