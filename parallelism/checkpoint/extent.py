"""Extents: the elements of a whole tensor that a rank holds, and the intersection of two ranks' extents."""

from functools import cache
from typing import NamedTuple

import numpy as np

from parallelism.placement import Shard


class LocalShard(NamedTuple):
    """Shard held by rank `rank` of the `size` ranks along an axis."""

    shard: Shard
    rank: int
    size: int

    @property
    def length(self) -> int:
        """Local length of the dim in elements, including the padding."""
        return self.shard.local_length(self.size)

    def runs(self, length: int) -> np.ndarray:
        """Return the runs of indices contiguous both locally and globally, in rows: local start, global start, count.

        Raises: ValueError if the dim cannot be sharded like this.
        """
        pieces = np.array(self.shard.piece_lengths(self.length * self.size))
        is_even = self.shard.padded or length % self.size == 0
        if self.shard.length != length or (pieces % self.size).any() or not is_even:
            raise ValueError(f"dim {self.shard.dim} of {length} can't be split as {self.shard} over {self.size} ranks")
        counts = pieces // self.size
        here, there = np.cumsum(counts) - counts, np.cumsum(pieces) - pieces + self.rank * counts
        return np.column_stack([here, there, np.clip(length - there, 0, counts)])


class Extent(NamedTuple):
    """A range of a sharded tensor: take `shards` of its dims, flatten, then `length` elements from `begin`.

    Several shards of the same dim are nested: a later one divides what an earlier one leaves.

    >>> Extent((2, 4), begin=1, length=3, shards=(LocalShard(Shard(1, 4), rank=1, size=2),)).runs().tolist()
    [[0, 3, 1], [1, 6, 2]]
    """

    shape: tuple[int, ...]  # of the whole tensor
    begin: int
    length: int
    shards: tuple[LocalShard, ...] = ()

    def runs(self) -> np.ndarray:
        """Return the runs contiguous both locally and in the flat whole, in rows: local start, global start, count.

        They do not include padding.

        Raises: ValueError if the tensor has no such shard, or the shard no such range.
        """
        runs, among = self._shard_runs()
        if not 0 <= self.begin <= self.end <= among:
            raise ValueError(f"elements {self.begin} to {self.end} are not all among a part's {among}")
        begins = np.maximum(runs[:, 0], self.begin)
        ends = np.minimum(runs[:, 0] + runs[:, 2], self.end)
        runs = np.stack([begins - self.begin, runs[:, 1] + begins - runs[:, 0], ends - begins], axis=1)
        return joined(runs[runs[:, 2] > 0])

    @property
    def end(self) -> int:
        return self.begin + self.length

    def _shard_runs(self) -> tuple[np.ndarray, int]:
        """Return the runs of the entire shard, and its length."""
        runs, length, whole = np.array([[0, 0, 1]]), 1, 1
        for dim in reversed(range(len(self.shape))):
            of_dim, dim_length = self._dim_runs(dim)
            if len(runs) == 1 and runs[0, 2] == length == whole:  # the inner dims are not sharded
                runs = of_dim * whole
            else:
                ones = of_dim[:0, :2], *(begins + np.arange(count)[:, None] for *begins, count in of_dim)
                starts = np.concatenate(ones)[:, None] * (length, whole) + runs[:, :2]
                runs = np.column_stack([starts.reshape(-1, 2), np.tile(runs[:, 2], len(starts))])
            length, whole = length * dim_length, whole * self.shape[dim]
        return runs, length

    def _dim_runs(self, dim: int) -> tuple[np.ndarray, int]:
        """Return the runs of a dim as `LocalShard.runs` does, and its local length including padding."""
        runs, length = np.array([[0, 0, self.shape[dim]]]), self.shape[dim]
        for local in self.shards:
            if local.shard.dim == dim:
                runs, length = intersection(local.runs(length), runs[:, [1, 0, 2]]), local.length
        return runs, length


@cache
def num_elements(extent: Extent) -> int:
    """Return the number of an extent's elements but padding.  Raises: ValueError as `runs` does."""
    return int(extent.runs()[:, 2].sum())


def joined(runs: np.ndarray) -> np.ndarray:
    """Merge runs that follow one another both locally and in the whole."""
    if len(runs) == 0:
        return runs
    ends = runs[:-1, :2] + runs[:-1, 2:]
    firsts = np.flatnonzero(np.append(True, (runs[1:, :2] != ends).any(axis=1)))
    return np.column_stack([runs[firsts, :2], np.add.reduceat(runs[:, 2], firsts)])


def intersection(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return the intersection of two extents of the same tensor, in rows: start in `a`, start in `b`, count.

    >>> intersection(np.array([[0, 2, 6]]), np.array([[0, 0, 3], [3, 5, 9]])).tolist()
    [[0, 2, 1], [3, 3, 3]]
    """
    edges = np.unique(np.concatenate([runs[:, 1:2] + runs[:, 2:] * [0, 1] for runs in (a, b)]))
    begins, counts = edges[:-1], np.diff(edges)
    (in_a, at_a), (in_b, at_b) = located(a, begins), located(b, begins)
    return joined(np.column_stack([at_a, at_b, counts])[in_a & in_b])


def located(runs: np.ndarray, there: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return which global indices `there` the runs cover, and the local index of each."""
    if len(runs) == 0:
        return np.zeros(len(there), bool), there
    number = np.searchsorted(runs[:, 1], there, side="right") - 1
    here, start, count = runs[number].T
    return (number >= 0) & (there < start + count), here + there - start
