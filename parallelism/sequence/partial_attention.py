"""Partial attention: attention of some queries to some of the keys, with the log-sum-exp of its scores.

The logs serve to merge parts of the same queries; the gradients need only the log over all keys.  Sums are in at least
float32.  Keys and values may have fewer heads than queries; consecutive query heads use the same one.

Torch's kernels return the log-sum-exp, and take it in the backward pass.  The CPU kernel computes in float32 or float64
and adds masks; FlashAttention on CUDA takes 16-bit dtypes and no mask.  `Dropping` supports our own dropout.

Source: Dao et al., "FlashAttention", 2022, sections 3.1 and B; torch, `_scaled_dot_product_ring_flash_attention` of
torch.distributed.tensor.experimental, which calls the CUDA kernels like this, and native_functions.yaml (signatures).
"""

import math
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from parallelism.numerics.dropout import Drop, kernels

HALVES = (torch.bfloat16, torch.float16)
LARGEST_HEAD = 256  # largest head size of FlashAttention; head sizes are multiples of 8
aten = torch.ops.aten

SavedAttention = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]  # q, k, v, the result, and the log-sum-exp over all keys


class ScoreRules(NamedTuple):
    """Treatment of attention scores: `causal` excludes later keys, `mask` is added, `drop` drops probabilities."""

    causal: bool
    mask: Tensor | None = None
    drop: Drop | None = None


class OnCPU:
    """Torch's kernel on the CPU.  Shapes: those of `parallelism.sequence.partial_attention.attend`."""

    @staticmethod
    def takes(q: Tensor, k: Tensor, rules: ScoreRules) -> bool:
        return q.device.type == "cpu" and rules.drop is None

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, rules: ScoreRules) -> tuple[Tensor, Tensor]:
        q, k, v = map(wide, (q, k, v))
        return aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, rules.causal, attn_mask=rules.mask)

    @staticmethod
    def backward(gradient: Tensor, saved: SavedAttention, rules: ScoreRules) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = map(wide, saved[:3])
        function = aten._scaled_dot_product_flash_attention_for_cpu_backward
        return function(gradient, q, k, v, *saved[3:], 0.0, rules.causal, attn_mask=rules.mask)


class OnCUDA:
    """FlashAttention.  If causal, needs as many keys as queries: it aligns their ends, other kernels their starts."""

    @staticmethod
    def takes(q: Tensor, k: Tensor, rules: ScoreRules) -> bool:
        fits = q.shape[-1] % 8 == 0 and q.shape[-1] <= LARGEST_HEAD and (not rules.causal or q.shape[2] == k.shape[2])
        return q.device.type == "cuda" and q.dtype in HALVES and rules[1:] == (None, None) and fits

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, rules: ScoreRules) -> tuple[Tensor, Tensor]:
        out, log, *_ = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, rules.causal)
        return out, log

    @staticmethod
    def backward(gradient: Tensor, saved: SavedAttention, rules: ScoreRules) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, out, log = saved
        gradient, out, log = gradient.to(q.dtype), out.to(q.dtype), log.contiguous()  # it takes no strides of the log
        lengths = None, None, q.shape[2], k.shape[2]  # no packed sequences
        dropout = q.new_zeros(2, dtype=torch.uint64), q.new_zeros((), dtype=torch.uint64)  # unused: seed and offset
        function = aten._scaled_dot_product_flash_attention_backward
        return function(gradient, q, k, v, out, log, *lengths, 0.0, rules.causal, *dropout)


class Dropping:
    """Attention with dropout on the CPU, in float32: torch's matrix products, and one pass over the scores between."""

    @staticmethod
    def takes(q: Tensor, k: Tensor, rules: ScoreRules) -> bool:
        fits = q.dtype != torch.float64 and (not rules.causal or q.shape[2] == k.shape[2])
        return q.device.type == "cpu" and rules.drop is not None and rules.mask is None and fits and bool(kernels())

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, rules: ScoreRules) -> tuple[Tensor, Tensor]:
        q, k, v = map(dense, (q, k, v))
        with torch.autocast("cpu", enabled=False):
            # (batch, heads, queries, keys), (batch, heads, queries)
            scores, log = q @ k.transpose(-1, -2), q.new_empty(q.shape[:-1])
            kernels().softmax(rows_of(scores), *numbers(q, rules), log.view(-1).numpy())
            return scores @ v, log

    @staticmethod
    def backward(gradient: Tensor, saved: SavedAttention, rules: ScoreRules) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, gradient, out, log = *map(dense, (*saved[:3], gradient)), *saved[3:]
        # (batch, heads, queries, keys) twice, (batch, heads, queries)
        p, ds, delta = q @ k.transpose(-1, -2), gradient @ v.transpose(-1, -2), (gradient * out).sum(-1)
        logs = (x.reshape(-1).numpy() for x in (log, delta))  # (batch x heads x queries)
        kernels().softmax_backward(rows_of(p), rows_of(ds), *numbers(q, rules), *logs)
        # (batch, heads, queries or keys, head_size)
        return ds @ k, ds.transpose(-1, -2) @ q, p.transpose(-1, -2) @ gradient


