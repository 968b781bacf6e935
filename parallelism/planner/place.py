"""The machine, and rank placement: map a layout's axes to nodes, and predict the times of their collectives.

Ranks are ordered as in `parallelism.mesh`, tp innermost.  All groups of an axis communicate at once: groups on the same
node share its cores and its links to other nodes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np

from collectives.algorithms import find
from collectives.schedule.cost import Link, Network, Nodes, predict
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

    A pass of a block takes at least `least_pass_s`, however small the block is.  Unless it `overlaps`, gradients do not
    proceed while a rank computes, as where its processor moves messages, too.  Without `hosts`, one for each node, all
    nodes are alike.  Of a device with a `roofline`, each kernel's time follows from its shape.
    """

    nodes: Nodes
    network: Network
    flops_per_s: float
    memory_bytes: float
    least_pass_s: float = 0.0
    hosts: tuple[Host, ...] = ()
    overlaps: bool = True
    roofline: Roofline | None = None

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
    network: Network
    groups: int = 1
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
        return (
            AxisGroup((tuple(range(length)),), self.network, self.groups),
            AxisGroup(across, self.network, self.groups * length),
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
            self.cached_s[key] = self.by_levels(*key)
        return self.cached_s[key]

    def by_levels(self, collective: str, nbytes: int) -> float:
        if len(self.nodes) == 1 or len(self.nodes[0]) == 1 or not self.is_even or collective == "all_to_all":
            return fastest(collective, nbytes, self.nodes, contended(self.network, self.groups))
        within, across = self.levels
        shard = nbytes / within.size
        if collective == "all_reduce":
            inside_s = within.seconds("reduce_scatter", nbytes) + within.seconds("all_gather", nbytes)
            return inside_s + across.seconds(collective, shard)
        return within.seconds(collective, nbytes) + across.seconds(collective, shard)


@lru_cache(maxsize=1 << 16)
def fastest(collective: str, nbytes: int, nodes: Nodes, network: Network) -> float:
    rows = [find(collective, name) for name in (IN_NODE if len(nodes) == 1 else BY_MESSAGES)[collective]]
    return min(predict(row, nbytes, sum(map(len, nodes)), nodes, network=network) for row in rows)


def contended(network: Network, groups: int) -> Network:
    """Return the effective network of one of several groups that communicate at once on the same nodes.

    A message from a node waits for those of the other groups, too: so many times as long at the gate, once more for
    each of them on the way.
    """
    if groups <= 1:
        return network
    gate, far = network.gate, network.between
    return network._replace(
        nic=Link(*(groups * cost for cost in gate)),
        between=Link(*(own + (groups - 1) * cost for own, cost in zip(far, gate, strict=True))),
        cores=network.cores / groups,
    )


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
        """Return the group that spans most nodes, with the largest number of groups on a node."""
        ordered = np.sort(nodes, axis=1)
        is_another = np.diff(ordered, axis=1, prepend=-1) != 0  # than the node before it
        spans = is_another.sum(1)
        widest = nodes[spans.argmax()].tolist()
        ranks: dict[int, list[int]] = {}
        for rank, node in enumerate(widest):
            ranks.setdefault(node, []).append(rank)
        groups = int(np.bincount(ordered[is_another]).max())
        return AxisGroup(tuple(map(tuple, ranks.values())), self.network_of(ordered[spans > 1]), groups)

    def network_of(self, nodes: np.ndarray) -> Network:
        """Return the network at the rate of the slowest link of some nodes."""
        rates = (self.hosts[node].rate for node in np.unique(nodes)) if self.machine.hosts else ()
        rate = min(rates, default=1.0)
        if rate == 1:
            return self.network
        between, gate = (Link(alpha, beta / rate) for alpha, beta in (self.network.between, self.network.gate))
        return self.network._replace(between=between, nic=gate)

    def to_stage(self, pattern: Pattern, source: int, dest: int) -> Link:
        """Return the link from one rank of each pipeline, whose ranks have this pattern, to another."""
        key = pattern, source, dest
        if key not in self.links:
            pipelines = self.nodes(pattern)
            self.links[key] = self.link(pipelines[:, source], pipelines[:, dest])
        return self.links[key]

    def link(self, source: np.ndarray, dest: np.ndarray) -> Link:
        """Return the link of simultaneous messages from and to nodes: on the node that most leave, if any do."""
        crossing = source != dest
        leaving = int(np.bincount(source[crossing]).max(initial=0))
        network = self.network_of(np.concatenate((source[crossing], dest[crossing])))
        return contended(network, leaving).between if leaving else network.within


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
        return groups | ({"node": self.replicas.levels} if self.replicas.is_even else {})

    def along(self, *axes: str) -> AxisGroup:
        return self.groups.along(self.mesh.pattern(*axes))

    def nodes_along(self, *axes: str) -> np.ndarray:
        """Return the nodes of the ranks of each group along some axes.  Shapes: (groups, ranks)."""
        return self.groups.nodes(self.mesh.pattern(*axes))

    def to_stage(self, source: int, dest: int) -> Link:
        """Return the link from one rank of each pipeline to another."""
        return self.groups.to_stage(self.mesh.pattern("pp"), source, dest)
