"""Fused kernels for attention: of torch's those that give the log of the sum, too, and take it to go backwards.

That of the CPU computes in float32 or float64 and adds masks; FlashAttention's on CUDA takes 16 bits and no mask.  With
the log of a larger whole, their gradients are a part's.  None of torch's takes dropout of ours: `Dropping` does.

Source: torch, `_scaled_dot_product_ring_flash_attention` of torch.distributed.tensor.experimental, which calls the
kernels of CUDA so; aten/src/ATen/native/native_functions.yaml (signatures).
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from parallelism.numerics.dropout import Drop, has_numba

HALVES = (torch.bfloat16, torch.float16)
LARGEST_HEAD = 256  # of FlashAttention, whose heads are multiples of 8
aten = torch.ops.aten

SavedAttention = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]  # q, k, v, the result, and the log of the whole


class ScoreRules(NamedTuple):
    """What becomes of scores: those of later keys do not count if `causal`, `mask` is added, `drop` drops weights."""

    causal: bool
    mask: Tensor | None = None
    drop: Drop | None = None


class OnCPU:
    """Shapes: as of `parallelism.sequence.partial_attention.attend`."""

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
    """As many keys as queries where it is causal: the kernel lets the last of both meet, others the first."""

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
        lengths = None, None, q.shape[2], k.shape[2]  # no sequences of several lengths in one
        dropout = q.new_zeros(2, dtype=torch.uint64), q.new_zeros((), dtype=torch.uint64)  # of which there is none
        function = aten._scaled_dot_product_flash_attention_backward
        return function(gradient, q, k, v, out, log, *lengths, 0.0, rules.causal, *dropout)


class Dropping:
    """On the host, in float32: products of matrices by torch, and between them one pass over the probabilities."""

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
    """Return the arguments of the kernels of `Dropping`."""
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
