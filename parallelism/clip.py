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
def clip_grad_norm(parameters: Iterable[nn.Parameter], limit: float, tp: Communicator) -> float:
    """Scale gradients so that their global norm is at most `limit`; returns the norm before.  Collective over `tp`.

    What ranks have parts of is summed up over them; what each has the whole of counts once.
    """
    gradients = [(p.grad, hasattr(p, "shard")) for p in parameters if p.grad is not None]
    squares = np.zeros(2)  # of parts, of wholes
    for gradient, is_part in gradients:
        squares[0 if is_part else 1] += float(torch.linalg.vector_norm(gradient)) ** 2
    norm = float(np.sqrt(tp.all_reduce(squares[:1].copy())[0] + squares[1]))
    scale = limit / (norm + 1e-6)  # as torch.nn.utils.clip_grad_norm_ has it
    if scale < 1:
        for gradient, _ in gradients:
            gradient.mul_(scale)
    return norm
