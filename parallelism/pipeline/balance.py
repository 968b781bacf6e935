"""Balance pipeline stages: assign layers to stages so that the costliest stage costs least."""

import math
from collections.abc import Callable, Sequence
from itertools import accumulate


def balance(costs: Sequence[float], num_stages: int) -> list[range]:
    """Divide layers into consecutive non-empty stages: minimize the costliest stage, then even out the others.

    Raises: ValueError for more stages than layers, or no stages.

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
    best: dict[int, tuple[float, list[range]]] = {0: (0, [])}  # cost and stages of the first layers, by their number
    for _ in range(num_stages):
        longer: dict[int, tuple[float, list[range]]] = {}
        for begin, (value, parts) in best.items():
            for end in range(begin + 1, len(sums)):
                if (cost := sums[end] - sums[begin]) <= limit:
                    choice = add(value, cost), [*parts, range(begin, end)]
                    longer[end] = min(longer.get(end, choice), choice, key=lambda priced: priced[0])
        best = longer
    return best[len(costs)]
