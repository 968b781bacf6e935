"""What every driver of a step uses: events, local parameters, deferred gradients, the interface of optimizers."""

from typing import TYPE_CHECKING

from parallelism.lazy import lazily

if TYPE_CHECKING:
    from parallelism.step.actions import Action
    from parallelism.step.deferred import WeightGradients, deferring
    from parallelism.step.events import Listener, StepTimes
    from parallelism.step.local_parameters import LocalParameters
    from parallelism.step.optimizer import Optimizer

__all__ = ["Action", "Listener", "LocalParameters", "Optimizer", "StepTimes", "WeightGradients", "deferring"]
__getattr__, __dir__ = lazily(__name__)
