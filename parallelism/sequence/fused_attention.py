"""Fused kernels for attention: of torch's those that give the log of the sum, too, and take it to go backwards.

That of the CPU computes in float32 or float64 and adds masks; FlashAttention's on CUDA takes 16 bits and no mask.  With
the log of a larger whole, their gradients are a part's.  None of torch's takes dropout of ours: `Dropping` does.

Source: torch, `_scaled_dot_product_ring_flash_attention` of torch.distributed.tensor.experimental, which calls the
kernels of CUDA so; aten/src/ATen/native/native_functions.yaml (signatures).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from parallelism.numerics.dropout import Drop, has_numba

HALVES = (torch.bfloat16, torch.float16)
LARGEST_HEAD = 256  # of FlashAttention, whose heads are multiples of 8
aten = torch.ops.aten


class OnCPU:
    """Shapes: as of `parallelism.sequence.partial_attention.attend`."""

    @staticmethod
    def takes(q: Tensor, k: Tensor, causal: bool, mask: Tensor | None) -> bool:
        return q.device.type == "cpu"

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        q, k, v = map(wide, (q, k, v))
        return aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, attn_mask=mask)

    @staticmethod
    def backward(
        gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, log: Tensor, causal: bool, mask: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = map(wide, (q, k, v))
        function = aten._scaled_dot_product_flash_attention_for_cpu_backward
        return function(gradient, q, k, v, out, log, 0.0, causal, attn_mask=mask)


class OnCUDA:
    """As many keys as queries where it is causal: the kernel lets the last of both meet, others the first."""

    @staticmethod
    def takes(q: Tensor, k: Tensor, causal: bool, mask: Tensor | None) -> bool:
        fits = q.shape[-1] % 8 == 0 and q.shape[-1] <= LARGEST_HEAD and (not causal or q.shape[2] == k.shape[2])
        return q.device.type == "cuda" and q.dtype in HALVES and mask is None and fits

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        out, log, *_ = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)
        return out, log

    @staticmethod
    def backward(
        gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, log: Tensor, causal: bool, mask: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        gradient, out = gradient.to(q.dtype), out.to(q.dtype)
        lengths = None, None, q.shape[2], k.shape[2]  # no sequences of several lengths in one
        dropout = q.new_zeros(2, dtype=torch.uint64), q.new_zeros((), dtype=torch.uint64)  # of which there is none
        function = aten._scaled_dot_product_flash_attention_backward
        return function(gradient, q, k, v, out, log, *lengths, 0.0, causal, *dropout)


@dataclass
class Dropping:
    """On the host, in float32: products of matrices by torch, and between them one pass over the probabilities."""

    drop: Drop

    @staticmethod
    def takes(q: Tensor, k: Tensor, causal: bool, mask: Tensor | None) -> bool:
        fits = q.dtype != torch.float64 and mask is None and (not causal or q.shape[2] == k.shape[2])
        return q.device.type == "cpu" and fits and has_numba()

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        from parallelism.numerics.pointwise_kernels import softmax

        q, k, v = map(wide, (q, k, v))
        with torch.autocast("cpu", enabled=False):
            scores, log = q @ k.transpose(-1, -2), q.new_empty(q.shape[:-1])
            softmax(rows_of(scores), *self.numbers(q, causal), log.view(-1).numpy())
            return scores @ v, log

    def backward(
        self,
        gradient: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        log: Tensor,
        causal: bool,
        mask: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        from parallelism.numerics.pointwise_kernels import softmax_backward

        q, k, v = map(wide, (q, k, v))
        p, ds, delta = q @ k.transpose(-1, -2), gradient @ v.transpose(-1, -2), (gradient * out).sum(-1)
        logs = (x.reshape(-1).numpy() for x in (log, delta))
        softmax_backward(rows_of(p), rows_of(ds), *self.numbers(q, causal), *logs)
        return ds @ k, ds.transpose(-1, -2) @ q, p.transpose(-1, -2) @ gradient

    def numbers(self, q: Tensor, causal: bool) -> tuple:
        """What the kernels take."""
        return *self.drop.numbers(np.float32), np.float32(1 / math.sqrt(q.shape[-1])), q.shape[2] if causal else 0


def kernel(
    q: Tensor, k: Tensor, causal: bool, mask: Tensor | None, drop: Drop | None
) -> type[OnCPU] | type[OnCUDA] | Dropping | None:
    """The one that takes these, if there is one."""
    able: list[Any] = [OnCPU, OnCUDA] if drop is None else [Dropping(drop)]
    return next((one for one in able if one.takes(q, k, causal, mask)), None)


def rows_of(x: Tensor) -> np.ndarray:
    return x.view(-1, x.shape[-1]).numpy()


def wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
