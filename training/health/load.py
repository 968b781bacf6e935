"""Load of replicas: numbers of micro-batches by measured speed, so that all end a step at the same time."""

from __future__ import annotations

from collections.abc import Sequence

GAIN = 0.08  # of a step's time, for which micro-batches move


def numbers_by_time(seconds: Sequence[float], total: int) -> list[int]:
    """Return each replica's number of micro-batches, at least 1, with which the slowest ends soonest.

    `seconds` is each replica's time of a micro-batch.

    >>> numbers_by_time([1, 1, 2, 4], 11)
    [4, 4, 2, 1]
    """
    numbers = [1] * len(seconds)
    for _ in range(total - len(seconds)):
        ends = [(number + 1) * each for number, each in zip(numbers, seconds, strict=True)]
        numbers[ends.index(min(ends))] += 1
    return numbers


def rebalanced(numbers: Sequence[int], seconds: Sequence[float]) -> list[int]:
    """Return better numbers of micro-batches, or the same if a step would hardly be faster.

    >>> rebalanced([3, 3, 3, 2], [1, 1, 2, 4]), rebalanced([4, 4, 2, 1], [1, 1.05, 2, 4])
    ([4, 4, 2, 1], [4, 4, 2, 1])
    """
    better = numbers_by_time(seconds, sum(numbers))
    now_s, then_s = (max(n * s for n, s in zip(each, seconds, strict=True)) for each in (numbers, better))
    return better if then_s < (1 - GAIN) * now_s else [*numbers]
