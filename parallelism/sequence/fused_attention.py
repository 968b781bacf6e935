"""Fused attention kernels: torch's kernels that return the log-sum-exp, and take it in the backward pass.

The CPU kernel computes in float32 or float64 and adds masks; FlashAttention on CUDA takes 16-bit dtypes and no mask.
Given the log-sum-exp over more keys, they return gradients of partial attention.  `Dropping` supports our own dropout.

Source: torch, `_scaled_dot_product_ring_flash_attention` of torch.distributed.tensor.experimental, which calls the
CUDA kernels like this; aten/src/ATen/native/native_functions.yaml (signatures).
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from parallelism.numerics.dropout import Drop, has_numba

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
        gradient, out = gradient.to(q.dtype), out.to(q.dtype)
        lengths = None, None, q.shape[2], k.shape[2]  # no packed sequences
        dropout = q.new_zeros(2, dtype=torch.uint64), q.new_zeros((), dtype=torch.uint64)  # unused: seed and offset
        function = aten._scaled_dot_product_flash_attention_backward
        return function(gradient, q, k, v, out, log, *lengths, 0.0, rules.causal, *dropout)


class Dropping:
    """Attention with dropout on the CPU, in float32: torch's matrix products, and one pass over the scores between."""

    @staticmethod
    def takes(q: Tensor, k: Tensor, rules: ScoreRules) -> bool:
        fits = q.dtype != torch.float64 and (not rules.causal or q.shape[2] == k.shape[2])
        return q.device.type == "cpu" and rules.drop is not None and rules.mask is None and fits and has_numba()

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, rules: ScoreRules) -> tuple[Tensor, Tensor]:
        from parallelism.numerics.pointwise_kernels import softmax

        q, k, v = map(wide, (q, k, v))
        with torch.autocast("cpu", enabled=False):
            scores, log = q @ k.transpose(-1, -2), q.new_empty(q.shape[:-1])
            softmax(rows_of(scores), *numbers(q, rules), log.view(-1).numpy())
            return scores @ v, log

    @staticmethod
    def backward(gradient: Tensor, saved: SavedAttention, rules: ScoreRules) -> tuple[Tensor, Tensor, Tensor]:
        from parallelism.numerics.pointwise_kernels import softmax_backward

        q, k, v, out, log = *map(wide, saved[:3]), *saved[3:]
        p, ds, delta = q @ k.transpose(-1, -2), gradient @ v.transpose(-1, -2), (gradient * out).sum(-1)
        logs = (x.reshape(-1).numpy() for x in (log, delta))
        softmax_backward(rows_of(p), rows_of(ds), *numbers(q, rules), *logs)
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
    return x.view(-1, x.shape[-1]).numpy()


def wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
