"""Clipping of gradients by their global norm, over ranks that hold parts of parameters."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn

if TYPE_CHECKING:
    from collectives import Communicator


@torch.no_grad()
def clip_grad_norm(
    parameters: Iterable[nn.Parameter],
    limit: float,
    tp: Communicator,
    pp: Communicator | None = None,
    shard: Communicator | None = None,
) -> float:
    """Scale gradients so that their global norm is at most `limit`; returns the norm before.  Collective.

    What the ranks of `tp` have parts of is summed up over them; what each has the whole of counts once.  Ranks of `pp`
    have parameters of their own, but for those marked `is_copy`, which others have, too.  Ranks of `shard`
    have pieces of parameters each.
    """
    gradients = {p: p.grad for p in parameters if p.grad is not None}
    squares = np.zeros(2)  # of parts, of wholes
    counted = [p for p in gradients if not getattr(p, "is_copy", False)]
    for p, norm in zip(counted, norms([gradients[p] for p in counted]), strict=True):
        squares[0 if hasattr(p, "shard") else 1] += norm * norm
    if shard is not None:
        shard.all_reduce(squares)
    squares[:1] = tp.all_reduce(squares[:1].copy())
    if pp is not None:
        pp.all_reduce(squares)
    norm = float(np.sqrt(squares.sum()))
    scale = limit / (norm + 1e-6)  # as torch.nn.utils.clip_grad_norm_ has it
    if gradients and scale < 1:
        torch._foreach_mul_(list(gradients.values()), scale)
    return norm


def norms(gradients: list[torch.Tensor]) -> list[float]:
    """Each one's, read from a device at once, as reading waits for it."""
    return torch.stack([torch.linalg.vector_norm(gradient) for gradient in gradients]).tolist() if gradients else []
