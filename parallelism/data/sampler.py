"""Distributed sampler: select the samples that a rank trains on at each step."""

from collections.abc import Iterator, Sequence
from itertools import accumulate

import numpy as np


class DistributedSampler:
    """Iterates over an epoch's global batches: yields this rank's sample indices of each, as an array.

    Step k takes `batch_size` samples in the epoch's order, from k x batch_size on, and rank r the r-th of
    `size` parts of them, equal or of the given `lengths`: a step's samples depend on seed, epoch and
    batch_size, but not on size.  Samples that do not fill the last batch are dropped.

    >>> [[share.tolist() for share in DistributedSampler(10, 4, rank, size=2)] for rank in (0, 1)]
    [[[0, 2], [8, 5]], [[9, 1], [4, 3]]]

    >>> [next(iter(DistributedSampler(10, 4, rank, 2, lengths=(3, 1)))).tolist() for rank in (0, 1)]
    [[0, 2, 9], [1]]

    Raises: ValueError if size does not divide batch_size, or lengths do not add up to it, or an epoch has no steps.
    """

    def __init__(
        self,
        num_samples: int,
        batch_size: int,
        rank: int,
        size: int,
        *,
        seed: int = 0,
        lengths: Sequence[int] | None = None,
    ):
        for name, value in (("num_samples", num_samples), ("batch_size", batch_size), ("size", size)):
            if value < 1:
                raise ValueError(f"{name}={value} must be at least 1")
        if not 0 <= rank < size:
            raise ValueError(f"rank={rank} must be from 0 to {size - 1}, as size={size}")
        if lengths is not None and (len(lengths) != size or sum(lengths) != batch_size or min(lengths) < 1):
            raise ValueError(f"lengths={list(lengths)} must be {size} lengths that add up to batch_size={batch_size}")
        if lengths is None and (rest := batch_size % size):
            below, above = batch_size - rest, batch_size - rest + size
            sizes = f"{below} or {above}" if below else f"{above}"
            raise ValueError(f"batch_size={batch_size} is not divisible by {size} ranks: use {sizes}")
        if num_samples < batch_size:
            raise ValueError(
                f"num_samples={num_samples} is below batch_size={batch_size}: use a smaller batch, or more samples"
            )
        if not 0 <= seed < 2**63:
            raise ValueError(f"seed={seed} must be from 0 to 2**63 - 1")
        self.num_samples, self.batch_size = num_samples, batch_size
        self.seed, self.epoch, self.rank = seed, 0, rank
        self.cut(lengths or [batch_size // size] * size)

    def cut(self, lengths: Sequence[int]):
        """Cut later batches into parts of other `lengths`, which add up to batch_size."""
        ends = [*accumulate(lengths, initial=0)]
        self.part = slice(ends[self.rank], ends[self.rank + 1])

    def set_epoch(self, epoch: int):
        if epoch < 0:
            raise ValueError(f"epoch={epoch} must be at least 0")
        self.epoch = epoch

    def __len__(self) -> int:
        return self.num_samples // self.batch_size

    def __iter__(self) -> Iterator[np.ndarray]:
        return (batch[self.part] for batch in self.batches())

    def batches(self) -> Iterator[np.ndarray]:
        """Yield the epoch's global batches: the sample indices of all ranks."""
        # Sorting raw bits gives the same order in every version of NumPy, which permutation() does not promise.
        philox = np.random.Philox(key=[self.seed, self.epoch])
        order = np.argsort(philox.random_raw(self.num_samples), kind="stable")
        return iter(order[: len(self) * self.batch_size].reshape(len(self), -1))
