"""Stop signals of batch systems: received by any rank, agreed on by all.

The signal must reach a rank: Open MPI's mpirun (tested: 5.0.11) forwards SIGUSR1, but ends the job when it receives
SIGTERM itself.
"""

from __future__ import annotations

import signal
from typing import Any

import numpy as np

import collectives

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class Stop:
    """Records SIGTERM or SIGUSR1 received by any rank, until `close()`.  Construction and `received` are collective."""

    def __init__(self, comm: collectives.Communicator):
        self.noted = 0
        self.highest = np.zeros(1, np.int64)
        self._agree = comm.plan("all_reduce", self.highest, op="max")
        self._before = {number: signal.signal(number, self._note) for number in SIGNALS}

    def _note(self, number: int, frame: Any) -> None:
        self.noted = number

    def received(self) -> str:
        """Return the name of a signal that some rank has received, or ""; the result is the same on all ranks."""
        self.highest[0] = self.noted
        number = int(self._agree()[0])
        return signal.Signals(number).name if number else ""

    def close(self) -> None:
        """Restore the previous signal handlers, except those that Python cannot set."""
        for number, handler in self._before.items():
            if handler is not None:
                signal.signal(number, handler)
        self._agree.free()