def numbers(q: Tensor, rules: ScoreRules) -> tuple:
    """Return the arguments of `Dropping`'s kernels."""
    assert rules.drop
    return *rules.drop.numbers(np.float32), np.float32(1 / math.sqrt(q.shape[-1])), q.shape[2] if rules.causal else 0


def kernel(q: Tensor, k: Tensor, rules: ScoreRules) -> type[OnCPU] | type[OnCUDA] | type[Dropping] | None:
    """Return the kernel that supports these tensors and rules, or None."""
    every: tuple[Any, ...] = OnCPU, OnCUDA, Dropping
    return next((one for one in every if one.takes(q, k, rules)), None)


def rows_of(x: Tensor) -> np.ndarray:
    return x.view(-1, x.shape[-1]).numpy()  # (batch x heads x queries, keys)


def wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def dense(x: Tensor) -> Tensor:
    """Return a tensor in at least float32 and without gaps, with which products have the same bits for any heads.

    Torch copies several heads of a strided tensor, and multiplies one where it is, by another kernel.
    """
    return wide(x).contiguous()


MASKED = -1e30  # added to masked scores; finite, so that fully masked rows do not become NaN


def attend(q: Tensor, k: Tensor, v: Tensor, rules: ScoreRules) -> tuple[Tensor, Tensor]:
    """Return the result of attention, and the log-sum-exp of its scores.

    Shapes: q (batch, n_head, queries, head_size), k and v (batch, n_kv_head, keys, head_size), mask (batch, 1, queries,
    keys); result as q, log (batch, n_head, queries).
    """
    k, v = like_heads(k, q.shape[1]), like_heads(v, q.shape[1])
    if fused := kernel(q, k, rules):
        return fused.forward(q, k, v, rules)
    q, k, v = map(dense, (q, k, v))
    with torch.autocast(q.device.type, enabled=False):
        scores = scores_of(q, k, rules)
        log = scores.logsumexp(-1)
        return dropped(probabilities(scores, log), rules.drop) @ v, log


def attend_backward(gradient: Tensor, saved: SavedAttention, rules: ScoreRules) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v, given the result and the log-sum-exp over all keys."""
    q, k, v, out, log = saved
    num_kv_heads, drop = k.shape[1], rules.drop
    k, v = like_heads(k, q.shape[1]), like_heads(v, q.shape[1])
    if fused := kernel(q, k, rules):
        dq, dk, dv = fused.backward(gradient, (q, k, v, out, log), rules)
    else:
        q, k, v, gradient = map(dense, (q, k, v, gradient))
        p = probabilities(scores_of(q, k, rules), log)
        dp = dropped(gradient @ v.transpose(-1, -2), drop)  # (batch, heads, queries, keys)
        ds = p * (dp - (gradient * out).sum(-1, keepdim=True)) / math.sqrt(q.shape[-1])
        # (batch, heads, queries or keys, head_size)
        dq, dk, dv = ds @ k, ds.transpose(-1, -2) @ q, dropped(p, drop).transpose(-1, -2) @ gradient
    return dq, sum_heads(dk, num_kv_heads), sum_heads(dv, num_kv_heads)


def merge(out: Tensor, log: Tensor, more: Tensor, more_log: Tensor) -> None:
    """Merge another part of the same queries in place; the bits of an element do not depend on the others' number."""
    total = torch.stack((log, more_log)).logsumexp(0)  # logaddexp has other bits in the last vector of a tensor
    # (batch, heads, queries, head_size)
    out.mul_((log - total).exp()[..., None]).add_(more * (more_log - total).exp()[..., None])
    log.copy_(total)


def like_heads(x: Tensor, num_heads: int) -> Tensor:
    """Repeat the heads of keys or values, so that there are as many as of queries."""
    # (batch, num_heads, seq, head_size)
    return x if x.shape[1] == num_heads else x.repeat_interleave(num_heads // x.shape[1], dim=1)


def sum_heads(gradient: Tensor, num_heads: int) -> Tensor:
    """Sum the gradients of repeated heads."""
    # (batch, num_heads, seq, head_size)
    return gradient if gradient.shape[1] == num_heads else gradient.unflatten(1, (num_heads, -1)).sum(2)


def scores_of(q: Tensor, k: Tensor, rules: ScoreRules) -> Tensor:
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])  # (batch, heads, queries, keys)
    if rules.causal:
        ahead = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(ahead, MASKED)
    return scores if rules.mask is None else scores + rules.mask


def probabilities(scores: Tensor, log: Tensor) -> Tensor:
    return (scores - log[..., None]).exp()  # (batch, heads, queries, keys)


def dropped(p: Tensor, drop: Drop | None) -> Tensor:
    return p if drop is None else drop(p)


def mask_of(may_attend: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the mask to add to scores.  Shapes: (batch, queries, keys) to (batch, 1, queries, keys)."""
    return torch.where(may_attend, 0.0, MASKED).to(torch.promote_types(dtype, torch.float32))[:, None]
