"""Dropout whose masks are the same on any layout: each element's depends on what it is, not on who draws it.

A random number is a hash of the seed, the layer, the sample, the token's place in it, and the place in the vector; of
attention's probabilities, of the head and both tokens' places.

Source: Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", 2011 (numbers from counters); Steele, Lea and
Flood, "Fast Splittable Pseudorandom Number Generators", 2014, figure 17 (the mixing function).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

GAMMA, FIRST, SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
BITS = 24  # of a random number


@dataclass
class BatchPosition:
    """Which samples and tokens of the whole batch a rank computes; set by whoever gives it the batch.

    `samples` are numbers that no other sample of the run has, (batch); `positions` the tokens' places in the sequence,
    (seq), or None for all.
    """

    seed: int = 0
    samples: Tensor | None = None
    positions: Tensor | None = None


class Dropout(nn.Module):
    """Takes the place of the dropout number `layer` of a model.

    Of x (batch, seq, width), a rank may have the tokens from `first_token(seq)` on of those in `place`; of attention's
    heads, those from `first_head(heads)` on.
    """

    def __init__(self, p: float, layer: int, place: BatchPosition, rank: int = 0, split_sequence: bool = False):
        super().__init__()
        self.p, self.layer, self.place, self.rank, self.split_sequence = p, layer, place, rank, split_sequence

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return x
        positions = self.positions(x.shape[1] * (self.rank + 1), x.device)
        first = self.rank * x.shape[1] if self.split_sequence else 0
        numbers = self.of_samples(x.shape[0], x.device)[:, None, None]  # (batch, 1, 1)
        numbers = mix(numbers, positions[first : first + x.shape[1], None])  # (batch, seq, 1)
        numbers = mix(numbers, torch.arange(x.shape[2], device=x.device))  # (batch, seq, width)
        return x * self.keep(numbers, x.dtype)

    def of_attention(self, q: Tensor, queries: Tensor, keys: Tensor) -> Tensor | None:
        """What multiplies the probabilities with which tokens at some positions attend to others.

        Shapes: q (batch, n_head, ...); result (batch, n_head, queries, keys).
        """
        if not self.training or self.p == 0:
            return None
        heads = torch.arange(q.shape[1], device=q.device) + self.rank * q.shape[1]
        numbers = mix(self.of_samples(q.shape[0], q.device)[:, None], heads)  # (batch, n_head)
        numbers = mix(numbers[..., None, None], queries[:, None])  # (batch, n_head, queries, 1)
        return self.keep(mix(numbers, keys), torch.promote_types(q.dtype, torch.float32))

    def positions(self, length: int, device: torch.device) -> Tensor:
        held = self.place.positions
        return torch.arange(length, device=device) if held is None else held.to(device)

    def of_samples(self, batch: int, device: torch.device) -> Tensor:
        samples = torch.arange(batch) if self.place.samples is None else self.place.samples
        key = mix(mix(torch.tensor(self.place.seed), torch.tensor(self.layer)), samples.long())
        return key.to(device)

    def keep(self, numbers: Tensor, dtype: torch.dtype) -> Tensor:
        least = int(self.p * (1 << BITS))
        kept = (numbers >> (64 - BITS)) & ((1 << BITS) - 1) >= least
        return kept.to(dtype) / (1 - self.p)


def mix(key: Tensor, number: Tensor) -> Tensor:
    """A hash of both: 64 bits, of which each depends on all of theirs."""
    x = key * signed(GAMMA) + number
    x = (x ^ shifted(x, 30)) * signed(FIRST)
    x = (x ^ shifted(x, 27)) * signed(SECOND)
    return x ^ shifted(x, 31)


def shifted(x: Tensor, bits: int) -> Tensor:
    """To the right, zeros coming in."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def signed(number: int) -> int:
    return number - (1 << 64) if number >> 63 else number
