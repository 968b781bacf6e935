"""Parameter placement: along each axis of a mesh, a parameter is either sharded or replicated.

Source: the names are those of the placements in torch.distributed.tensor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import collectives
from parallelism.buffers.tensor_collectives import TensorCollectives
from parallelism.mesh import Mesh

SEQ = 1  # the dim of activations (batch, seq, n_embd) that sequence-parallel mode splits


class Shard(NamedTuple):
    """Shards along a dim of `length`.  Each of several pieces, of relative lengths `pieces`, is sharded evenly.

    With `padded`, the dim is padded with zeros until the shards are of equal length.

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
    """Every rank that has the parameter holds all of it."""


Placement = Mapping[str, Shard | Replicate]  # by axis name; replicated along axes that are missing


def place(parameter: Tensor, **placement: Shard | Replicate) -> None:
    """Set a parameter's placement along some axes, as in `place(p, tp=Shard(0, 64))`; along others it is unchanged."""
    parameter.placement = {**placement_of(parameter), **placement}  # type: ignore[attr-defined]


def like(parameter: Tensor, value: Tensor, **placement: Shard | Replicate) -> nn.Parameter:
    """Return a parameter with this value and the placement of `parameter`, changed along some axes."""
    own = nn.Parameter(value, parameter.requires_grad)
    place(own, **{**placement_of(parameter), **placement})
    return own


class Axis(NamedTuple):
    """Ranks over which layers are sharded, and whether the sequence between layers is, too.

    With `tiles`, a power of two, sums over sharded dims have the same bits on any number of ranks that divides it.
    """

    ranks: TensorCollectives
    sequence: bool = False
    tiles: int = 0

    @property
    def own_tiles(self) -> int:
        """Number of tiles of a rank."""
        return self.tiles // self.ranks.size

    @property
    def token_tiles(self) -> int:
        """Number of tiles of the sequence that a rank has between split layers."""
        return self.own_tiles if self.sequence else self.tiles

    def local(self, parameter: Tensor, shard: Shard, name: str = "tp") -> nn.Parameter:
        """Return this rank's shard of a parameter along this axis, of some name."""
        value = shard.local(parameter.detach(), self.ranks.rank, self.ranks.size).clone()
        return like(parameter, value, **{name: shard})


def placement_of(parameter: Tensor) -> Placement:
    return getattr(parameter, "placement", {})


def shards_of(parameter: Tensor) -> dict[str, Shard]:
    """Return a parameter's shards by axis, outermost first."""
    return {axis: shard for axis, shard in placement_of(parameter).items() if isinstance(shard, Shard)}


def shard_of(parameter: Tensor, axis: str) -> Shard | None:
    """Return how a parameter is sharded along an axis, or None if it is replicated."""
    return shards_of(parameter).get(axis)


@torch.no_grad()
def wholes(model: nn.Module, mesh: Mesh) -> dict[str, Tensor]:
    """Return a model's parameters and buffers by name, each gathered along the axes that shard it.  Collective."""
    gathered = {}
    for name, p in tensors_of(model).items():
        whole = p.detach().contiguous()
        for axis, shard in reversed(shards_of(p).items()):  # inner axes shard the shards of outer ones
            every = mesh[axis].all_gather(whole, out=whole.new_empty(mesh[axis].size * whole.numel()))
            whole = shard.whole([one.view(whole.shape) for one in every.chunk(mesh[axis].size)]).contiguous()
        gathered[name] = whole
    return gathered


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


@torch.no_grad()
def fill(model: nn.Module, weights: Mapping[str, Tensor], pp: collectives.Communicator) -> None:
    """Fill a model with its parameters and buffers by name; each rank of `pp` provides some of them.  Collective."""
    params = tensors_of(model)
    owners = pp.all_reduce(np.array([pp.rank if name in weights else -1 for name in params]), op="max")
    for (name, p), owner in zip(params.items(), owners.tolist(), strict=True):
        if pp.rank == owner:
            p.copy_(weights[name])
        pp.broadcast(p.data, root=owner)
