"""Which tokens of a sequence each rank holds, so that under a causal mask all have as much to do."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

ORDERS = ("zigzag", "striped", "contiguous")


class Pair(NamedTuple):
    """Queries of one rank that attend to keys of another: slices of what each holds; `causal` within them."""

    queries: slice
    keys: slice
    causal: bool


class TokenShards(NamedTuple):
    """A sequence of `length` tokens over a ring of ranks, each of them `parts` ranks that divide its tokens evenly.

    zigzag: of 2 ring chunks, rank r has chunks r and 2 ring - 1 - r.  striped: rank r has every ring-th token from r.
    contiguous: rank r has chunk r of ring; under a causal mask the last one has most to do.

    Source: Brandon et al., "Striped Attention", 2023, arXiv 2311.09431; zigzag: zhuzilin/ring-flash-attention, issue 2.

    >>> [TokenShards(8, 2, 1, "zigzag").positions(rank).tolist() for rank in (0, 1)]
    [[0, 1, 6, 7], [2, 3, 4, 5]]
    >>> [TokenShards(8, 2, 2, "striped").positions(rank).tolist() for rank in range(4)]
    [[0, 2], [4, 6], [1, 3], [5, 7]]
    """

    length: int
    ring: int
    parts: int = 1
    order: str = "zigzag"

    def check(self) -> None:
        """Raises: ValueError for a length that ranks cannot share evenly, with the nearest one that they can."""
        if self.order not in ORDERS:
            raise ValueError(f"order {self.order!r} is unknown: use {', '.join(ORDERS)}")
        least = 2 * self.ring if self.order == "zigzag" and self.ring > 1 else self.ring
        unit = int(np.lcm(least, self.ring * self.parts))
        if self.length % unit:
            nearest = max(1, round(self.length / unit)) * unit
            raise ValueError(
                f"a sequence of {self.length} tokens can't be split over sp={self.ring * self.parts} ranks in "
                f"{self.order} order: use a multiple of {unit}, such as {nearest}"
            )

    def positions(self, rank: int) -> np.ndarray:
        """Where in the sequence the tokens of a rank stand, in the order in which it holds them."""
        member, part = divmod(rank, self.parts)
        return np.split(self.of_ring(member), self.parts)[part]

    def of_ring(self, member: int) -> np.ndarray:
        tokens = np.arange(self.length)
        if self.ring == 1:
            return tokens
        if self.order == "striped":
            return tokens[member :: self.ring]
        if self.order == "contiguous":
            return np.split(tokens, self.ring)[member]
        chunks = np.split(tokens, 2 * self.ring)
        return np.concatenate([chunks[member], chunks[-1 - member]])

    def pair(self, member: int, source: int) -> Pair | None:
        """What of a ring member's tokens attends to what of another's, under a causal mask; None for nothing."""
        half, everything = self.length // self.ring // 2, slice(None)
        if member == source:
            return Pair(everything, everything, causal=True)
        if self.order == "striped":
            if source < member:
                return Pair(everything, everything, causal=True)
            return Pair(slice(1, None), slice(None, -1), causal=True)
        if self.order == "contiguous":
            return Pair(everything, everything, causal=False) if source < member else None
        if source < member:
            return Pair(everything, slice(None, half), causal=False)
        return Pair(slice(half, None), everything, causal=False)
