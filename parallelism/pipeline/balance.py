"""Which layers go to which stage of a pipeline, so that the dearest stage costs least."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import accumulate


def balance(costs: Sequence[float], num_stages: int) -> list[range]:
    """Divide layers into consecutive stages of at least one layer: minimize the costliest, then even out the rest.

    Raises: ValueError for more stages than layers, or none.

    >>> balance([1, 1, 1, 1, 1, 3], 3)
    [range(0, 2), range(2, 5), range(5, 6)]
    """
    if not 1 <= num_stages <= len(costs):
        raise ValueError(f"{len(costs)} layers can be cut into 1 to {len(costs)} stages, not {num_stages}")
    limit, _ = cheapest(costs, num_stages, max)
    _, parts = cheapest(costs, num_stages, lambda others, cost: others + cost**2, limit)
    return parts


def cheapest(
    costs: Sequence[float], num_stages: int, add: Callable[[float, float], float], limit: float = math.inf
) -> tuple[float, list[range]]:
    """Return the cheapest division with no stage above `limit`; `add` accumulates the stages' costs."""
    sums = [0, *accumulate(costs)]
    best: dict[int, tuple[float, list[range]]] = {0: (0, [])}  # of the layers before some
    for _ in range(num_stages):
        longer: dict[int, tuple[float, list[range]]] = {}
        for begin, (value, parts) in best.items():
            for end in range(begin + 1, len(sums)):
                if (cost := sums[end] - sums[begin]) <= limit:
                    choice = add(value, cost), [*parts, range(begin, end)]
                    longer[end] = min(longer.get(end, choice), choice, key=lambda priced: priced[0])
        best = longer
    return best[len(costs)]
