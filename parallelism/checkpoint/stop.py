"""Signals by which a batch system announces the end: noted on any rank, agreed on by all.

They must reach a rank.  Open MPI's mpirun (5.0.11, tried) passes SIGUSR1 on, but ends the job when it gets a SIGTERM
itself.
"""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collectives import Communicator

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class Stop:
    """Notes that a rank got SIGTERM or SIGUSR1, until `close()`.  Making and asking one is collective."""

    def __init__(self, comm: Communicator, signals: tuple[signal.Signals, ...] = SIGNALS):
        self.noted = 0
        self.highest = np.zeros(1, np.int64)
        self._agree = comm.plan("all_reduce", self.highest, op="max")
        self._before = {number: signal.signal(number, self._note) for number in signals}

    def _note(self, number: int, frame: Any) -> None:
        self.noted = number

    def received(self) -> str:
        """Return the name of a signal that some rank received, the same on all ranks, or ""."""
        self.highest[0] = self.noted
        number = int(self._agree()[0])
        return signal.Signals(number).name if number else ""

    def close(self) -> None:
        """Leave signals to what was there before."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._agree.free()
