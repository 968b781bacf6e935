"""Balance pipeline stages: assign layers to stages so that the costliest stage costs least."""

import math
from collections.abc import Callable, Sequence
from itertools import accumulate
from statistics import mean

EQUAL = 0.85  # part of the fastest rank's speed from which a rank counts as equally fast


def balance(costs: Sequence[float], num_stages: int, speeds: Sequence[float] | None = None) -> list[range]:
    """Divide layers into consecutive non-empty stages: minimize the longest stage's time, then even out the others.

    A stage takes the costs of its layers over its speed, which is 1 by default.

    Raises: ValueError for more stages than layers, no stages, another number of speeds, or speeds of 0 or less.

    >>> balance([1, 1, 1, 1, 1, 3], 3)
    [range(0, 2), range(2, 5), range(5, 6)]
    >>> balance([1] * 7, 4, [1, 1, 0.5, 1])
    [range(0, 2), range(2, 4), range(4, 5), range(5, 7)]
    """
    if not 1 <= num_stages <= len(costs):
        raise ValueError(f"{len(costs)} layers can be cut into 1 to {len(costs)} stages, not {num_stages}")
    speeds = [1.0] * num_stages if speeds is None else speeds
    if len(speeds) != num_stages:
        raise ValueError(f"{len(speeds)} speeds for {num_stages} stages: pass one for each")
    if min(speeds) <= 0:
        raise ValueError(f"a speed of {min(speeds):g}: pass speeds above 0")
    is_even = min(speeds) == max(speeds)
    bound = (sum(costs) / num_stages + max(costs)) / speeds[0] if is_even else math.inf  # no stage needs to be longer
    limit, _ = cheapest(costs, speeds, max, bound)
    _, parts = cheapest(costs, speeds, lambda others, time: others + time**2, limit)
    return parts


def relative_speeds(seconds: Sequence[float]) -> list[float]:
    """Return ranks' speeds beside the fast ones, from the seconds of the same work.

    Ranks that are a little slower than the fastest count as fast, as times vary.

    >>> relative_speeds([1.0, 1.1, 2.1, 4.2])
    [1.0, 1.0, 0.5, 0.25]
    """
    fast_s = [each for each in seconds if min(seconds) / each >= EQUAL]
    return [1.0 if each in fast_s else mean(fast_s) / each for each in seconds]


def cheapest(
    costs: Sequence[float], speeds: Sequence[float], add: Callable[[float, float], float], limit: float = math.inf
) -> tuple[float, list[range]]:
    """Return the cheapest division with no stage above `limit`; `add` accumulates the stages' times."""
    sums = [0, *accumulate(costs)]
    best: dict[int, tuple[float, list[range]]] = {0: (0, [])}  # cost and stages of the first layers, by their number
    for speed in speeds:
        longer: dict[int, tuple[float, list[range]]] = {}
        for begin, (value, parts) in best.items():
            for end in range(begin + 1, len(sums)):
                if (time := (sums[end] - sums[begin]) / speed) > limit:
                    break  # as longer ones are
                choice = add(value, time), [*parts, range(begin, end)]
                longer[end] = min(longer.get(end, choice), choice, key=lambda priced: priced[0])
        best = longer
    return best[len(costs)]
