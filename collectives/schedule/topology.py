"""Which ranks share a node, and into which groups hierarchical algorithms divide them."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import index
from typing import Any

from collectives.algorithms.algorithm import Groups
from collectives.algorithms.groups import depth, innermost, whole


@dataclass(frozen=True)
class Topology:
    """Rank r is on the node numbered `node_of[r]`; nodes are numbered in the order of their first rank.

    `levels` are the lengths of the groups of consecutive ranks, the outermost first, that take the nodes' place.
    """

    node_of: tuple[int, ...]
    levels: tuple[int, ...] = ()

    @classmethod
    def from_ids(cls, ids: Sequence[int], levels: Sequence[int] | None = None) -> "Topology":
        """Make one from any number that ranks of a node have in common.

        >>> Topology.from_ids([7, 7, 3, 3]).nodes
        ((0, 1), (2, 3))
        """
        order = {node: index for index, node in enumerate(dict.fromkeys(ids))}
        return cls(tuple(order[node] for node in ids), tuple(levels or ()))

    @property
    def nodes(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each node."""
        return tuple(
            tuple(rank for rank, at in enumerate(self.node_of) if at == node) for node in range(max(self.node_of) + 1)
        )

    @property
    def groups(self) -> Groups:
        """The hierarchy of ranks: by `levels`, if there are any, else the nodes.

        >>> Topology.from_ids([0] * 7, levels=[4, 2]).groups
        (((0, 1), (2, 3)), ((4, 5), (6,)))
        """
        return divided(range(len(self.node_of)), self.levels) if self.levels else self.nodes

    @property
    def is_flat(self) -> bool:
        """Whether all ranks are one group, or each is one of its own."""
        return depth(whole(self.groups, len(self.node_of))) <= 1

    @property
    def has_groups_in_nodes(self) -> bool:
        """Whether the hierarchy's innermost groups are parts of nodes.

        >>> [Topology.from_ids(nodes).has_groups_in_nodes for nodes in ([0, 0, 1], [0, 1, 2])]
        [True, False]
        """
        return all(
            len({self.node_of[rank] for rank in ranks}) == 1
            for ranks in innermost(whole(self.groups, len(self.node_of)))
        )


def divided(ranks: Sequence[int], levels: Sequence[int]) -> Groups:
    """Divide consecutive ranks into groups of `levels[0]`, and so on inside; the last group may be smaller."""
    if not levels:
        return tuple(ranks)
    length, *below = levels
    return tuple(divided(ranks[first : first + length], below) for first in range(0, len(ranks), length))


def refuse_levels(levels: Any) -> str:
    """Return what is wrong with a caller's `levels`, if anything is.

    >>> refuse_levels([4, 4])[:67]
    'levels=[4, 4] must be positive integers, each smaller than the one '
    """
    try:
        lengths = [index(length) for length in levels] if levels is not None else [1]
    except TypeError:  # what is not a sequence, or not of integers
        lengths = []
    if lengths and lengths[-1] > 0 and all(outer > inner for outer, inner in pairwise(lengths)):
        return ""
    return (
        f"{levels=} must be positive integers, each smaller than the one before: pass lengths of groups, the outermost "
        "first, as in [8, 4], or None for the nodes"
    )
