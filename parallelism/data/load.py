"""Load of replicas: numbers of micro-batches by measured speed, so that all end a step at the same time."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heapreplace
from typing import NamedTuple

GAIN = 0.08  # of a step's time, for which micro-batches move


class ReplicaSeconds(NamedTuple):
    """A replica's time of each micro-batch, and of the rest of a step."""

    each: float
    rest: float = 0.0

    def end_s(self, number: int) -> float:
        """Return when a step with so many micro-batches ends."""
        return number * self.each + self.rest


def numbers_by_time(replicas: Sequence[ReplicaSeconds], total: int) -> list[int]:
    """Return each replica's number of micro-batches, at least 1, with which the slowest ends soonest.

    >>> numbers_by_time([ReplicaSeconds(each) for each in (1, 1, 2, 4)], 11)
    [4, 4, 2, 1]
    """
    numbers = [1] * len(replicas)
    ends_s = [(replica.end_s(2), index) for index, replica in enumerate(replicas)]  # with one more
    heapify(ends_s)
    for _ in range(total - len(replicas)):
        _, index = ends_s[0]
        numbers[index] += 1
        heapreplace(ends_s, (replicas[index].end_s(numbers[index] + 1), index))
    return numbers


def rebalanced(numbers: Sequence[int], replicas: Sequence[ReplicaSeconds]) -> list[int]:
    """Return better numbers of micro-batches, or the same if a step would hardly be faster.

    >>> rebalanced([3, 3, 3], [ReplicaSeconds(1), ReplicaSeconds(1), ReplicaSeconds(2, 1)])
    [4, 4, 1]
    >>> rebalanced([4, 4, 2], [ReplicaSeconds(1), ReplicaSeconds(1.05), ReplicaSeconds(2)])
    [4, 4, 2]
    """
    better = numbers_by_time(replicas, sum(numbers))
    now_s, then_s = (max(map(ReplicaSeconds.end_s, replicas, each)) for each in (numbers, better))
    return better if then_s < (1 - GAIN) * now_s else [*numbers]
