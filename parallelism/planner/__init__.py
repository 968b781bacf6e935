"""Planner: predict the memory and time of a training step for each parallel layout, and select the best."""

from parallelism.planner.layout import ParallelLayout, TrainingJob
from parallelism.planner.place import Machine
from parallelism.planner.search import PlannedLayout, best

__all__ = ["Machine", "ParallelLayout", "PlannedLayout", "TrainingJob", "best"]
