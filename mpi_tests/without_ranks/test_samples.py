"""Inputs of a run's steps: samples of each rank, and dropout seeds, which differ between steps."""

from contextlib import closing
from itertools import islice

import numpy as np
import torch

from parallelism.data.sampler import DistributedSampler
from training.data.samples import Samples
from training.data.tokens import TokenWindows

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
