"""Validation: losses on held-out data."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from parallelism.pipeline.driver import Pipeline
from training.data.packing import Windows
from training.data.samples import Samples

if TYPE_CHECKING:
    from collectives import Communicator


def spread(count: int, limit: int) -> np.ndarray:
    """Return the indices of `limit` of `count` samples, evenly spread, or all if there are fewer or the limit is 0.

    >>> spread(10, 4).tolist(), spread(3, 0).tolist()
    ([0, 2, 5, 7], [0, 1, 2])
    """
    number = min(limit or count, count)
    return np.arange(number) * count // number


def sum_losses(
    pipeline: Pipeline, samples: Samples, windows: Windows, selection: np.ndarray, dp: Communicator
) -> np.ndarray:
    """Return the sum of losses, in nats, and the number of targets, of this dp rank's part of a `selection`.

    Pipeline ranks without the loss return the same number, and a loss of 0.  Collective.
    """
    mine, size = selection[dp.rank :: dp.size], samples.micro_batch_size
    all_have, some_have_more = divmod(len(selection), dp.size)
    parts = np.split(mine[:all_have], range(size, all_have, size)) if all_have else []
    # Parts are as long on all ranks, which gather parameters, exchange tokens, and form new shapes together.
    parts += [mine[all_have:]] if some_have_more else []
    sums = np.zeros(2)
    for first in range(0, len(parts), samples.num_micro_batches):
        together = parts[first : first + samples.num_micro_batches]
        indices = [part if len(part) else np.zeros(1, np.int64) for part in together]
        batches = [samples.batch(windows, each).to(samples.device) for each in indices]
        for part, loss in zip(together, pipeline.losses(batches), strict=True):
            number = windows.num_targets(part)
            sums += loss * number, number
    return sums
