"""Attention of some queries to some keys, as a part of a larger one: with the log of the sum that it is normalised by.

Parts of the same queries are merged by these logs, and their gradients need the log of the whole only.  All is computed
in at least float32.  Keys and values may have fewer heads than queries, each shared by as many consecutive ones.

Source: Dao et al., "FlashAttention", 2022, sections 3.1 and B.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

MASKED = -1e30  # added to what does not attend: finite, so that rows without anything stay numbers

FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def attend(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, mask: Tensor | None = None, keep: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The result, and the log of the sum of exponentials.

    `mask` is added to the scores; `keep` multiplies the probabilities, as dropout does.

    Shapes: q (batch, n_head, queries, head_size), k and v (batch, n_kv_head, keys, head_size), mask (batch, 1, queries,
    keys), keep (batch, n_head, queries, keys); result as q, log (batch, n_head, queries).
    """
    q, k, v = wide(q), like_heads(wide(k), q), like_heads(wide(v), q)
    if fused(q, keep):
        return FORWARD(q, k, v, 0.0, causal, attn_mask=mask)
    with torch.autocast(q.device.type, enabled=False):
        scores = scores_of(q, k, causal, mask)
        log = scores.logsumexp(-1)
        return dropped(probabilities(scores, log), keep) @ v, log


def attend_backward(
    gradient: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    log: Tensor,
    causal: bool,
    mask: Tensor | None = None,
    keep: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v, given the result and the log of the whole."""
    num_kv_heads = k.shape[1]
    q, k, v = wide(q), like_heads(wide(k), q), like_heads(wide(v), q)
    if fused(q, keep):
        dq, dk, dv = BACKWARD(gradient, q, k, v, out, log, 0.0, causal, attn_mask=mask)
    else:
        p = probabilities(scores_of(q, k, causal, mask), log)
        dp = dropped(gradient @ v.transpose(-1, -2), keep)
        ds = p * (dp - (gradient * out).sum(-1, keepdim=True)) / math.sqrt(q.shape[-1])
        dq, dk, dv = ds @ k, ds.transpose(-1, -2) @ q, dropped(p, keep).transpose(-1, -2) @ gradient
    return dq, shared(dk, num_kv_heads), shared(dv, num_kv_heads)


def merge(out: Tensor, log: Tensor, more: Tensor, more_log: Tensor) -> None:
    """Add a part to others of the same queries, in place."""
    total = torch.logaddexp(log, more_log)
    out.mul_((log - total).exp()[..., None]).add_(more * (more_log - total).exp()[..., None])
    log.copy_(total)


def wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def like_heads(x: Tensor, q: Tensor) -> Tensor:
    """As many heads as `q` has."""
    return x if x.shape[1] == q.shape[1] else x.repeat_interleave(q.shape[1] // x.shape[1], dim=1)


def shared(gradient: Tensor, num_heads: int) -> Tensor:
    """The gradient of heads that are each shared by several."""
    return gradient if gradient.shape[1] == num_heads else gradient.unflatten(1, (num_heads, -1)).sum(2)


def fused(q: Tensor, keep: Tensor | None) -> bool:
    """Whether torch has it all in one, with the log."""
    return q.device.type == "cpu" and keep is None


def scores_of(q: Tensor, k: Tensor, causal: bool, mask: Tensor | None) -> Tensor:
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    if causal:
        ahead = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(ahead, MASKED)
    return scores if mask is None else scores + mask


def probabilities(scores: Tensor, log: Tensor) -> Tensor:
    return (scores - log[..., None]).exp()


def dropped(p: Tensor, keep: Tensor | None) -> Tensor:
    return p if keep is None else p * keep


def mask_of(may_attend: Tensor, dtype: torch.dtype) -> Tensor:
    """What to add to scores.  Shapes: (batch, queries, keys) to (batch, 1, queries, keys)."""
    return torch.where(may_attend, 0.0, MASKED).to(torch.promote_types(dtype, torch.float32))[:, None]
