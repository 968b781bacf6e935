"""Which ranks share a node."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Topology:
    """Rank r is on the node numbered `node_of[r]`; nodes are numbered in the order of their first rank."""

    node_of: tuple[int, ...]

    @classmethod
    def from_ids(cls, ids: list[int]) -> "Topology":
        """From any number that ranks of a node have in common.

        >>> Topology.from_ids([7, 7, 3, 3]).nodes
        ((0, 1), (2, 3))
        """
        order = {node: index for index, node in enumerate(dict.fromkeys(ids))}
        return cls(tuple(order[node] for node in ids))

    @property
    def nodes(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each node."""
        return tuple(
            tuple(rank for rank, at in enumerate(self.node_of) if at == node) for node in range(max(self.node_of) + 1)
        )
