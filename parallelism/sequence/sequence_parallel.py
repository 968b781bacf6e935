"""Sequence parallelism: shard the tokens of every sequence; ranks communicate in attention only.

`ring`: keys and values circulate (ring_attention.py).  `ulysses`: an all-to-all gives each rank all tokens of some
heads, and another one returns the result.  `hybrid`: all-to-all within groups of ranks, rings across the groups.  With
`parts`, sequences are computed in that many parts, and results have the same bits on any number of ranks.

Source: that of ring_attention; Jacobs et al., "DeepSpeed Ulysses", 2023, arXiv 2309.14509; Fang and Zhao, "USP: A
Unified Sequence Parallelism Approach", 2024, arXiv 2405.07719 (both together).
"""

from __future__ import annotations

from functools import reduce
from operator import add
from typing import Any

import torch
from torch import Tensor, nn

import collectives
from parallelism.buffers import autograd
from parallelism.buffers.tensor_collectives import ExposedTime, TensorCollectives
from parallelism.buffers.transfer import to_device
from parallelism.numerics.dropout import Dropout
from parallelism.sequence.part_attention import SequenceParts, part_attention
from parallelism.sequence.partial_attention import like_heads
from parallelism.sequence.ring_attention import ALONE, Ring, ring_attention
from parallelism.sequence.token_shards import TokenShards, check_heads, check_parts, shard_tokens

HEADS, SEQ = 1, 2  # dims of q, k and v


class SequenceParallel:
    """Ranks of `comm` that shard sequences; `shards(length)` maps tokens to ranks.

    In hybrid mode, groups of `head_ranks` consecutive ranks exchange heads.  With `parts`, sequences are computed in
    that many parts, of which each rank holds whole ones.  Collective.

    Raises: InputError on every rank for an unknown mode or order, a group size that does not divide the ranks, or parts
    that ranks cannot divide.
    """

    def __init__(
        self,
        comm: collectives.Communicator,
        mode: str = "ring",
        order: str = "zigzag",
        head_ranks: int | None = None,
        parts: int | None = None,
    ):
        with comm.agreed("SequenceParallel"):
            shards = shard_tokens(0, comm.size, mode, order, head_ranks)
            if parts:
                check_parts(parts, shards._replace(length=parts * shards.unit))
        self.all, self.parts = TensorCollectives(comm), parts
        heads, ring = comm.split(comm.rank // shards.parts), comm.split(comm.rank % shards.parts)
        assert heads is not None
        assert ring is not None
        self.heads, self.ring = TensorCollectives(heads), Ring(TensorCollectives(ring), order)

    def __str__(self) -> str:
        if self.heads.size == 1:
            return f"{self.ring.order} ring attention"
        return f"head exchange in groups of {self.heads.size}, {self.ring.order} rings of {self.ring.size}"

    @property
    def clocks(self) -> list[ExposedTime]:
        """What adds up this rank's waits for others."""
        return [self.all, self.heads, self.ring.members]

    def shards(self, length: int) -> TokenShards:
        """Return the shards of a sequence; raise ValueError if the ranks cannot divide its length evenly."""
        shards = TokenShards(length, self.ring.size, self.heads.size, self.ring.order)
        shards.check()
        return shards

    def positions(self, length: int) -> Tensor:
        """Return the positions of this rank's tokens in a sequence of `length`."""
        return torch.from_numpy(self.shards(length).positions(self.all.rank))

    def own(self, x: Tensor) -> Tensor:
        """Return this rank's tokens of (batch, seq)."""
        return x[:, to_device(self.positions(x.shape[1]), x.device)]

    def free(self) -> None:
        """Free its communicators, but not the one it was built from.  Collective."""
        self.all.forget()
        for exchange in (self.heads, self.ring.members):
            exchange.forget()
            exchange.comm.free()


class SequenceAttention(nn.Module):
    """Replaces the attention core of a plain model, `alone`, which is used if each rank has all tokens of its heads.

    Without an axis, each rank has all tokens of all heads.  `alone` cannot drop probabilities as `dropout` does, nor
    attend by parts.  With a `window`, a token attends to so many only, itself included.

    Shapes: q (batch, n_head, seq/sp, head_size), k and v (batch, n_kv_head, seq/sp, head_size), documents (batch,
    seq/sp).

    Raises: ValueError if the ranks cannot divide the heads evenly.
    """

    def __init__(
        self,
        axis: SequenceParallel | None,
        dropout: Dropout | None = None,
        alone: nn.Module | None = None,
        window: int | None = None,
    ):
        super().__init__()
        self.window = window
        self.heads, self.ring, self.dropout = axis.heads if axis else ALONE, axis.ring if axis else Ring(), dropout
        self.parts = SequenceParts(self.ring, axis.parts) if axis and axis.parts else None
        self.alone = alone if self.ring.size == 1 and not self.parts else None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None = None) -> Tensor:
        heads = self.heads
        if self.parts:
            k, v = repeated(k, q.shape[HEADS]), repeated(v, q.shape[HEADS])
        if heads.size > 1:
            check_heads(q.shape[HEADS], k.shape[HEADS], heads.size)
            if heads.size % k.shape[HEADS] == 0:
                k, v = like_heads(k, heads.size), like_heads(v, heads.size)  # so that each rank gets one
            # (batch, heads/group, seq/ring, head_size)
            q, k, v = (autograd.all_to_all(x, heads, HEADS, SEQ) for x in (q, k, v))
            if documents is not None:
                documents = heads.all_gather(documents.t()).t()  # (batch, seq/ring)
        dropout = self.dropout.attention(q) if self.dropout else None
        if self.parts:
            y = part_attention(q, k, v, self.parts, documents, dropout, self.window)
        elif self.alone and dropout is None:
            y = self.alone(q, k, v, documents)
        else:
            y = ring_attention(q, k, v, self.ring, documents, dropout, self.window)
        return autograd.all_to_all(y, heads, SEQ, HEADS) if heads.size > 1 else y  # (batch, n_head, seq/sp, head_size)


