"""Ring attention: keys and values circulate in a ring, while each rank attends to those it currently holds.

Source: Liu, Zaharia and Abbeel, "Ring Attention with Blockwise Transformers for Near-Infinite Context", 2023, arXiv
2310.01889.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from parallelism.buffers.tensor_collectives import TensorCollectives
from parallelism.numerics.dropout import AttentionDropout
from parallelism.sequence.partial_attention import ScoreRules, attend, attend_backward, mask_of, merge, wide
from parallelism.sequence.token_shards import Pair, TokenShards


class Ring:
    """Ranks of a ring, each of which holds some tokens of a sequence."""

    def __init__(self, members: TensorCollectives, order: str = "zigzag"):
        self.members, self.order = members, order

    def sources(self) -> Iterator[int]:
        """Yield the rank whose keys this rank holds, step by step."""
        size, rank = self.members.size, self.members.rank
        return ((rank - step) % size for step in range(size))

    def pair(self, source: int, length: int) -> Pair | None:
        shards = TokenShards(length * self.members.size, self.members.size, order=self.order)
        return shards.pair(self.members.rank, source)


class GlobalTokens(NamedTuple):
    """Metadata of all tokens of the ring: their positions, and their documents if there are any."""

    positions: Tensor  # (size, seq)
    documents: Tensor | None  # (size, batch, seq)
    dropout: AttentionDropout | None

    def pair(self, ring: Ring, source: int, dtype: torch.dtype) -> tuple[slice, slice, ScoreRules] | None:
        """Return which queries attend to which keys and how, with a mask if there are documents; None if none do."""
        rank, mask = ring.members.rank, None
        here, there = self.positions[rank], self.positions[source]
        if self.documents is None:
            pair = ring.pair(source, len(here))
        else:
            may = self.documents[rank][:, :, None] == self.documents[source][:, None, :]  # (batch, seq, seq)
            pair, mask = Pair(slice(None), slice(None), causal=False), mask_of(may & (here[:, None] >= there), dtype)
        if pair is None:
            return None
        drop = self.dropout.between(here[pair.queries], there[pair.keys]) if self.dropout else None
        return pair.queries, pair.keys, ScoreRules(pair.causal, mask, drop)


class RingFunction(torch.autograd.Function):
    """Overlaps the transfer of the next keys and values with attention to the current ones.

    In the backward pass, the gradients of keys and values circulate with them, and one step further, to their owner.
    """

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, ring: Ring, tokens: GlobalTokens) -> Tensor:  # type: ignore[override]
        out, log = torch.zeros_like(wide(q)), torch.full(q.shape[:-1], -torch.inf, dtype=wide(q).dtype, device=q.device)
        kv = torch.stack((k, v))
        for step, source in enumerate(ring.sources()):
            coming = ring.members.start_shift(kv) if step < ring.members.size - 1 else None
            if pair := tokens.pair(ring, source, q.dtype):
                here, there, rules = pair
                more = attend(q[:, :, here], kv[0][:, :, there], kv[1][:, :, there], rules)
                merge(out[:, :, here], log[:, :, here], *more)
            if coming:
                kv = coming.wait()
        ctx.save_for_backward(q, k, v, out, log)
        ctx.ring, ctx.tokens = ring, tokens
        return out.to(q.dtype)

    @staticmethod
    def backward(ctx, gradient: Tensor):  # type: ignore[override]
        (q, k, v, out, log), ring, tokens = ctx.saved_tensors, ctx.ring, ctx.tokens
        gradient, dq = wide(gradient), torch.zeros_like(out)
        kv, coming_home = torch.stack((k, v)), None
        for step, source in enumerate(ring.sources()):
            coming = ring.members.start_shift(kv) if step < ring.members.size - 1 else None
            dkv = torch.zeros(kv.shape, dtype=out.dtype, device=q.device)
            if pair := tokens.pair(ring, source, q.dtype):
                here, there, rules = pair
                part = q[:, :, here], kv[0][:, :, there], kv[1][:, :, there], out[:, :, here], log[:, :, here]
                more = attend_backward(gradient[:, :, here], part, rules)
                for total, gradients in zip((dq[:, :, here], *dkv[:, :, :, there]), more, strict=True):
                    total += gradients
            if coming_home:
                dkv += coming_home.wait()
            coming_home = ring.members.start_shift(dkv)
            if coming:
                kv = coming.wait()
        assert coming_home is not None
        dk, dv = coming_home.wait()
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, None
