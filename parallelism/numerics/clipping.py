"""Clipping of gradients by their global norm, over ranks that hold parts of parameters."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from parallelism.placement import shards_of

if TYPE_CHECKING:
    from collectives import Communicator


class GradientClip:
    """Scales gradients so that their global norm is at most `limit`, without a look at it on the host.

    What the ranks of `tp` have parts of is summed up over them; what each has the whole of counts once.  Ranks of `pp`
    have parameters of their own, but for those marked `is_copy`, which others have, too.  Ranks of `shard`
    have pieces of parameters each.  Making one is collective.
    """

    def __init__(
        self,
        limit: float,
        tp: Communicator,
        pp: Communicator | None = None,
        shard: Communicator | None = None,
        device: str = "cpu",
    ):
        self.limit = limit
        self.squares = torch.zeros(2, dtype=torch.float64, device=device)  # of parts, of wholes
        sums = (shard, self.squares), (tp, self.squares[:1]), (pp, self.squares)
        self.plans = [comm.plan("all_reduce", x) for comm, x in sums if comm is not None]

    @torch.no_grad()
    def __call__(self, parameters: Iterable[nn.Parameter]) -> Tensor:
        """Scale the parameters' gradients; returns the norm before, on their device.  Collective."""
        gradients = {p: p.grad for p in parameters if p.grad is not None}
        counted = [p for p in gradients if not getattr(p, "is_copy", False)]
        self.squares.zero_()
        for index, is_part in enumerate((True, False)):
            if own := [gradients[p] for p in counted if bool(shards_of(p)) == is_part]:
                self.squares[index] = sum_of_squares(own)
        for plan in self.plans:
            plan()
        norm = square_root(self.squares.sum())
        if gradients and self.limit < math.inf:
            scale = torch.full_like(norm, self.limit) / (norm + 1e-6)  # as torch.nn.utils.clip_grad_norm_ has it
            scale_all(list(gradients.values()), torch.where(scale < 1, scale, 1.0))  # a NaN scales nothing
        return norm


def sum_of_squares(tensors: list[Tensor]) -> Tensor:
    """In float64, tensor by tensor: in one order on any CPU."""
    return torch.stack(torch._foreach_norm(tensors)).double().square().cumsum(0)[-1]


def square_root(x: Tensor) -> Tensor:
    """In place, and rounded to nearest: torch's own on the CPU, MKL's, may be the neighbour, as the CPU has it."""
    if x.is_cuda:
        return x.sqrt_()
    np.sqrt(x.numpy(), out=x.numpy())
    return x


def scale_all(tensors: list[Tensor], factor: Tensor) -> None:
    """Multiply tensors of one dtype in place: on a GPU by few kernels where the factor is of that dtype."""
    torch._foreach_mul_(tensors, factor.to(torch.promote_types(tensors[0].dtype, torch.float32)))
