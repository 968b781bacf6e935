"""Where a parameter lies: for each axis of a mesh, whether its ranks hold shards of it, or each of them the whole.

Source: as in torch.distributed.tensor, whose placements have these names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F


class Shard(NamedTuple):
    """Shards along a dim of `length`: equal ones of each of several pieces, whose relative lengths are `pieces`.

    With `padded`, the dim is lengthened by zeros until the shards are equal.

    >>> [Shard(0, 6, pieces=(2, 1)).local(torch.arange(6), rank, 2).tolist() for rank in (0, 1)]
    [[0, 1, 4], [2, 3, 5]]
    >>> [Shard(0, 3, padded=True).local(torch.arange(3), rank, 2).tolist() for rank in (0, 1)]
    [[0, 1], [2, 0]]
    """

    dim: int
    length: int
    pieces: Sequence[int] = (1,)
    padded: bool = False

    def local_length(self, size: int) -> int:
        return -(-self.length // size)

    def piece_lengths(self, length: int) -> list[int]:
        return [length * piece // sum(self.pieces) for piece in self.pieces]

    def local(self, whole: Tensor, rank: int, size: int) -> Tensor:
        """Return the shard that one of `size` ranks holds."""
        missing = self.local_length(size) * size - self.length
        if missing:
            whole = F.pad(whole.movedim(self.dim, -1), (0, missing)).movedim(-1, self.dim)
        pieces = whole.split(self.piece_lengths(whole.shape[self.dim]), self.dim)
        return torch.cat([piece.chunk(size, self.dim)[rank] for piece in pieces], self.dim)

    def whole(self, shards: Sequence[Tensor]) -> Tensor:
        """Join the shards of all ranks, in rank order."""
        pieces = [shard.split(self.piece_lengths(shard.shape[self.dim]), self.dim) for shard in shards]
        ordered = [piece for same in zip(*pieces, strict=True) for piece in same]
        return torch.cat(ordered, self.dim).narrow(self.dim, 0, self.length)


class Replicate(NamedTuple):
    """Each rank that has the parameter has the whole of it."""


Placement = Mapping[str, Shard | Replicate]  # by the names of axes; what is not named is replicated


def place(parameter: Tensor, **placement: Shard | Replicate) -> None:
    """Say where a parameter lies along some axes, beside what has been said of others."""
    parameter.placement = {**placement_of(parameter), **placement}  # type: ignore[attr-defined]


def placement_of(parameter: Tensor) -> Placement:
    return getattr(parameter, "placement", {})


def shards_of(parameter: Tensor) -> dict[str, Shard]:
    """Return a parameter's shards by axis, the outermost first."""
    return {axis: shard for axis, shard in placement_of(parameter).items() if isinstance(shard, Shard)}


def shard_of(parameter: Tensor, axis: str) -> Shard | None:
    """Return how the ranks along an axis shard a parameter, or None if each has the whole."""
    return shards_of(parameter).get(axis)
