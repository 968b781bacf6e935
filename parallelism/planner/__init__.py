"""The planner: what a step of each layout would take, in memory and time, and which layout is the best."""

from parallelism.planner.layout import Job, Layout
from parallelism.planner.machine import Machine
from parallelism.planner.search import Planned, best

__all__ = ["Job", "Layout", "Machine", "Planned", "best"]
