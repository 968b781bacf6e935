"""Extents: which elements of a whole tensor a rank has; and where those of two layouts meet."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from parallelism.placement import Shard


class Extent(NamedTuple):
    """Which elements of a whole: `length` from `begin` on, of the flat shard that one of `size` ranks has of it.

    Without `shard`, of the flat whole.

    >>> Extent((2, 4), begin=1, length=3, shard=Shard(1, 4), rank=1, size=2).runs().tolist()  # of 2, 3, 6, 7
    [[0, 3, 1], [1, 6, 2]]
    """

    shape: tuple[int, ...]  # of the whole
    begin: int
    length: int
    shard: Shard | None = None
    rank: int = 0
    size: int = 1

    def runs(self) -> np.ndarray:
        """Elements side by side both here and in the flat whole, in rows: place here, place there, how many.

        Padding is not among them.

        Raises: ValueError for a whole that has no such shard, or a shard that has no such range.
        """
        runs = self._shard_runs(self.shard) if self.shard else np.array([[0, 0, math.prod(self.shape)]])
        among = self.shard_length()
        if not 0 <= self.begin <= self.end <= among:
            raise ValueError(f"elements {self.begin} to {self.end} are not all among a part's {among}")
        begins = np.maximum(runs[:, 0], self.begin)
        ends = np.minimum(runs[:, 0] + runs[:, 2], self.end)
        runs = np.stack([begins - self.begin, runs[:, 1] + begins - runs[:, 0], ends - begins], axis=1)
        return joined(runs[runs[:, 2] > 0])

    @property
    def end(self) -> int:
        return self.begin + self.length

    def shard_length(self) -> int:
        if self.shard is None:
            return math.prod(self.shape)
        return math.prod(self.shape) // self.shape[self.shard.dim] * self.shard.local_length(self.size)

    def _shard_runs(self, shard: Shard) -> np.ndarray:
        dim, length, part_length = shard.dim, shard.length, shard.local_length(self.size)
        pieces = np.array(shard.piece_lengths(part_length * self.size))
        if self.shape[dim] != length or (pieces % self.size).any() or not (shard.padded or length % self.size == 0):
            raise ValueError(f"dim {dim} of {self.shape} can't be split as {shard} over {self.size} ranks")
        counts = pieces // self.size
        here, there = np.cumsum(counts) - counts, np.cumsum(pieces) - pieces + self.rank * counts
        counts = np.clip(length - there, 0, counts)
        rows = np.arange(math.prod(self.shape[:dim]))[:, None]
        columns = rows * part_length + here, rows * length + there, counts + 0 * rows
        return np.stack(columns, axis=-1).reshape(-1, 3) * math.prod(self.shape[dim + 1 :])


def joined(runs: np.ndarray) -> np.ndarray:
    """The same with runs made one that follow one another both here and there."""
    if len(runs) == 0:
        return runs
    ends = runs[:-1, :2] + runs[:-1, 2:]
    firsts = np.flatnonzero(np.append(True, (runs[1:, :2] != ends).any(axis=1)))
    return np.column_stack([runs[firsts, :2], np.add.reduceat(runs[:, 2], firsts)])


def packed(runs: np.ndarray) -> np.ndarray:
    """The runs as they lie here without what is between them."""
    return np.column_stack([np.cumsum(runs[:, 2]) - runs[:, 2], runs[:, 1:]])


def meet(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """What two have in common of a whole, in rows: place in `a`, place in `b`, how many.

    >>> meet(np.array([[0, 2, 6]]), np.array([[0, 0, 3], [3, 5, 9]])).tolist()
    [[0, 2, 1], [3, 3, 3]]
    """
    edges = np.unique(np.concatenate([runs[:, 1:2] + runs[:, 2:] * [0, 1] for runs in (a, b)]))
    begins, counts = edges[:-1], np.diff(edges)
    (in_a, at_a), (in_b, at_b) = located(a, begins), located(b, begins)
    return joined(np.column_stack([at_a, at_b, counts])[in_a & in_b])


def located(runs: np.ndarray, there: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Which places of the whole the runs reach, and where these are here."""
    if len(runs) == 0:
        return np.zeros(len(there), bool), there
    number = np.searchsorted(runs[:, 1], there, side="right") - 1
    here, start, count = runs[number].T
    return (number >= 0) & (there < start + count), here + there - start
