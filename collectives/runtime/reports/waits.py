"""Waits of a node's ranks for each other, which the barriers of compiled programs count."""

from typing import NamedTuple

import numpy as np


class RankWaits(NamedTuple):
    """Barriers at which a rank waited for others, and those at which others waited for it, the last to come."""

    waits: int
    waited_s: float
    awaited: int
    awaited_s: float


def by_rank(counted: np.ndarray) -> list[RankWaits]:
    """Return each rank's waits, from how often and how many nanoseconds each rank (row) waited for each (column).

    >>> by_rank(np.array([[[0, 0], [3, 2_000_000_000]], [[1, 500_000_000], [0, 0]]]))[1]
    RankWaits(waits=1, waited_s=0.5, awaited=3, awaited_s=2.0)
    """
    waiting, awaited = counted.sum(1).tolist(), counted.sum(0).tolist()
    return [
        RankWaits(waits, waited_ns / 1e9, times, awaited_ns / 1e9)
        for (waits, waited_ns), (times, awaited_ns) in zip(waiting, awaited, strict=True)
    ]
