"""Samples of a run: this rank's samples of each step, and their batches."""

from __future__ import annotations

import sys
from collections.abc import Generator, Iterator
from itertools import islice

import numpy as np
import torch
from torch import Tensor

from parallelism.data.sampler import DistributedSampler
from parallelism.pipeline.stage import Batch
from training.data.packing import Windows
from training.data.prefetch import ahead


class Samples:
    """Batches of `windows`, for a rank that holds the tokens at `positions` of each sample.

    The token `document_end`, if there is one, ends a document.  With `by_sample`, each sample has positions of its own,
    so that autograd does not add up samples' gradients.
    """

    def __init__(
        self,
        windows: Windows,
        sampler: DistributedSampler,
        micro_batch_size: int,
        num_micro_batches: int,
        positions: Tensor,
        document_end: int | None,
        device: str,
        by_sample: bool = False,
    ):
        self.windows, self.sampler = windows, sampler
        self.micro_batch_size, self.num_micro_batches = micro_batch_size, num_micro_batches
        self.positions, self.document_end, self.device = positions, document_end, device
        self.by_sample = by_sample

    def sample_indices(self, first: int) -> Iterator[np.ndarray]:
        """Yield the sample indices of each step's global batch from the `first` one on, epoch after epoch."""
        return islice(self._from_epoch((first - 1) // len(self.sampler)), (first - 1) % len(self.sampler), None)

    def _from_epoch(self, first: int) -> Iterator[np.ndarray]:
        for epoch in range(first, sys.maxsize):
            self.sampler.set_epoch(epoch)
            self.windows.set_epoch(epoch)
            yield from self.sampler.batches()

    def micro_batches(self, first: int) -> Generator[list[Batch], None, None]:
        """Yield this rank's micro-batches of each step from the `first` one on; a thread prepares them on the host."""
        return ahead(self._micro_batches(first))

    def _micro_batches(self, first: int) -> Iterator[list[Batch]]:
        for step, every in enumerate(self.sample_indices(first), first):
            first_sample = step * len(self.windows)  # different dropout masks in each step
            total, parts = self.windows.num_targets(every), np.split(every[self.sampler.part], self.num_micro_batches)
            yield [self.batch(self.windows, part, first_sample, total) for part in parts]

    def first_batch(self) -> Batch:
        """Return a micro-batch to measure with."""
        return self.batch(self.windows, np.arange(self.micro_batch_size)).to(self.device)

    def batch(self, windows: Windows, indices: np.ndarray, first_sample: int = 0, total: int | None = None) -> Batch:
        """Return this rank's tokens of some samples, which dropout numbers by `first_sample` plus their indices.

        They are on the host.  `total` is the number of targets of the global batch, by default of these samples.
        """
        inputs, targets = map(torch.from_numpy, windows.batch(indices))
        number, numbers = windows.num_targets(indices), windows.documents(indices, inputs.numpy(), self.document_end)
        documents = None if numbers is None else torch.from_numpy(numbers)[:, self.positions]
        samples = torch.from_numpy(first_sample + indices)
        positions = self.positions.expand(len(indices), -1) if self.by_sample else self.positions
        counts = torch.tensor([number, number if total is None else total], dtype=torch.float64)
        return Batch(inputs[:, self.positions], targets[:, self.positions], positions, documents, samples, counts)
