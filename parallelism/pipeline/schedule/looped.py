"""Schedules with several stages per rank, assigned round-robin: interleaved 1F1B and breadth-first.

Stage s belongs to rank s % p, so that a micro-batch passes all ranks once for each of a rank's v stages.
"""

from __future__ import annotations

from collections.abc import Iterable

from parallelism.pipeline.schedule.actions import BACKWARD, FORWARD, Action, Schedule
from parallelism.pipeline.schedule.basic import alternate, passes


def interleaved(num_ranks: int, num_micro_batches: int, virtual_stages: int) -> Schedule:
    """Run 1F1B in groups of p micro-batches: a group passes all of a rank's stages before the next one enters.

    Bubble (p-1)/(v m) of the ideal time if p divides m.  Otherwise it is the schedule for the next such m, without the
    excess micro-batches, which are removed from the first group, where that costs least.  Removing them cannot cause a
    deadlock; running smaller groups by the same rule can.

    Source: Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", 2021,
    section 2.2.2.
    """
    num_absent = -num_micro_batches % num_ranks
    groups = [range(first, first + num_ranks) for first in range(-num_absent, num_micro_batches, num_ranks)]
    orders, peaks = [], []
    for rank in range(num_ranks):
        stages = range(rank, num_ranks * virtual_stages, num_ranks)
        num_ahead = 2 * (num_ranks - 1 - rank) + 1  # passes of the last stage, or in their place, before any backward
        forward, backward = rounds(stages, FORWARD, groups), rounds(stages[::-1], BACKWARD, groups)
        order = alternate(forward, backward, (virtual_stages - 1) * num_ranks + num_ahead)
        orders.append(tuple(action for action in order if action.micro_batch >= 0))
        peaks.append((virtual_stages - 1) * min(num_ranks, num_micro_batches) + min(num_ahead, num_micro_batches))
    return Schedule("interleaved", tuple(orders), tuple(peaks))


def breadth_first(num_ranks: int, num_micro_batches: int, virtual_stages: int) -> Schedule:
    """Run all micro-batches through a rank's first stage, then through its next, and back.

    Bubble (p-1)/(v m) of the ideal time if m >= p, all activations live.  A stage's backward passes are consecutive,
    so that the all-reduce of its gradients overlaps with those of the next stage.

    Source: Lamy-Poirier, "Breadth-First Pipeline Parallelism", 2022.
    """
    every = [range(num_micro_batches)]
    orders = []
    for rank in range(num_ranks):
        stages = range(rank, num_ranks * virtual_stages, num_ranks)
        orders.append((*rounds(stages, FORWARD, every), *rounds(stages[::-1], BACKWARD, every)))
    return Schedule("breadth_first", tuple(orders), (virtual_stages * num_micro_batches,) * num_ranks)


def rounds(stages: range, kind: str, groups: Iterable[range]) -> list[Action]:
    """Pass each group through all stages."""
    return [action for group in groups for stage in stages for action in passes(stage, kind, group)]
