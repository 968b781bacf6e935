"""Layout-independent dropout: masks depend on an element's global position, not on the rank that holds it.

A hash of its row and column decides if an element is kept.  A row has a 64-bit key, a hash of the seed, the layer, the
sample and the token's position; for attention probabilities, of the head, too.  Columns are positions in the vector, or
the tokens attended to.  No mask is stored: the backward pass hashes again.

Source: Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", 2011 (numbers from counters); Steele, Lea and
Flood, "Fast Splittable Pseudorandom Number Generators", 2014, figure 17 (the mixing function of 64 bits); Appleby,
MurmurHash3, 2011, `fmix32` (that of 32 bits, which vector units multiply at once).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from collectives.runtime.backends.compiler import load

GAMMA, FIRST, SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
SHORT_GAMMA, SHORT_FIRST, SHORT_SECOND = 0x9E3779B1, 0x85EBCA6B, 0xC2B2AE35
COMPILED = (torch.float32, torch.float64)  # dtypes of the compiled kernels


@dataclass
class BatchPosition:
    """Samples and tokens of the global batch that a rank computes; updated with each batch.

    `samples` are numbers unique in the run, (batch); `positions` the tokens' positions in the sequence, (seq), or None
    for all.
    """

    seed: int = 0
    samples: Tensor | None = None
    positions: Tensor | None = None


class Dropout(nn.Module):
    """Replaces the dropout number `layer` of a model.

    With `split_sequence`, x (batch, seq, width) is the `rank`-th of consecutive shards of the tokens in `position`;
    heads of attention are always sharded by `rank`.
    """

    def __init__(self, p: float, layer: int, position: BatchPosition, rank: int = 0, split_sequence: bool = False):
        super().__init__()
        self.p, self.layer, self.position, self.rank, self.split_sequence = p, layer, position, rank, split_sequence

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return x
        batch, seq, _ = x.shape
        first = self.rank * seq if self.split_sequence else 0
        positions = torch.arange(first + seq) if self.position.positions is None else self.position.positions
        rows = mix(self.sample_keys(batch, x.device)[:, None], positions[first : first + seq].to(x.device))
        return DropFunction.apply(x, rows, self.p)

    def attention(self, q: Tensor) -> AttentionDropout | None:
        """Return the dropout of this batch's attention probabilities, or None.  Shapes: q (batch, n_head, ...)."""
        if not self.training or self.p == 0:
            return None
        heads = torch.arange(q.shape[1], device=q.device) + self.rank * q.shape[1]
        return AttentionDropout(mix(self.sample_keys(q.shape[0], q.device)[:, None], heads), self.p)

    def sample_keys(self, batch: int, device: torch.device) -> Tensor:
        samples = torch.arange(batch) if self.position.samples is None else self.position.samples
        return mix(self.key, samples.long()).to(device)

    @cached_property
    def key(self) -> Tensor:
        return mix(torch.tensor(self.position.seed), torch.tensor(self.layer))


class DropFunction(torch.autograd.Function):
    """Drops elements of x (..., width) by the keys of its rows, (...); saves only the keys."""

    @staticmethod
    def forward(ctx, x: Tensor, rows: Tensor, p: float) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(rows)
        ctx.p = p
        return Drop(rows, torch.arange(x.shape[-1], device=x.device), p)(x)

    @staticmethod
    def backward(ctx, gradient: Tensor):  # type: ignore[override]
        (rows,) = ctx.saved_tensors
        return Drop(rows, torch.arange(gradient.shape[-1], device=gradient.device), ctx.p)(gradient), None, None


class AttentionDropout(NamedTuple):
    """Drops attention probabilities, by the keys of samples and heads."""

    of_heads: Tensor  # (batch, n_head)
    p: float

    def between(self, queries: Tensor, keys: Tensor) -> Drop:
        """Return the dropout for attention between tokens at these positions.  Shapes: (queries) and (keys)."""
        return Drop(mix(self.of_heads[..., None], queries), keys, self.p)


class Drop(NamedTuple):
    """Drops elements by the 64-bit keys of their rows, (...), and columns, (width)."""

    rows: Tensor
    columns: Tensor
    p: float

    def __call__(self, x: Tensor) -> Tensor:
        """Set each element of x (..., width) to 0 with probability `p`, and divide the others by 1 - p."""
        if x.device.type == "cpu" and x.dtype in COMPILED and kernels():
            out = torch.empty(x.shape, dtype=x.dtype)
            flat = [tensor.detach().reshape(-1, x.shape[-1]).numpy() for tensor in (x, out)]
            kernels().drop(flat[0], *self.numbers(flat[0].dtype.type), flat[1])
            return out
        mask = short_hash(self.rows, self.columns) ^ -(1 << 31) >= self.least - (1 << 31)  # unsigned comparison
        wide = torch.promote_types(x.dtype, torch.float32)
        return (x * (mask.to(wide) * (1 / (1 - self.p)))).to(x.dtype)

    @property
    def least(self) -> int:
        """Smallest hash of an element that is kept."""
        return int(self.p * (1 << 32))

    def numbers(self, number: type) -> tuple:
        """Return the compiled kernels' arguments."""
        return self.rows.reshape(-1).numpy(), self.columns.numpy(), self.least, number(1 / (1 - self.p))


def kernels() -> Any:
    """Return the module of compiled kernels, or None where Numba cannot be used."""
    return load("parallelism.numerics.pointwise_kernels").module


def mix(key: Tensor, number: Tensor) -> Tensor:
    """Return a 64-bit hash of a key and a number."""
    x = key * signed(GAMMA, 64) + number
    x = (x ^ shifted(x, 30, 64)) * signed(FIRST, 64)
    x = (x ^ shifted(x, 27, 64)) * signed(SECOND, 64)
    return x ^ shifted(x, 31, 64)


def short_hash(rows: Tensor, columns: Tensor) -> Tensor:
    """Return a 32-bit hash of each row's key and column, equal to that of `pointwise_kernels.stays`."""
    low, high = (part.to(torch.int32)[..., None] for part in (rows, rows >> 32))
    x = columns.to(torch.int32) * signed(SHORT_GAMMA, 32) + low
    x = (x ^ shifted(x, 16, 32)) * signed(SHORT_FIRST, 32) ^ high
    x = (x ^ shifted(x, 13, 32)) * signed(SHORT_SECOND, 32)
    return x ^ shifted(x, 16, 32)


def shifted(x: Tensor, bits: int, width: int) -> Tensor:
    """Shift right logically, filling with zeros."""
    return (x >> bits) & ((1 << (width - bits)) - 1)


def signed(number: int, width: int) -> int:
    return number - (1 << width) if number >> (width - 1) else number
