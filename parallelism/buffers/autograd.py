"""Differentiable collectives: conjugate pairs, each of which is the gradient of the other.

Source: Shoeybi et al., "Megatron-LM: Training Multi-Billion Parameter Language Models Using Model Parallelism", 2019,
section 3 (f and g); Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", 2022, section
4.2.2 (their forms for split sequences).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from parallelism.buffers.tensor_collectives import TensorCollectives

Function = Callable[[Tensor], Tensor]


class Conjugate(torch.autograd.Function):
    """Applies `do` in the forward pass and `undo` in the backward pass."""

    @staticmethod
    def forward(ctx, x: Tensor, do: Function, undo: Function) -> Tensor:  # type: ignore[override]
        ctx.undo = undo
        return do(x)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: Tensor):  # type: ignore[override]
        return ctx.undo(gradient), None, None


def copy(x: Tensor, axis: TensorCollectives) -> Tensor:
    """Return x, which is replicated; its gradients are summed over the ranks."""
    return Conjugate.apply(x, same, axis.all_reduce)


def reduce(x: Tensor, axis: TensorCollectives) -> Tensor:
    """Return the sum over the ranks; its gradient, identical on every rank, is the gradient of each addend."""
    return Conjugate.apply(x, axis.all_reduce, same)


def split(x: Tensor, axis: TensorCollectives, dim: int = 0) -> Tensor:
    """Return this rank's shard of a replicated tensor; the gradient's shards are gathered."""
    return Conjugate.apply(x, partial(own_shard, axis, dim), partial(in_dim, axis.all_gather, dim))


def gather(x: Tensor, axis: TensorCollectives, dim: int = 0) -> Tensor:
    """Gather the shards of all ranks; the gradient, identical on every rank, is split."""
    return Conjugate.apply(x, partial(in_dim, axis.all_gather, dim), partial(own_shard, axis, dim))


def reduce_scatter(x: Tensor, axis: TensorCollectives, dim: int = 0) -> Tensor:
    """Return this rank's shard of the sum over the ranks; the gradient's shards are gathered."""
    return Conjugate.apply(x, partial(in_dim, axis.reduce_scatter, dim), partial(in_dim, axis.all_gather, dim))


def all_to_all(x: Tensor, axis: TensorCollectives, split_dim: int, join_dim: int) -> Tensor:
    """Send shard d along `split_dim` to rank d, and join the received shards along `join_dim` in rank order."""

    def exchange(split_dim: int, join_dim: int, x: Tensor) -> Tensor:
        parts = torch.stack(x.chunk(axis.size, split_dim))  # (size, ...)
        return torch.cat(axis.all_to_all(parts).unbind(), join_dim)

    return Conjugate.apply(x, partial(exchange, split_dim, join_dim), partial(exchange, join_dim, split_dim))


def same(x: Tensor) -> Tensor:
    return x.view_as(x)


def own_shard(axis: TensorCollectives, dim: int, x: Tensor) -> Tensor:
    """Return this rank's shard along a dim.

    Raises: ValueError if the shards would not be equal.
    """
    if x.shape[dim] % axis.size:
        raise ValueError(f"dim {dim} of {tuple(x.shape)} is not divisible by {axis.size} ranks")
    return x.chunk(axis.size, dim)[axis.rank].contiguous()


def in_dim(collective: Function, dim: int, x: Tensor) -> Tensor:
    """Apply a first-dim collective along another dim."""
    return collective(x.movedim(dim, 0)).movedim(0, dim)
