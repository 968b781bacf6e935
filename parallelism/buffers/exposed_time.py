"""Communication that shows: the time for which a rank does nothing but wait for others."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class ExposedTime:
    """Adds up the seconds for which the network is waited for, in `exposed_s`."""

    exposed_s = 0.0

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Time a wait for the network; a wait within another one counts once."""
        before, begin = self.exposed_s, time.perf_counter()
        yield
        self.exposed_s = before + time.perf_counter() - begin