def repeated(x: Tensor, num_heads: int) -> Tensor:
    """Repeat heads as `like_heads` does; their gradients are added in order, whose bits a sum may let shapes decide."""
    count = x.shape[HEADS]
    return autograd.Conjugate.apply(
        x, lambda x: like_heads(x, num_heads), lambda x: reduce(add, x.unflatten(HEADS, (count, -1)).unbind(HEADS + 1))
    )


class SequenceLoss(nn.Module):
    """Mean over all ranks' tokens of a loss that has a `total`.

    The gradient of this rank's tokens is multiplied by the number of ranks, because data parallelism averages gradients
    over these ranks, too; but not with parts, whose gradients it sums.  The totals of parts are added in their order.
    """

    def __init__(self, loss: Any, axis: SequenceParallel):
        super().__init__()
        self.loss, self.ranks, self.axis = loss, axis.all, axis

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        count = self.ranks.all_reduce((targets != self.loss.ignored).sum()[None])[0].clamp(min=1)
        size, sum_up = self.ranks.size, self.ranks.all_reduce
        if not self.axis.parts:
            total = self.loss.total(logits, targets) / count
            return autograd.Conjugate.apply(total[None], sum_up, lambda gradient: size * gradient)[0]
        own = to_device(self.axis.positions(self.axis.parts), logits.device)  # numbers of this rank's parts
        of_parts = zip(logits.chunk(len(own), 1), targets.chunk(len(own), 1), strict=True)
        totals = torch.stack([self.loss.total(*part) for part in of_parts])
        zeros = totals.new_zeros(self.axis.parts)  # of other ranks' parts
        every = autograd.Conjugate.apply(totals, lambda x: sum_up(zeros.index_copy(0, own, x)), lambda x: x[own])
        return (every.double().sum() / count).to(totals.dtype)
