"""Assemble a model's whole parameters and buffers from the shards of all ranks."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor, nn

import collectives
from parallelism.mesh import Mesh
from parallelism.placement import Shard, shards_of


@torch.no_grad()
def wholes(model: nn.Module, mesh: Mesh) -> dict[str, Tensor]:
    """Return a model's parameters and buffers by name, each gathered along the axes that shard it.  Collective."""
    gathered = {}
    for name, p in tensors_of(model).items():
        whole = p.detach()
        for axis, shard in reversed(shards_of(p).items()):  # inner axes shard the shards of outer ones
            whole = gather(whole.contiguous(), shard, mesh[axis])
        gathered[name] = whole.contiguous()
    return gathered


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def gather(local: Tensor, shard: Shard, comm: collectives.Communicator) -> Tensor:
    every = comm.all_gather(local, out=local.new_empty(comm.size * local.numel()))
    return shard.whole([one.view(local.shape) for one in every.chunk(comm.size)])


@torch.no_grad()
def fill(model: nn.Module, weights: Mapping[str, Tensor], pp: collectives.Communicator) -> None:
    """Fill a model with its parameters and buffers by name; each rank of `pp` provides some of them.  Collective."""
    params = tensors_of(model)
    owners = pp.all_reduce(np.array([pp.rank if name in weights else -1 for name in params]), op="max")
    for (name, p), owner in zip(params.items(), owners.tolist(), strict=True):
        if pp.rank == owner:
            p.copy_(weights[name])
        pp.broadcast(p.data, root=owner)
