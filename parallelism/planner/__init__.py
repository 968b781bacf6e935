"""Planner: predict the memory and time of a training step for each parallel layout, and select the best."""

from typing import TYPE_CHECKING

from parallelism.lazy import lazily

if TYPE_CHECKING:
    from parallelism.planner.layout import ParallelLayout, TrainingJob
    from parallelism.planner.place import Machine
    from parallelism.planner.search import PlannedLayout, best
    from parallelism.planner.shape import ModelShape

__all__ = ["Machine", "ModelShape", "ParallelLayout", "PlannedLayout", "TrainingJob", "best"]
__getattr__, __dir__ = lazily(__name__)
