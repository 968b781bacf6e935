"""Exposed communication: the time in which a rank is idle, waiting for others."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class ExposedTime:
    """Accumulates the time spent waiting for the network, in seconds, in `exposed_s`."""

    exposed_s = 0.0

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Time a wait for the network; nested waits count once."""
        before, begin = self.exposed_s, time.perf_counter()
        yield
        self.exposed_s = before + time.perf_counter() - begin
