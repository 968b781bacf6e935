"""Exact arithmetic: powers of two, largest absolute values, and sums of squares as integers, which have no order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from collectives.runtime.backends.compiler import load

BIAS = 1023  # of the exponents of float64


def kernels() -> Any:
    """Return the module of compiled kernels, or None where Numba cannot be used."""
    return load("parallelism.numerics.exact_kernels").module


def bits_of(x: np.ndarray) -> tuple[np.ndarray, np.signedinteger]:
    """Return floating-point numbers as integers, and the mask of all bits but the sign's."""
    bits = x.view(f"i{x.itemsize}")
    return bits, bits.dtype.type(np.iinfo(bits.dtype).max)


def of_bits(bits: int, dtype: np.dtype) -> float:
    """Return the floating-point number with these bits.

    >>> of_bits(bits_of(np.float32([-1.5]))[0][0], np.dtype("float32"))
    -1.5
    """
    return float(np.array(bits, f"i{dtype.itemsize}").view(dtype))


def highest(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return the largest absolute value of each flat tensor, or NaN if it has one, in float64."""
    if device.type == "cpu" and kernels():
        arrays = [tensor.numpy() for tensor in tensors]
        return torch.tensor([of_bits(kernels().peak(*bits_of(x)), x.dtype) for x in arrays], dtype=torch.float64)
    peaks = [tensor.abs().amax() if len(tensor) else tensor.new_zeros(()) for tensor in tensors]
    return torch.stack(peaks).double() if peaks else torch.zeros(0, dtype=torch.float64, device=device)


def sum_of_squares(tensors: Sequence[Tensor], scale: Tensor, bits: int) -> Tensor:
    """Return the sum of the squares of all elements times `scale`, each square rounded to an integer, in two integers.

    The sum is the first times 2**bits, plus the second.
    """
    sums = torch.zeros(2, dtype=torch.int64, device=scale.device)
    for tensor in tensors:
        if scale.device.type == "cpu" and kernels():
            sums += torch.tensor(kernels().squares(tensor.numpy(), scale.item(), bits))
        else:
            squares = (tensor.double() * scale).square_().round_().long()
            sums += torch.stack([(squares >> bits).sum(), (squares & ((1 << bits) - 1)).sum()])
    return sums


def power_of_two(exponents: Tensor) -> Tensor:
    """Return 2 to the power of integers, exactly.

    >>> power_of_two(torch.tensor([-2, 0, 10])).tolist()
    [0.25, 1.0, 1024.0]
    """
    return ((exponents + BIAS) << 52).view(torch.float64)
