"""Inputs of a run's steps: samples of each rank, and dropout seeds, which differ between steps."""

from contextlib import closing
from itertools import islice
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from parallelism.data.sampler import DistributedSampler
from training.data.samples import Samples
from training.data.tokens import TokenWindows
from training.parallel.validation import sum_losses

BLOCK = 8


def steps(first, number):
    """Return micro-batches of the second of two ranks, from 24 windows of consecutive numbers as tokens."""
    windows = TokenWindows(np.arange(25 * BLOCK), BLOCK, seed=3)
    sampler = DistributedSampler(len(windows), 8, rank=1, size=2, seed=3)
    samples = Samples(windows, sampler, 2, 2, torch.arange(BLOCK), None, "cpu")
    with closing(samples.micro_batches(first)) as coming:
        return list(islice(coming, number)), len(sampler)


def test_numbers_for_dropout_are_of_one_step_and_sample_alone():
    batches, epoch = steps(1, 9)
    assert epoch == 3  # steps per epoch, so that 9 steps are three epochs
    numbers = torch.cat([batch.samples for step in batches for batch in step]).tolist()
    assert len(set(numbers)) == len(numbers) == 9 * 4


def test_a_run_that_goes_on_is_given_what_the_first_would_have_been():
    whole, _ = steps(1, 9)
    for first in (2, 4, 6):
        rest, _ = steps(first, 3)
        for step, again in zip(whole[first - 1 :], rest, strict=False):
            for batch, other in zip(step, again, strict=True):
                assert torch.equal(batch.tokens, other.tokens)
                assert torch.equal(batch.samples, other.samples)
                assert torch.equal(batch.targets, batch.tokens + 1)


class Recorder:
    """A pipeline of one rank whose loss is the mean of the samples' indices, with the lengths of its batches."""

    def __init__(self):
        self.lengths = []

    def losses(self, batches):
        self.lengths.append([len(batch) for batch in batches])
        return [float(batch.double().mean()) for batch in batches]


@pytest.mark.parametrize("count", [1, 3, 4, 14, 15, 16, 21])
def test_batches_of_a_validation_are_as_long_on_all_ranks(count):
    """Pipelines and experts exchange something for each new shape of batch; each sample counts once."""
    samples = SimpleNamespace(
        micro_batch_size=2, num_micro_batches=3, device="cpu", batch=lambda _, indices: torch.from_numpy(indices)
    )
    windows, recorders = SimpleNamespace(num_targets=lambda part: 5 * len(part)), [Recorder() for _ in range(4)]
    sums = [
        sum_losses(recorder, samples, windows, np.arange(count) + 7, SimpleNamespace(rank=rank, size=4))
        for rank, recorder in enumerate(recorders)
    ]
    assert len({str(recorder.lengths) for recorder in recorders}) == 1
    assert sum(sums) == pytest.approx([5 * sum(range(7, 7 + count)), 5 * count])
