"""Step times: measure how long steps take, and the part of it that ranks spend computing."""

from __future__ import annotations

import time

import numpy as np

import collectives
from parallelism.pipeline.events import Listener
from parallelism.pipeline.schedule.actions import Action


class StepTimes(Listener):
    """Accumulates the time of this rank's actions, `busy_s`, and of the schedules it runs, `span_s`, in seconds."""

    def __init__(self) -> None:
        self.busy_s = self.span_s = 0.0
        self.last = 0.0, 0.0  # busy and span of the last schedule

    def before_passes(self) -> None:
        self._busy_before_s, self._begin_s = self.busy_s, time.perf_counter()

    def before(self, action: Action, following: Action | None) -> None:
        self._action_begin_s = time.perf_counter()

    def after(self, action: Action) -> None:
        self.busy_s += time.perf_counter() - self._action_begin_s

    def after_passes(self) -> None:
        self.last = self.busy_s - self._busy_before_s, time.perf_counter() - self._begin_s
        self.span_s += self.last[1]

    @property
    def waited_s(self) -> float:
        """Time between actions, spent waiting for other ranks, in seconds."""
        return self.span_s - self.busy_s

    def bubble(self, comm: collectives.Communicator) -> float | None:
        """Return the idle fraction of the last step, 0 to 1, over the ranks of `comm`; None for one rank.

        Collective.
        """
        if comm.size == 1:
            return None
        busy_s, span_s = self.last
        busy = comm.all_reduce(np.array([busy_s]), op="avg")[0]
        return float(1 - busy / comm.all_reduce(np.array([span_s]), op="max")[0])
