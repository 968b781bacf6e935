"""The events of a step, and who listens to them.

The driver of a schedule emits them, and so does a module in a loop of the user's own; data parallelism and ZeRO listen.
"""

from __future__ import annotations

from torch import Tensor

from parallelism.data.exposed_time import ExposedTime
from parallelism.pipeline.schedule.actions import Action

SHARED = -1  # instead of a layer's number, before all of these: of several layers, or of none


class Listener(ExposedTime):
    """Hears what happens in a step, in its order; does nothing about it.

    Ranks that hold the same stages hear the same events of their schedule in the same order.
    """

    def before(self, action: Action, following: Action | None) -> None:
        """An action begins; `following` is this rank's next one, or None."""

    def after(self, action: Action) -> None:
        """An action has ended."""

    def parameters_needed(self, layer: int) -> None:
        """A layer is about to compute, forward or backward."""

    def parameters_done(self, layer: int) -> None:
        """A layer has computed, and need not keep its parameters.  The driver of a schedule does not tell."""

    def gradient_ready(self, parameter: Tensor, micro_batch: int) -> None:
        """A backward pass has added the gradient of a micro-batch, numbered within the global batch, to a parameter."""

    def step_done(self) -> None:
        """All micro-batches have been computed: from here on gradients are those of all ranks."""
