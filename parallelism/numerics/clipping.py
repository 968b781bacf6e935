"""Gradient clipping by the global norm, which is bitwise identical in all layouts that have the same gradients.

Squares are rounded to multiples of a power of two and added as integers, whose order is irrelevant.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import collectives
from collectives.runtime.backends.compiler import load
from parallelism.buffers.tensor_collectives import ExposedTime
from parallelism.buffers.transfer import to_device
from parallelism.mesh import Mesh
from parallelism.numerics.device_squares import add_squares, table_of
from parallelism.numerics.master_weights import MasterWeights, scale_all
from parallelism.placement import shards_of

LARGEST = BIAS = 1023  # exponent of float64, and what is added to each
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


def kernels() -> Any:
    """Return the module of compiled kernels, or None where Numba cannot be used."""
    return load("parallelism.numerics.exact_kernels").module


def bits_of(x: np.ndarray) -> tuple[np.ndarray, np.signedinteger]:
    """Return floating-point numbers as integers, and the mask of all bits but the sign's."""
    bits = x.view(f"i{x.itemsize}")
    return bits, bits.dtype.type(np.iinfo(bits.dtype).max)


def from_bits(bits: int, dtype: np.dtype) -> float:
    """Return the floating-point number with these bits.

    >>> from_bits(bits_of(np.float32([-1.5]))[0][0], np.dtype("float32"))
    -1.5
    """
    return float(np.array(bits, f"i{dtype.itemsize}").view(dtype))


def highest(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return the largest absolute value of each flat tensor, or NaN if it has one, in float64."""
    if device.type == "cpu" and kernels():
        arrays = [tensor.numpy() for tensor in tensors]
        return torch.tensor([from_bits(kernels().peak(*bits_of(x)), x.dtype) for x in arrays], dtype=torch.float64)
    if not tensors:
        return torch.zeros(0, dtype=torch.float64, device=device)
    filled = [tensor if len(tensor) else tensor.new_zeros(1) for tensor in tensors]
    return torch.stack(torch._foreach_norm(filled, math.inf)).double()  # on a GPU, one kernel for many tensors


def sum_of_squares(tensors: Sequence[Tensor], scale: Tensor, bits: int) -> Tensor:
    """Return the sum of the squares of all elements times `scale`, each square rounded to an integer, in two integers.

    The sum is the first times 2**bits, plus the second.
    """
    sums = torch.zeros(2, dtype=torch.int64, device=scale.device)
    if scale.device.type == "cpu" and kernels():
        for tensor in tensors:
            sums += torch.tensor(kernels().squares(tensor.numpy(), scale.numpy()[()], bits))
    elif scale.is_cuda and tensors:
        with torch.cuda.device(scale.device):
            add_on_device(tensors, scale, bits, sums)
    else:
        add_by_torch(tensors, scale, bits, sums)
    return sums


def add_by_torch(tensors: Sequence[Tensor], scale: Tensor, bits: int, sums: Tensor) -> None:
    """Add the sum of the squares to `sums`."""
    for tensor in tensors:
        squares = (tensor.double() * scale).square_().round_().long()
        sums += torch.stack([(squares >> bits).sum(), (squares & ((1 << bits) - 1)).sum()])


def add_on_device(tensors: Sequence[Tensor], scale: Tensor, bits: int, sums: Tensor) -> None:
    """Add the sum of the squares to `sums` by one kernel, on torch's current stream."""
    counts = [len(tensor) for tensor in tensors]
    table = to_device(torch.from_numpy(table_of([tensor.data_ptr() for tensor in tensors], counts)), scale.device)
    dtype, stream = str(tensors[0].dtype).removeprefix("torch."), torch.cuda.current_stream(scale.device).cuda_stream
    add_squares(table.data_ptr(), counts, dtype, scale.data_ptr(), bits, sums.data_ptr(), stream)


def power_of_two(exponents: Tensor) -> Tensor:
    """Return 2 to the power of integers, exactly.

    >>> power_of_two(torch.tensor([-2, 0, 10])).tolist()
    [0.25, 1.0, 1024.0]
    """
    return ((exponents + BIAS) << 52).view(torch.float64)


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
