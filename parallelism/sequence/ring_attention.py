"""Ring attention: keys and values circulate in a ring, while each rank attends to those it currently holds.

Source: Liu, Zaharia and Abbeel, "Ring Attention with Blockwise Transformers for Near-Infinite Context", 2023, arXiv
2310.01889.
"""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from parallelism.buffers.tensor_collectives import TensorCollectives
from parallelism.buffers.transfer import to_device
from parallelism.numerics.dropout import AttentionDropout
from parallelism.sequence.partial_attention import ScoreRules, attend, attend_backward, mask_of, merge, wide
from parallelism.sequence.token_shards import Pair, TokenShards

ALONE: Any = SimpleNamespace(size=1, rank=0)  # a group of one rank, which needs no communication


class GlobalTokens(NamedTuple):
    """Metadata of all tokens of the ring: their positions, and their documents and window if there are any."""

    positions: Tensor  # (size, seq)
    documents: Tensor | None  # (size, batch, seq)
    dropout: AttentionDropout | None
    window: int | None = None


class Ring:
    """Ranks of a ring, each of which holds some tokens of a sequence."""

    def __init__(self, members: TensorCollectives = ALONE, order: str = "zigzag"):
        self.members, self.order, self.rank, self.size = members, order, members.rank, members.size

    def sources(self) -> Iterator[int]:
        """Yield the rank whose keys this rank holds, step by step; it starts with its own."""
        return ((self.rank - step) % self.size for step in range(self.size))

    def pair(self, source: int, length: int) -> Pair | None:
        return TokenShards(length * self.size, self.size, order=self.order).pair(self.rank, source)

    def rules(self, tokens: GlobalTokens, source: int, dtype: torch.dtype) -> tuple[slice, slice, ScoreRules] | None:
        """Return which queries attend to which keys and how; None if none do.

        There is a mask if there are documents or a window.
        """
        here, there, mask = tokens.positions[self.rank], tokens.positions[source], None
        if tokens.documents is None and tokens.window is None:
            pair = self.pair(source, len(here))
        else:
            may = window_mask(here, there, tokens.window)[None]  # (1, seq, seq)
            pair = Pair(slice(None), slice(None), causal=False) if not tokens.window or may.any() else None
            if tokens.documents is not None:
                may = may & (tokens.documents[self.rank][:, :, None] == tokens.documents[source][:, None, :])
            mask = mask_of(may, dtype)
        if pair is None:
            return None
        drop = tokens.dropout.between(here[pair.queries], there[pair.keys]) if tokens.dropout else None
        return pair.queries, pair.keys, ScoreRules(pair.causal, mask, drop)


def window_mask(queries: Tensor, keys: Tensor, window: int | None) -> Tensor:
    """Return which positions of keys are none of later tokens, nor before the window.  Shape: (queries, keys)."""
    distance = queries[:, None] - keys
    return (distance >= 0) & (distance < window) if window else distance >= 0


def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ring: Ring,
    documents: Tensor | None,
    dropout: AttentionDropout | None,
    window: int | None = None,
) -> Tensor:
    """Attend to all tokens of the ring, or of a window.  Shapes: those of `SequenceAttention`."""
    shards = TokenShards(q.shape[2] * ring.size, ring.size, order=ring.order)
    # (ring, seq/ring)
    positions = torch.stack([torch.from_numpy(shards.ring_positions(member)) for member in range(ring.size)])
    if documents is not None:
        documents = ring.members.all_gather(documents[None]) if ring.size > 1 else documents[None]
    tokens = GlobalTokens(to_device(positions, q.device), documents, dropout, window)
    return RingFunction.apply(q, k, v, ring, tokens)


class RingFunction(torch.autograd.Function):
    """Overlaps the transfer of the next keys and values with attention to the current ones.

    Saves no probabilities: the backward pass recomputes them from the log-sum-exp.  In it, the gradients of keys and
    values circulate with them, and one step further, to their owner.
    """

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, ring: Ring, tokens: GlobalTokens) -> Tensor:  # type: ignore[override]
        kv: Any = torch.stack((k, v)) if ring.size > 1 else (k, v)  # (2, batch, n_kv_head, seq/ring, head_size)
        for step, source in enumerate(ring.sources()):
            coming = ring.members.start_shift(kv) if step < ring.size - 1 else None
            if pair := ring.rules(tokens, source, q.dtype):
                here, there, rules = pair
                more, more_log = attend(q[:, :, here], kv[0][:, :, there], kv[1][:, :, there], rules)
                if step == 0:  # all queries
                    out, log = wide(more), more_log
                else:
                    merge(out[:, :, here], log[:, :, here], more, more_log)
            if coming:
                kv = coming.wait()
        ctx.save_for_backward(q, k, v, out, log, tokens.positions, tokens.documents)
        ctx.ring, ctx.rest = ring, tokens[2:]
        return out.to(q.dtype)

    @staticmethod
    def backward(ctx, gradient: Tensor):  # type: ignore[override]
        (q, k, v, out, log, positions, documents), ring = ctx.saved_tensors, ctx.ring
        tokens = GlobalTokens(positions, documents, *ctx.rest)
        gradient, coming_home = wide(gradient), None
        kv: Any = torch.stack((k, v)) if ring.size > 1 else (k, v)  # (2, batch, n_kv_head, seq/ring, head_size)
        for step, source in enumerate(ring.sources()):
            coming = ring.members.start_shift(kv) if step < ring.size - 1 else None
            pair = ring.rules(tokens, source, q.dtype)
            if step:
                dkv = torch.zeros((2, *k.shape), dtype=out.dtype, device=q.device)
            if pair:
                here, there, rules = pair
                part = q[:, :, here], kv[0][:, :, there], kv[1][:, :, there], out[:, :, here], log[:, :, here]
                more = attend_backward(gradient[:, :, here], part, rules)
                if step == 0:  # all queries and keys
                    dq, dkv = wide(more[0]), wide(torch.stack(more[1:]))  # as q, as kv
                else:
                    for total, gradients in zip((dq[:, :, here], *dkv[:, :, :, there]), more, strict=True):
                        total += gradients
            if coming_home:
                dkv += coming_home.wait()
            if ring.size > 1:
                coming_home = ring.members.start_shift(dkv)
            if coming:
                kv = coming.wait()
        dk, dv = coming_home.wait() if coming_home else dkv
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, None
