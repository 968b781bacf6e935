"""Compiled pointwise operations on the CPU: GELU, gates and rotations in one pass each, forward and backward.

Torch's own take several times as long in float32 on few threads, and save more for the backward pass.  Norms are left
to torch, which computes them at nearly memory bandwidth.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from parallelism.numerics.dropout import kernels

MOST_THREADS = 4  # with more, torch's own multithreaded kernels are faster


def takes(x: Tensor) -> bool:
    """Return whether the compiled code supports a tensor."""
    fits = x.dtype == torch.float32 and x.device.type == "cpu" and x.numel() > 0
    return fits and torch.get_num_threads() <= MOST_THREADS and bool(kernels())


class GELUFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(x)
        return mapped(kernels().gelu, x)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return mapped(kernels().gelu_backward, x, gradient)


class GateFunction(torch.autograd.Function):
    """Saves only its input, of any dtype and device."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(x)
        if not takes(x):
            gates, passing = x.chunk(2, dim=-1)
            return F.silu(gates) * passing
        out = torch.empty((*x.shape[:-1], x.shape[-1] // 2))
        kernels().gate(rows(x), rows(out))
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        if not takes(x):
            gates, passing = x.chunk(2, dim=-1)
            of_gates = torch.ops.aten.silu_backward(gradient * passing, gates)
            return torch.cat((of_gates, gradient * F.silu(gates)), dim=-1)
        out = torch.empty(x.shape)
        kernels().gate_backward(rows(x), rows(gradient), rows(out))
        return out


class RotationFunction(torch.autograd.Function):
    """Splits heads (batch, seq, heads, head_size) into three groups of `counts` heads, and rotates the first two."""

    @staticmethod
    def forward(ctx, heads: Tensor, cos: Tensor, sin: Tensor, counts: list[int]):  # type: ignore[override]
        ctx.save_for_backward(cos, sin)
        ctx.counts, first = counts, 0
        parts = [torch.empty((*heads.shape[:2], count, heads.shape[3])) for count in counts]
        for part, count in zip(parts[:2], counts, strict=False):
            kernels().rotate(tokens(heads), first, rows(cos), rows(sin), tokens(part), 0, count)
            first += count
        parts[2].copy_(heads[:, :, first:])
        return tuple(parts)

    @staticmethod
    @once_differentiable
    def backward(ctx, *gradients: Tensor) -> Any:  # type: ignore[override]
        cos, sin = ctx.saved_tensors
        batch, seq, _, size = gradients[0].shape
        out, first = torch.empty((batch, seq, sum(ctx.counts), size)), 0
        for gradient, count in zip(gradients[:2], ctx.counts, strict=False):
            kernels().rotate(tokens(gradient), 0, rows(cos), rows(-sin), tokens(out), first, count)
            first += count
        out[:, :, first:] = gradients[2]
        return out, None, None, None


def mapped(kernel: Any, x: Tensor, *more: Tensor) -> Tensor:
    """Return a new tensor with what a kernel writes, given the elements in the order in which x has them in memory."""
    strides = x.stride()
    order = sorted(range(x.dim()), key=lambda dim: -strides[dim])
    out = torch.empty([x.shape[dim] for dim in order])
    kernel(*(flat(each.permute(order)) for each in (x, *more)), flat(out))
    return out.permute(sorted(range(x.dim()), key=order.__getitem__))


def flat(x: Tensor) -> Any:
    return x.detach().contiguous().view(-1).numpy()


def rows(x: Tensor) -> Any:
    return x.detach().contiguous().view(-1, x.shape[-1]).numpy()


def tokens(x: Tensor) -> Any:
    return x.detach().contiguous().view(-1, *x.shape[2:]).numpy()
