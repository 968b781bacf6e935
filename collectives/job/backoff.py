"""Sleeps between looks at something that other threads or ranks do, the longer the more looks have been in vain."""

import time

SHORTEST_SLEEP_S, LONGEST_SLEEP_S = 2e-5, 1e-3


class Backoff:
    """Sleeps that double, up to the longest."""

    def __init__(self, longest_s: float = LONGEST_SLEEP_S):
        self.longest_s = longest_s
        self.reset()

    def reset(self) -> None:
        """Begin again with the shortest: there was something to do."""
        self.next_s = SHORTEST_SLEEP_S

    @property
    def is_longest(self) -> bool:
        return self.next_s >= self.longest_s

    def sleep(self) -> float:
        """Sleep, and return for how many seconds."""
        slept_s = self.next_s
        time.sleep(slept_s)
        self.next_s = min(2 * slept_s, self.longest_s)
        return slept_s
