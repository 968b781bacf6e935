"""The events of a step, and who listens to them.

The driver of a schedule emits them, and so does a module in a loop of the user's own; data parallelism and ZeRO listen,
and so do what times a step, records its trace, or looks at its gradients.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from parallelism.buffers.exposed_time import ExposedTime
from parallelism.pipeline.schedule.actions import Action
from parallelism.pipeline.schedule.messages import StageMessage

SHARED = -1  # instead of a layer's number, before all of these: of several layers, or of none


class Listener(ExposedTime):
    """Hears what happens in a step, in its order; does nothing about it.

    Ranks that hold the same stages hear the same events of their schedule in the same order.
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
    """Those who listen to a driver.  Who comes first hears first of each event, and last of what is after another."""

    def __init__(self, *listeners: Listener):
        self.listeners = list(listeners)

    def emit(self, event: str, *arguments: Any) -> None:
        """Call the method of each listener that is named as the event."""
        for listener in reversed(self.listeners) if event.startswith("after") else self.listeners:
            getattr(listener, event)(*arguments)

    def add(self, listener: Listener) -> None:
        """Let a listener hear from now on, ahead of the others."""
        self.listeners.insert(0, listener)

    @contextmanager
    def adding(self, listener: Listener) -> Iterator[None]:
        """Let a listener hear what happens in this context, ahead of the others."""
        self.add(listener)
        yield
        self.listeners.remove(listener)
