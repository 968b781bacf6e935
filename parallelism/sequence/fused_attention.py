"""Torch's fused kernels for attention, of those that give the log of the sum, too, and take it to go backwards.

That of the CPU computes in float32 or float64 and adds masks; FlashAttention's on CUDA takes 16 bits and no mask.  With
the log of a larger whole, their gradients are a part's.

Source: torch, `_scaled_dot_product_ring_flash_attention` of torch.distributed.tensor.experimental, which calls the
kernels of CUDA so; aten/src/ATen/native/native_functions.yaml (signatures).
"""

from __future__ import annotations

import torch
from torch import Tensor

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


def kernel(
    q: Tensor, k: Tensor, causal: bool, mask: Tensor | None, keep: Tensor | None
) -> type[OnCPU] | type[OnCUDA] | None:
    """The one that takes these; none drops the probabilities that `keep` says."""
    return next((one for one in (OnCPU, OnCUDA) if keep is None and one.takes(q, k, causal, mask)), None)


def wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
