"""Events of a training step, and their listeners.

The pipeline driver emits them, and so do modules in custom training loops.  Data parallelism and ZeRO are listeners, as
are step timers, trace recorders and gradient monitors.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from torch import Tensor

import collectives
from parallelism.buffers.tensor_collectives import ExposedTime
from parallelism.pipeline.schedule.actions import Action
from parallelism.pipeline.schedule.messages import StageMessage

SHARED = -1  # in place of a layer's number, and before all of these: for parameters of several layers or of none


class Listener(ExposedTime):
    """Base class: is notified of a step's events in order, and ignores them.

    Ranks that hold the same stages have the same events in the same order.
    """

    def before_passes(self) -> None:
        """Prepare for this rank's part of a schedule."""

    def after_passes(self) -> None:
        """Finish this rank's part of a schedule, all of whose sends are complete."""

    def before(self, action: Action, following: Action | None) -> None:
        """Prepare for an action; `following` is this rank's next one, or None."""

    def after(self, action: Action) -> None:
        """Handle the end of an action."""

    def before_wait(self, message: StageMessage) -> None:
        """Handle the beginning of a wait for a message from another rank's stage."""

    def after_wait(self, message: StageMessage) -> None:
        """Handle the arrival of a message."""

    def parameters_needed(self, layer: int) -> None:
        """Provide a layer's parameters before it computes, forward or backward."""

    def gradient_ready(self, parameter: Tensor, micro_batch: int) -> None:
        """Handle a gradient that a backward pass has accumulated; micro-batches are numbered in the global batch."""

    def step_done(self) -> None:
        """Make the gradients those of all ranks, after all micro-batches have been computed."""


class Listeners:
    """Listeners of a driver, which are notified in order, of `after` events in reverse order."""

    def __init__(self, *listeners: Listener):
        self.listeners = list(listeners)

    def emit(self, event: str, *arguments: Any) -> None:
        """Call each listener's method with the event's name."""
        for listener in reversed(self.listeners) if event.startswith("after") else self.listeners:
            getattr(listener, event)(*arguments)

    def add(self, listener: Listener) -> None:
        """Add a listener, ahead of the others."""
        self.listeners.insert(0, listener)

    @contextmanager
    def adding(self, listener: Listener) -> Iterator[None]:
        """Add a listener, ahead of the others, for the duration of this context."""
        self.add(listener)
        yield
        self.listeners.remove(listener)


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
