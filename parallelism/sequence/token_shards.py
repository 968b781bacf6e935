"""Token shards: assign a sequence's tokens to ranks so that work is balanced under a causal mask.

Training and the planner check here if a number of ranks can divide tokens and heads.
"""

from typing import NamedTuple

import numpy as np

from parallelism.mesh import divisors, listed_divisors

MODES = ("ring", "ulysses", "hybrid")
ORDERS = ("zigzag", "striped", "contiguous")


class Pair(NamedTuple):
    """Queries of one rank that attend to keys of another: slices of their tokens, and whether the pair is `causal`."""

    queries: slice
    keys: slice
    causal: bool


class TokenShards(NamedTuple):
    """A sequence of `length` tokens over a ring, each member of which is `parts` ranks that divide its tokens evenly.

    zigzag: of 2 ring chunks, rank r has chunks r and 2 ring - 1 - r.  striped: rank r has every ring-th token from r.
    contiguous: rank r has chunk r of ring; under a causal mask the last one has the most work.

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
        """Raise ValueError if ranks cannot divide the length evenly, with the nearest valid one."""
        if self.order not in ORDERS:
            raise ValueError(f"order {self.order!r} is unknown: use {', '.join(ORDERS)}")
        unit = self.unit
        if self.length % unit:
            nearest = max(1, round(self.length / unit)) * unit
            raise ValueError(
                f"a sequence of {self.length} tokens can't be split over sp={self.ring * self.parts} ranks in "
                f"{self.order} order: use a multiple of {unit}, such as {nearest}"
            )

    @property
    def unit(self) -> int:
        """Number of tokens, or of consecutive parts of a sequence, of which ranks can divide any multiple evenly."""
        least = 2 * self.ring if self.order == "zigzag" and self.ring > 1 else self.ring
        return int(np.lcm(least, self.ring * self.parts))

    def positions(self, rank: int) -> np.ndarray:
        """Return the positions of a rank's tokens in the sequence, in local order."""
        member, part = divmod(rank, self.parts)
        return np.split(self.ring_positions(member), self.parts)[part]  # (length / (ring x parts))

    def ring_positions(self, member: int) -> np.ndarray:
        tokens = np.arange(self.length)
        if self.ring == 1:
            return tokens
        if self.order == "striped":
            return tokens[member :: self.ring]
        if self.order == "contiguous":
            return np.split(tokens, self.ring)[member]  # (length / ring)
        chunks = np.split(tokens, 2 * self.ring)  # 2 ring of (length / (2 ring))
        return np.concatenate([chunks[member], chunks[-1 - member]])  # (length / ring)

    def pair(self, member: int, source: int) -> Pair | None:
        """Return which tokens of a ring member attend to which tokens of another under a causal mask, or None."""
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


def shard_tokens(length: int, size: int, mode: str, order: str, head_ranks: int | None) -> TokenShards:
    """Assign the tokens of a sequence to `size` ranks; raise as `head_ranks_of` and `TokenShards.check` do."""
    parts = head_ranks_of(mode, size, head_ranks)
    shards = TokenShards(length, size // parts, parts, order)
    shards.check()
    return shards


def check_parts(parts: int, shards: TokenShards) -> None:
    """Raise ValueError if ranks cannot hold whole parts of a sequence, with the nearest number that they can."""
    length, unit, size = shards.length, shards.unit, shards.ring * shards.parts
    if shards.order == "striped" and shards.ring > 1:
        raise ValueError(
            f"sp_order=striped gives no rank consecutive tokens, as the {parts} sequence_parts are: use zigzag or "
            "contiguous"
        )
    if parts % unit or length % parts:
        nearest = min((able for able in divisors(length) if able % unit == 0), key=lambda able: abs(able - parts))
        why = f"be a multiple of {unit} for sp={size} ranks in {shards.order} order"
        raise ValueError(
            f"sequence_parts={parts} must {why if parts % unit else f'divide block_size={length}'}: use {nearest}"
        )


def head_ranks_of(mode: str, size: int, head_ranks: int | None) -> int:
    """Return the number of ranks that exchange heads; rings run across these groups.

    >>> head_ranks_of("ring", 8, None), head_ranks_of("ulysses", 8, None), head_ranks_of("hybrid", 8, 4)
    (1, 8, 4)

    Raises: ValueError for an unknown mode, or a group that does not divide the ranks, or that the mode does not have.
    """
    if mode not in MODES:
        raise ValueError(f"sp_mode {mode!r} is unknown: use {', '.join(MODES)}")
    if mode != "hybrid":
        if head_ranks is not None:
            raise ValueError(f"sp_heads={head_ranks} is for sp_mode hybrid, not {mode}: omit it, or use hybrid")
        return 1 if mode == "ring" else size
    group = head_ranks or (2 if size % 2 == 0 else 1)
    if group < 1 or size % group:
        able = listed_divisors(size)
        raise ValueError(f"sp={size} ranks can't be divided in groups of {group} that exchange heads: use {able}")
    return group


def check_heads(n_head: int, n_kv_head: int, size: int) -> None:
    """Raise ValueError if `size` ranks cannot divide a rank's heads evenly."""
    repeated = size % n_kv_head == 0
    for name, number in (("query heads", n_head), *([] if repeated else [("key and value heads", n_kv_head)])):
        if number % size:
            nearest = max(1, round(number / size)) * size
            raise ValueError(
                f"{number} {name} can't be exchanged by {size} ranks: use {nearest} heads, fewer ranks, or sp_mode ring"
            )


def check_between_layers(length: int, sp: int, tp: int) -> None:
    """Raise ValueError if tp ranks cannot divide the sp shard of a sequence of this length between split layers."""
    if tp == 1:
        raise ValueError("sequence_parallel shards sequences over tp ranks, but tp=1: use a larger tp, or omit it")
    if rest := length // sp % tp:
        raise ValueError(
            f"block_size={length} leaves {rest} of a rank's {length // sp} tokens over from tp={tp} with "
            f"--sequence_parallel: use a multiple of {sp * tp}"
        )
