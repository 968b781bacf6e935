import doctest
import re
from itertools import chain

import numpy as np
import pytest

from parallelism.data import sampler
from parallelism.data.sampler import DistributedSampler


def epoch(num_samples, batch_size, size, number=0, **options):
    """Return the epoch's global batches, each with the samples of all ranks in rank order."""
    samplers = [DistributedSampler(num_samples, batch_size, rank, size, **options) for rank in range(size)]
    for one in samplers:
        one.set_epoch(number)
    steps = [np.concatenate(indices).tolist() for indices in zip(*samplers, strict=True)]
    assert all(len(one) == len(steps) for one in samplers)
    return steps


def flat(steps):
    return list(chain.from_iterable(steps))


@pytest.mark.parametrize("size", [1, 2, 3, 4, 6, 12])
def test_every_sample_once_an_epoch(size):
    steps = epoch(60, 12, size)
    assert [len(step) for step in steps] == [12] * 5
    assert sorted(flat(steps)) == list(range(60))


@pytest.mark.parametrize("size", [2, 3, 4, 6, 12])
def test_steps_do_not_depend_on_the_number_of_ranks(size):
    assert epoch(67, 12, size, 4) == epoch(67, 12, 1, 4)


def test_ranks_share_a_batch_equally_and_in_order():
    indices = np.array([list(DistributedSampler(8, 4, rank, 2)) for rank in range(2)])
    order = np.array(list(DistributedSampler(8, 4, 0, 1)))
    assert indices.tolist() == [order[:, :2].tolist(), order[:, 2:].tolist()]


@pytest.mark.parametrize("num_samples", [12, 13, 23, 24, 25])
def test_dropping_the_tail(num_samples):
    steps = flat(epoch(num_samples, 12, 3))
    assert len(steps) == num_samples // 12 * 12
    assert len(set(steps)) == len(steps)
    assert set(steps) <= set(range(num_samples))


def test_epochs_differ_and_repeat():
    first, second = epoch(60, 12, 2, 0), epoch(60, 12, 2, 1)
    assert first != second
    one = DistributedSampler(60, 60, 0, 1)
    orders = []
    for number in (0, 1, 0):
        one.set_epoch(number)
        orders.append(next(iter(one)).tolist())
    assert orders == [flat(first), flat(second), flat(first)]


def test_seeds_differ():
    assert epoch(60, 12, 2, seed=1) != epoch(60, 12, 2, seed=2)


def test_every_place_gets_every_sample():
    one = DistributedSampler(5, 5, 0, 1)
    orders = []
    for number in range(2000):
        one.set_epoch(number)
        orders.append(next(iter(one)))
    counts = np.stack([np.bincount(samples, minlength=5) for samples in np.transpose(orders)])
    assert counts.min() > 320  # 400 expected, standard deviation 18
    assert counts.max() < 480


@pytest.mark.parametrize(
    ("args", "options", "message"),
    [
        ((100, 10, 0, 4), {}, "batch_size=10 is not divisible by 4 ranks: use 8 or 12"),
        ((100, 3, 0, 4), {}, "batch_size=3 is not divisible by 4 ranks: use 4"),
        (
            (7, 8, 0, 4),
            {},
            "num_samples=7 is below batch_size=8: use a smaller batch, or more samples",
        ),
        ((0, 8, 0, 4), {}, "num_samples=0 must be at least 1"),
        ((100, -8, 0, 4), {}, "batch_size=-8 must be at least 1"),
        ((100, 8, 0, 0), {}, "size=0 must be at least 1"),
        ((100, 8, 4, 4), {}, "rank=4 must be from 0 to 3, as size=4"),
        ((100, 8, -1, 4), {}, "rank=-1 must be from 0 to 3, as size=4"),
        ((100, 8, 0, 4), {"seed": -1}, "seed=-1 must be from 0 to 2**63 - 1"),
    ],
)
def test_errors(args, options, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        DistributedSampler(*args, **options)


def test_epochs_are_counted_from_0():
    with pytest.raises(ValueError, match="epoch=-1 must be at least 0"):
        DistributedSampler(8, 4, 0, 1).set_epoch(-1)


def test_the_examples_run():
    assert doctest.testmod(sampler) == (0, 2)
