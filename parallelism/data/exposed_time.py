"""Time that is spent waiting for other ranks."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class ExposedTime:
    """Adds up the time for which the network is waited for: `exposed_s`, in seconds."""

    exposed_s = 0.0

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Where the network is waited for; one such place within another is counted once."""
        before, begin = self.exposed_s, time.perf_counter()
        yield
        self.exposed_s = before + time.perf_counter() - begin
