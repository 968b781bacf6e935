"""What part of a parameter a rank holds, and the whole from all parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

if TYPE_CHECKING:
    from collectives import Communicator


class Shard(NamedTuple):
    """Parts along a dim of `length`: equal ones of each of several pieces, whose lengths are as `shares` are.

    With `padded`, the dim is lengthened by zeros until the parts are equal.

    >>> [Shard(0, 6, shares=(2, 1)).part(torch.arange(6), rank, 2).tolist() for rank in (0, 1)]
    [[0, 1, 4], [2, 3, 5]]
    >>> [Shard(0, 3, padded=True).part(torch.arange(3), rank, 2).tolist() for rank in (0, 1)]
    [[0, 1], [2, 0]]
    """

    dim: int
    length: int
    shares: Sequence[int] = (1,)
    padded: bool = False

    def part_length(self, size: int) -> int:
        return -(-self.length // size)

    def pieces(self, length: int) -> list[int]:
        return [length * share // sum(self.shares) for share in self.shares]

    def part(self, whole: Tensor, rank: int, size: int) -> Tensor:
        """What one of `size` ranks holds."""
        missing = self.part_length(size) * size - self.length
        if missing:
            whole = F.pad(whole.movedim(self.dim, -1), (0, missing)).movedim(-1, self.dim)
        pieces = whole.split(self.pieces(whole.shape[self.dim]), self.dim)
        return torch.cat([piece.chunk(size, self.dim)[rank] for piece in pieces], self.dim)

    def whole(self, parts: Sequence[Tensor]) -> Tensor:
        """What all ranks hold together, in their order."""
        pieces = [part.split(self.pieces(part.shape[self.dim]), self.dim) for part in parts]
        ordered = [piece for same in zip(*pieces, strict=True) for piece in same]
        return torch.cat(ordered, self.dim).narrow(self.dim, 0, self.length)


@torch.no_grad()
def wholes(model: nn.Module, comm: Communicator) -> dict[str, Tensor]:
    """A model's parameters by name, as they are without `comm`'s ranks having parts of them.  Collective."""
    gathered = {}
    for name, p in model.named_parameters():
        own = p.detach().contiguous()
        shard = getattr(p, "shard", None)
        if shard:
            every = comm.all_gather(own, out=own.new_empty(comm.size * own.numel()))
            own = shard.whole([part.view(own.shape) for part in every.chunk(comm.size)])
        gathered[name] = own
    return gathered


@torch.no_grad()
def fill(model: nn.Module, weights: Mapping[str, Tensor], pp: Communicator) -> None:
    """Give a model its parameters, of which each rank of `pp` has some, by name.  Collective."""
    params = dict(model.named_parameters())
    owners = pp.all_reduce(np.array([pp.rank if name in weights else -1 for name in params]), op="max")
    for (name, p), owner in zip(params.items(), owners.tolist(), strict=True):
        if pp.rank == owner:
            p.copy_(weights[name])
        pp.broadcast(p.data, root=owner)
