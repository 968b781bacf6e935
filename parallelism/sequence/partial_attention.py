"""Partial attention: attention of some queries to some of the keys, with the log-sum-exp of its scores.

The logs serve to merge parts of the same queries; the gradients need only the log over all keys.  Sums are in at least
float32.  Keys and values may have fewer heads than queries; consecutive query heads use the same one.

Source: Dao et al., "FlashAttention", 2022, sections 3.1 and B.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from parallelism.numerics.dropout import Drop
from parallelism.sequence.fused_attention import SavedAttention, ScoreRules, kernel, wide

MASKED = -1e30  # added to masked scores; finite, so that fully masked rows do not become NaN


def attend(q: Tensor, k: Tensor, v: Tensor, rules: ScoreRules) -> tuple[Tensor, Tensor]:
    """Return the result of attention, and the log-sum-exp of its scores.

    Shapes: q (batch, n_head, queries, head_size), k and v (batch, n_kv_head, keys, head_size), mask (batch, 1, queries,
    keys); result as q, log (batch, n_head, queries).
    """
    k, v = like_heads(k, q), like_heads(v, q)
    if fused := kernel(q, k, rules):
        return fused.forward(q, k, v, rules)
    q, k, v = wide(q), wide(k), wide(v)
    with torch.autocast(q.device.type, enabled=False):
        scores = scores_of(q, k, rules)
        log = scores.logsumexp(-1)
        return dropped(probabilities(scores, log), rules.drop) @ v, log


def attend_backward(gradient: Tensor, saved: SavedAttention, rules: ScoreRules) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v, given the result and the log-sum-exp over all keys."""
    q, k, v, out, log = saved
    num_kv_heads, drop = k.shape[1], rules.drop
    k, v = like_heads(k, q), like_heads(v, q)
    if fused := kernel(q, k, rules):
        dq, dk, dv = fused.backward(gradient, (q, k, v, out, log), rules)
    else:
        q, k, v = wide(q), wide(k), wide(v)
        p = probabilities(scores_of(q, k, rules), log)
        dp = dropped(gradient @ v.transpose(-1, -2), drop)
        ds = p * (dp - (gradient * out).sum(-1, keepdim=True)) / math.sqrt(q.shape[-1])
        dq, dk, dv = ds @ k, ds.transpose(-1, -2) @ q, dropped(p, drop).transpose(-1, -2) @ gradient
    return dq, of_common_heads(dk, num_kv_heads), of_common_heads(dv, num_kv_heads)


def merge(out: Tensor, log: Tensor, more: Tensor, more_log: Tensor) -> None:
    """Merge another part of the same queries in place."""
    total = torch.logaddexp(log, more_log)
    out.mul_((log - total).exp()[..., None]).add_(more * (more_log - total).exp()[..., None])
    log.copy_(total)


def like_heads(x: Tensor, q: Tensor) -> Tensor:
    """Repeat the heads of x to match those of `q`."""
    return x if x.shape[1] == q.shape[1] else x.repeat_interleave(q.shape[1] // x.shape[1], dim=1)


def of_common_heads(gradient: Tensor, num_heads: int) -> Tensor:
    """Sum the gradients of repeated heads."""
    return gradient if gradient.shape[1] == num_heads else gradient.unflatten(1, (num_heads, -1)).sum(2)


def scores_of(q: Tensor, k: Tensor, rules: ScoreRules) -> Tensor:
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    if rules.causal:
        ahead = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(ahead, MASKED)
    return scores if rules.mask is None else scores + rules.mask


def probabilities(scores: Tensor, log: Tensor) -> Tensor:
    return (scores - log[..., None]).exp()


def dropped(p: Tensor, drop: Drop | None) -> Tensor:
    return p if drop is None else drop(p)


def mask_of(may_attend: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the mask to add to scores.  Shapes: (batch, queries, keys) to (batch, 1, queries, keys)."""
    return torch.where(may_attend, 0.0, MASKED).to(torch.promote_types(dtype, torch.float32))[:, None]
