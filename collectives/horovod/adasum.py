"""Adasum: parallel gradients are averaged, and orthogonal ones are added.

Two gradients are combined to (1 - a.b / 2|a|^2) a + (1 - a.b / 2|b|^2) b; more than two pairwise, in a balanced tree of
ranks.

Source: Maleki et al., "Scaling Distributed Training with Adaptive Summation", 2020, equation 2 and section 4.2.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collectives.communicator import Communicator


def adasum_(comm: Communicator, x: Tensor) -> Tensor:
    """Combine every rank's `x` in place; all ranks get the same bits.  The number of ranks is a power of two.

    Cost: log2(p) (alpha + n beta).
    """
    theirs = torch.empty_like(x)
    distance = 1
    while distance < comm.size:
        peer = comm.rank ^ distance
        sent = comm.send(x, peer, blocking=False)
        comm.recv(theirs, peer)
        sent.wait()
        x.copy_(adaptive_sum(x, theirs) if comm.rank < peer else adaptive_sum(theirs, x))
        distance *= 2
    return x


def adaptive_sum(a: Tensor, b: Tensor) -> Tensor:
    """Return the adaptive sum of two vectors, computed in float64."""
    wide = a.double(), b.double()
    dot = (wide[0] * wide[1]).sum()
    return sum(((1 - dot / (2 * square)) * x if (square := x.square().sum()) else x for x in wide), torch.zeros(()))
