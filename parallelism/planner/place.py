"""The machine, and rank placement: map a layout's axes to nodes, and predict the times of their collectives.

Ranks are ordered as in `parallelism.mesh`, tp innermost.  All groups of an axis communicate at once: groups on the same
node share its cores and its links to other nodes, and those that leave the same pod of nodes its ports.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import groupby
from typing import NamedTuple

import numpy as np

from collectives.algorithms import find
from collectives.schedule.cost import predict
from collectives.schedule.network import Link, Network, Nodes, Tier, contended, with_rate
from parallelism.mesh import Pattern, Within, axes_of, groups_of_ranks, mesh_shape, replica_axes
from parallelism.pipeline.balance import relative_speeds
from parallelism.planner.layout import ParallelLayout
from parallelism.planner.roofline import Roofline

# In a node; and by messages: those that are the fastest somewhere, or nearly.  Others take long to price.
IN_NODE = {
    "all_reduce": ("two_shot",),
    "reduce_scatter": ("direct",),
    "all_gather": ("direct",),
    "all_to_all": ("direct",),
}
BY_MESSAGES = {
    "all_reduce": ("rabenseifner", "ring", "recursive_doubling"),
    "reduce_scatter": ("recursive_halving", "ring"),
    "all_gather": ("recursive_doubling", "ring"),
    "all_to_all": ("pairwise", "bruck"),
}

SPARE = 0.1  # fraction of memory reserved for libraries and fragmentation, which are not counted


class Host(NamedTuple):
    """A node beside others: its ranks' speed and memory, and the rate of its link, as fractions of the machine's."""

    speed: float = 1.0
    memory: float = 1.0
    rate: float = 1.0


class Machine(NamedTuple):
    """Nodes and links; `flops_per_s` is a rank's speed in matrix products, `memory_bytes` its capacity.

    A pass of a block takes at least `least_pass_s`, however small the block is.  Unless it `overlaps`, no communication
    proceeds while a rank computes, as where its processor moves messages, too, and launches add to the computation.
    Without `hosts`, one for each node, all nodes are alike.  Of a device with a `roofline`, each kernel's time follows
    from its shape.  `update_s` is the time of the optimizer and the gradients' norm for an element, and `sync_s` that
    for which busy ranks wait for each other in a collective, as where they share cores.
    """

    nodes: Nodes
    network: Network
    flops_per_s: float
    memory_bytes: float
    least_pass_s: float = 0.0
    hosts: tuple[Host, ...] = ()
    overlaps: bool = True
    roofline: Roofline | None = None
    update_s: float = 0.0
    sync_s: float = 0.0

    @property
    def world_size(self) -> int:
        return sum(map(len, self.nodes))

    @property
    def sum_of_speeds(self) -> float:
        """The speed of all ranks together, in FLOP/s."""
        hosts = self.hosts or [Host()] * len(self.nodes)
        return self.flops_per_s * sum(host.speed * len(node) for host, node in zip(hosts, self.nodes, strict=True))


@dataclass(eq=False)
class AxisGroup:
    """Ranks of an axis, numbered in order, on their nodes, and the number of groups on the same nodes."""

    nodes: Nodes
    network: Network  # whose tiers count this group's nodes
    groups: int = 1
    leaving: tuple[int, ...] = ()  # of each tier, the number of groups that leave the same pod
    sync_s: float = 0.0  # added to each collective
    cached_s: dict[tuple[str, int], float] = field(default_factory=dict)  # cached results

    @cached_property
    def size(self) -> int:
        return sum(map(len, self.nodes))

    @cached_property
    def is_even(self) -> bool:
        return all(len(node) == len(self.nodes[0]) for node in self.nodes)

    @cached_property
    def levels(self) -> tuple[AxisGroup, AxisGroup]:
        """The ranks of one node, and those of one local rank across nodes, which must have equally many ranks."""
        length = len(self.nodes[0])
        across = tuple((rank,) for rank in range(len(self.nodes)))
        leaving = tuple(groups * length for groups in self.leaving)
        return (
            AxisGroup((tuple(range(length)),), self.network._replace(tiers=()), self.groups),
            AxisGroup(across, self.network, self.groups * length, leaving),
        )

    @cached_property
    def pods(self) -> tuple[AxisGroup, AxisGroup] | None:
        """The nodes of a pod of the first tier with several, or of an equal part of one; and one node of each part."""
        tiers, number = self.network.tiers, len(self.nodes)
        inner = sum(tier.nodes == 1 for tier in tiers)
        length = math.gcd(tiers[inner].nodes, number) if inner < len(tiers) else 1
        if length == 1:
            return None
        outer = tuple(tier._replace(nodes=max(1, tier.nodes // length)) for tier in tiers)
        leaving = (*self.leaving[:inner], *(groups * length for groups in self.leaving[inner:]))
        inside, outside = (self.network._replace(tiers=each) for each in (tiers[:inner], outer))
        return (
            AxisGroup(self.nodes[:length], inside, self.groups, self.leaving[:inner]),
            AxisGroup(self.nodes[: number // length], outside, self.groups, leaving),
        )

    def seconds(self, collective: str, nbytes: float) -> float:
        """Return the fastest algorithm's seconds for a vector of `nbytes`; for all_gather, of the gathered vector.

        On several nodes with equally many ranks, collectives but all_to_all run hierarchically: within nodes, and
        across.
        """
        if self.size == 1 or nbytes <= 0:
            return 0.0
        key = collective, round(nbytes)
        if key not in self.cached_s:
            self.cached_s[key] = self.by_levels(*key) + self.sync_s
        return self.cached_s[key]

    def by_levels(self, collective: str, nbytes: int) -> float:
        if len(self.nodes) == 1 or not self.is_even or collective == "all_to_all":
            return self.at_once(collective, nbytes)
        if len(self.nodes[0]) > 1:
            return self.in_two(self.levels, collective, nbytes)
        seconds = self.at_once(collective, nbytes)
        return min(seconds, self.in_two(self.pods, collective, nbytes)) if self.pods else seconds

    def at_once(self, collective: str, nbytes: int) -> float:
        return fastest(collective, nbytes, self.nodes, contended(self.network, self.groups, self.leaving))

    def in_two(self, levels: tuple[AxisGroup, AxisGroup], collective: str, nbytes: int) -> float:
        within, across = levels
        shard = nbytes / within.size
        if collective == "all_reduce":
            inside_s = within.seconds("reduce_scatter", nbytes) + within.seconds("all_gather", nbytes)
            return inside_s + across.seconds(collective, shard)
        return within.seconds(collective, nbytes) + across.seconds(collective, shard)


@lru_cache(maxsize=1 << 16)
def fastest(collective: str, nbytes: int, nodes: Nodes, network: Network) -> float:
    rows = [find(collective, name) for name in (IN_NODE if len(nodes) == 1 else BY_MESSAGES)[collective]]
    return min(predict(row, nbytes, sum(map(len, nodes)), nodes, network=network) for row in rows)


class NodeGroups:
    """Groups of ranks of a mesh on a machine's nodes, by the pattern of the mesh; meshes have many in common."""

    def __init__(self, machine: Machine):
        self.machine, self.network = machine, machine.network
        self.hosts = machine.hosts or (Host(),) * len(machine.nodes)
        homes = {rank: number for number, node in enumerate(machine.nodes) for rank in node}
        self.node_of = np.array([homes[rank] for rank in range(len(homes))])
        self.widest_of: dict[Pattern, AxisGroup] = {}
        self.links: dict[tuple[Pattern, int, int], Link] = {}

    def nodes(self, pattern: Pattern) -> np.ndarray:
        """Return the nodes of the ranks of each group.  Shapes: (groups, ranks)."""
        return self.node_of[groups_of_ranks(pattern)]

    def along(self, pattern: Pattern) -> AxisGroup:
        if pattern not in self.widest_of:
            self.widest_of[pattern] = self.widest(self.nodes(pattern))
        return self.widest_of[pattern]

    def widest(self, nodes: np.ndarray) -> AxisGroup:
        """Return the group that spans most pods and nodes, with the largest number of groups on a node."""
        spans = [distinct(nodes), *(distinct(nodes // tier.nodes) for tier in self.network.tiers)]
        widest = nodes[np.lexsort([-span for span in spans])[0]].tolist()
        ranks: dict[int, list[int]] = {}
        for rank, node in enumerate(widest):
            ranks.setdefault(node, []).append(rank)
        ordered = np.sort(nodes, axis=1)
        touched = np.bincount(ordered[np.diff(ordered, axis=1, prepend=-1) != 0])  # a group counts once on a node
        tiers, leaving = self.tiers_of(nodes, [*ranks])
        network = self.network_of(nodes[spans[0] > 1])._replace(tiers=tiers)
        own = tuple(map(tuple, ranks.values()))
        return AxisGroup(own, network, int(touched.max()), leaving, self.machine.sync_s)

    def tiers_of(self, nodes: np.ndarray, own: list[int]) -> tuple[tuple[Tier, ...], tuple[int, ...]]:
        """Return the tiers whose pods a group on its `own` nodes leaves, and how many of all groups leave the same pod.

        The tiers count the group's nodes: as many of them follow each other in every pod, or a divisor of that.
        """
        tiers, leaving = [], []
        for tier in self.network.tiers:
            runs = [len([*run]) for _, run in groupby(node // tier.nodes for node in own)]
            if len(runs) > 1:
                tiers.append(tier._replace(nodes=math.gcd(*runs[:-1])))
                leaving.append(most_leaving(nodes // tier.nodes))
        return tuple(tiers), tuple(leaving)

    def network_of(self, nodes: np.ndarray) -> Network:
        """Return the network at the rate of the slowest link of some nodes."""
        rates = (self.hosts[node].rate for node in np.unique(nodes)) if self.machine.hosts else ()
        rate = min(rates, default=1.0)
        return self.network if rate == 1 else with_rate(self.network, rate)

    def to_stage(self, pattern: Pattern, source: int, dest: int) -> Link:
        """Return the link from one rank of each pipeline, whose ranks have this pattern, to another."""
        key = pattern, source, dest
        if key not in self.links:
            pipelines = self.nodes(pattern)
            self.links[key] = self.link(pipelines[:, source], pipelines[:, dest])
        return self.links[key]

    def link(self, source: np.ndarray, dest: np.ndarray) -> Link:
        """Return the slowest link of simultaneous messages from and to nodes, where most leave the same node or pod."""
        crossing = source != dest
        if not crossing.any():
            return self.network.within
        network = self.network_of(np.concatenate((source[crossing], dest[crossing])))
        lengths = [1, *(tier.nodes for tier in network.tiers)]
        leaving = (source[source // length != dest // length] // length for length in lengths)
        numbers = [int(np.bincount(nodes).max(initial=0)) for nodes in leaving]
        links = contended(network, numbers[0], tuple(numbers[1:])).routes
        return max((link for link, number in zip(links, numbers, strict=True) if number), key=lambda link: link[::-1])


class RankPlacement:
    """Ranks of a layout on a machine's nodes; sp ranks form rings of groups of `parts`.

    Placements on the same machine may have their `groups` in common.
    """

    def __init__(self, layout: ParallelLayout, machine: Machine, parts: int = 1, groups: NodeGroups | None = None):
        self.machine, self.network = machine, machine.network
        self.groups = groups or NodeGroups(machine)
        self.mesh = mesh_shape(machine.world_size, **axes_of(layout), heads=Within("sp", parts))

    tp = cached_property(lambda self: self.along("tp"))
    ep = cached_property(lambda self: self.along("ep"))  # ranks that divide the experts
    heads = cached_property(lambda self: self.along("heads"))  # sp ranks that exchange heads
    samples = cached_property(lambda self: self.along("dp", "sp"))  # with the same parameters, except for experts
    replicas = cached_property(lambda self: self.along(*replica_axes(self.mesh.lengths)))  # including experts
    matrices = cached_property(lambda self: self.along(*replica_axes(self.mesh.lengths), "tp"))  # shards of the same

    @cached_property
    def speeds(self) -> list[tuple[float, ...]]:
        """The speed of each replica's pp ranks: that of the slowest of the ranks that divide a stage's layers."""
        return [tuple(speeds) for speeds in self.least("speed").tolist()]

    @cached_property
    def stage_speeds(self) -> tuple[float, ...]:
        """The speed of each pp rank by which layers are assigned to it: that of its slowest replica."""
        return tuple(relative_speeds((1 / self.least("speed").min(0)).tolist()))

    @cached_property
    def memory_bytes(self) -> list[float]:
        """The memory of each pp rank: that of its rank with the least."""
        return (self.machine.memory_bytes * self.least("memory").min(0)).tolist()

    def least(self, name: str) -> np.ndarray:
        """Return the least of the hosts' values along sp and tp.  Shapes: (dp, pp)."""
        values = np.array([getattr(host, name) for host in self.groups.hosts])[self.nodes_along("sp", "tp")]
        return values.min(1).reshape(self.mesh.lengths["dp"], self.mesh.lengths["pp"])

    @cached_property
    def ring(self) -> Link:
        """The link to the next ranks across groups that exchange heads, which are nested in sp."""
        nodes = self.nodes_along("sp/heads")
        return self.groups.link(nodes.ravel(), np.roll(nodes, -1, axis=1).ravel())

    @cached_property
    def ends(self) -> AxisGroup:
        """Pairs of the first and the last rank of each pipeline."""
        return self.groups.widest(self.nodes_along("pp")[:, [0, -1]])

    @cached_property
    def owners(self) -> dict[str, tuple[AxisGroup, AxisGroup]]:
        """Groups by zero_group: the replicas over which ZeRO shards, and the replicas with the same shards.

        Nodes with different numbers of replicas cannot be groups.
        """
        groups = {"all": (self.replicas, AxisGroup(((0,),), self.network))}
        if self.replicas.is_even:
            within, across = (replace(level, sync_s=self.machine.sync_s, cached_s={}) for level in self.replicas.levels)
            groups["node"] = within, across
        return groups

    def along(self, *axes: str) -> AxisGroup:
        return self.groups.along(self.mesh.pattern(*axes))

    def nodes_along(self, *axes: str) -> np.ndarray:
        """Return the nodes of the ranks of each group along some axes.  Shapes: (groups, ranks)."""
        return self.groups.nodes(self.mesh.pattern(*axes))

    def to_stage(self, source: int, dest: int) -> Link:
        """Return the link from one rank of each pipeline to another."""
        return self.groups.to_stage(self.mesh.pattern("pp"), source, dest)


def distinct(values: np.ndarray) -> np.ndarray:
    """Count the different values of each row."""
    return 1 + (np.diff(np.sort(values, axis=1), axis=1) != 0).sum(1)


def most_leaving(pods: np.ndarray) -> int:
    """Return the largest number of groups that leave one pod, by the pods of their ranks.  Shapes: (groups, ranks).

    >>> most_leaving(np.array([[0, 0], [0, 1], [0, 1], [1, 2]]))
    3
    """
    leaving = np.sort(pods[(pods != pods[:, :1]).any(1)], axis=1)
    return int(np.bincount(leaving[np.diff(leaving, axis=1, prepend=-1) != 0]).max())
