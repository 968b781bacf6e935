"""Listeners to the events of a training step, which the pipeline driver emits, and modules in custom training loops.

Data parallelism and ZeRO are listeners, as are step timers, trace recorders and gradient monitors.
"""

from __future__ import annotations

import time

import numpy as np
from torch import Tensor

import collectives
from parallelism.buffers.tensor_collectives import ExposedTime
from parallelism.step.actions import Action, StageMessage

SHARED = -1  # in place of a layer's number, and before all of these: for parameters of several layers or of none


class Listener(ExposedTime):
    """Base class: ignores a step's events, which are the same and in the same order on ranks with the same stages."""

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


class StepTimes(Listener):
    """Measures the latest schedule that this rank ran, `span_s`, and its actions, `busy_s`, in seconds.

    The time between actions is spent waiting for other ranks.
    """

    busy_s = span_s = 0.0

    def before_passes(self) -> None:
        self.busy_s, self._begin_s = 0.0, time.perf_counter()
        self._idle_cpu_s = time.thread_time()

    def before(self, action: Action, following: Action | None) -> None:
        self._action_begin_s = time.perf_counter()
        self.exposed_cpu_s += time.thread_time() - self._idle_cpu_s

    def after(self, action: Action) -> None:
        self.busy_s += time.perf_counter() - self._action_begin_s
        self._idle_cpu_s = time.thread_time()

    def after_passes(self) -> None:
        self.span_s = time.perf_counter() - self._begin_s
        self.exposed_s += self.span_s - self.busy_s
        self.exposed_cpu_s += time.thread_time() - self._idle_cpu_s

    def bubble(self, comm: collectives.Communicator) -> float | None:
        """Return the idle fraction of the step, 0 to 1, over the ranks of `comm`; None for one rank.  Collective."""
        if comm.size == 1:
            return None
        busy_s = comm.all_reduce(np.array([self.busy_s]), op="avg")[0]
        return float(1 - busy_s / comm.all_reduce(np.array([self.span_s]), op="max")[0])
