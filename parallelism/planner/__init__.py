"""The planner: what a step of each layout would take, in memory and time, and which layout is the best."""

from parallelism.planner.layout import ParallelLayout, TrainingJob
from parallelism.planner.machine import Machine
from parallelism.planner.search import PlannedLayout, best

__all__ = ["Machine", "ParallelLayout", "PlannedLayout", "TrainingJob", "best"]
