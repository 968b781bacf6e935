"""Gradient clipping by the global norm, which is bitwise identical in all layouts that have the same gradients.

Squares are rounded to multiples of a power of two and added as integers, whose order is irrelevant.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b

import numpy as np
import torch
from torch import Tensor, nn

import collectives
from parallelism.buffers.tensor_collectives import ExposedTime
from parallelism.mesh import Mesh
from parallelism.numerics.exact import LARGEST, highest, power_of_two, sum_of_squares
from parallelism.numerics.master_weights import MasterWeights, scale_all
from parallelism.placement import shards_of

BITS = 24  # of the largest element that is squared; two integers hold the sum of squares of 2**39 elements


class GradientClip(ExposedTime):
    """Scales the gradients of `masters` so that their global norm is at most `limit`, without a host synchronization.

    They are the gradients of `model`, which is distributed over `mesh` by its parameters' placements and by stages.
    Ranks that hold the same elements share the work.  `tied` lists the names of each tied parameter in the whole model.
    Construction is collective.
    """

    def __init__(
        self,
        limit: float,
        model: nn.Module,
        masters: MasterWeights,
        mesh: Mesh,
        tied: Iterable[Sequence[str]] = (),
        device: str = "cpu",
    ):
        self.limit, self.masters = limit, masters
        params = {name: p for name, p in model.named_parameters() if name in masters.pieces}
        self.parts = dict(zip(params, numbered(mesh.comm, keys(params, masters.spans, mesh, tied)), strict=True))
        self.highest = torch.zeros((), dtype=torch.float64, device=device)
        self.agree = mesh.comm.plan("all_reduce", self.highest.view(torch.int64), op="max")  # of bits, NaN the largest
        self.sums = torch.zeros(2, dtype=torch.int64, device=device)
        self.add_up = mesh.comm.plan("all_reduce", self.sums)

    @torch.no_grad()
    def __call__(self) -> Tensor:
        """Scale the gradients; return the norm before scaling, on their device.  Collective."""
        gradients = {name: piece.grad for name, piece in self.masters.pieces.items() if piece.grad is not None}
        own = [part(gradient.reshape(-1), *self.parts[name]) for name, gradient in gradients.items()]
        self.names, self.peaks = [*gradients], highest(own, self.highest.device)
        self.highest.copy_(self.peaks.amax() if own else torch.zeros(()))
        with self.waiting():
            self.agree()
        scale = power_of_two((BITS - torch.frexp(self.highest).exponent.long()).clamp(max=LARGEST))
        self.sums.copy_(sum_of_squares(own, scale, BITS))
        with self.waiting():
            self.add_up()
        is_finite, (high, low) = self.highest.isfinite(), self.sums.double()
        squares = torch.where(is_finite, high * 2.0**BITS + low, 0)
        norm = torch.where(is_finite, square_root(squares) / scale, self.highest)
        if gradients and self.limit < math.inf:
            scale = torch.full_like(norm, self.limit) / (norm + 1e-6)  # epsilon of torch.nn.utils.clip_grad_norm_
            scale_all([*gradients.values()], torch.where(scale < 1, scale, 1.0))  # with a NaN, 1
        return norm

    def take(self, device: torch.device) -> tuple[list[str], Tensor]:
        """Return the parameters' names in the order of the backward pass, and whether each gradient is finite.

        As a `GradientMonitor`, but without a pass of its own, after the latest call, on a single rank.
        """
        return self.names[::-1], self.peaks.isfinite().flip(0)


def part(flat: Tensor, number: int, count: int) -> Tensor:
    """Return one of `count` parts of a flat tensor."""
    length = len(flat)
    return flat[length * number // count : length * (number + 1) // count]


def keys(
    params: Mapping[str, nn.Parameter], spans: Mapping[str, slice], mesh: Mesh, tied: Iterable[Sequence[str]]
) -> np.ndarray:
    """Return a 64-bit hash of each parameter's name, of this rank's shard of it, and of its span in that."""
    first = {name: names[0] for names in tied for name in names}
    texts = [
        [first.get(name, name), *(mesh.coords[axis] for axis in shards_of(p)), spans[name].start, spans[name].stop]
        for name, p in params.items()
    ]
    digests = [blake2b(repr(text).encode(), digest_size=8).digest() for text in texts]
    return np.array([int.from_bytes(digest, "big", signed=True) for digest in digests], np.int64)


def numbered(comm: collectives.Communicator, keys: np.ndarray) -> list[tuple[int, int]]:
    """Return for each key how many earlier ones, also of lower ranks, equal it, and how many in all.  Collective."""
    counts = comm.all_gather(np.array([len(keys)])).tolist()
    every = comm.all_gather(keys, counts=counts).tolist()
    start = sum(counts[: comm.rank])
    before, total = Counter(every[:start]), Counter(every)
    result = []
    for key in keys.tolist():
        result.append((before[key], total[key]))
        before[key] += 1
    return result


def square_root(x: Tensor) -> Tensor:
    """Compute the square root in place, rounded to nearest.

    Torch's square root on the CPU, from MKL, may be off by one unit in the last place, depending on the CPU.
    """
    if x.is_cuda:
        return x.sqrt_()
    np.sqrt(x.numpy(), out=x.numpy())
    return x
