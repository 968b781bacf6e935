"""Schedules with whole backward passes: naive, GPipe and 1F1B with one stage per rank, and with several.

Of several, stage s belongs to rank s % p, so that a micro-batch passes all ranks once for each of a rank's v stages.

Sources: Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism", 2019, section
2.3; Narayanan et al., "PipeDream: Generalized Pipeline Parallelism for DNN Training", 2019, section 3.2 (1F1B), and
"Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", 2021, sections 2.2.1 (with a flush)
and 2.2.2 (interleaved); Lamy-Poirier, "Breadth-First Pipeline Parallelism", 2022.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain

from parallelism.pipeline.schedule.actions import Schedule
from parallelism.step.actions import BACKWARD, FORWARD, Action


def naive(num_ranks: int, num_micro_batches: int) -> Schedule:
    """Let one stage compute at a time: a micro-batch goes forward and backward before the next one begins."""
    return alternating("naive", [1] * num_ranks, [range(num_micro_batches)])


def gpipe(num_ranks: int, num_micro_batches: int) -> Schedule:
    """Run all forward passes, then all backward passes.  Bubble (p-1)/(m+p-1), all activations live."""
    return alternating("gpipe", [num_micro_batches] * num_ranks, [range(num_micro_batches)])


def one_f_one_b(num_ranks: int, num_micro_batches: int) -> Schedule:
    """Run forward passes until the first backward pass is possible, then alternate.

    Bubble (p-1)/(m+p-1) as GPipe's, but stage s has at most p-s live activations.
    """
    num_ahead = [min(num_ranks - stage, num_micro_batches) for stage in range(num_ranks)]
    return alternating("1f1b", num_ahead, [range(num_micro_batches)])


def interleaved(num_ranks: int, num_micro_batches: int, virtual_stages: int) -> Schedule:
    """Run 1F1B in groups of p micro-batches: a group passes all of a rank's stages before the next one enters.

    Bubble (p-1)/(v m) of the ideal time if p divides m.  Otherwise it is the schedule for the next such m, without the
    excess micro-batches, which are removed from the first group, where that costs least.  Removing them cannot cause a
    deadlock; running smaller groups by the same rule can.
    """
    num_absent = -num_micro_batches % num_ranks
    groups = [range(first, first + num_ranks) for first in range(-num_absent, num_micro_batches, num_ranks)]
    last = range(2 * num_ranks - 1, 0, -2)  # each rank's passes of its last stage, or in their place, before a backward
    num_ahead = [(virtual_stages - 1) * num_ranks + number for number in last]
    peaks = [(virtual_stages - 1) * min(num_ranks, num_micro_batches) + min(n, num_micro_batches) for n in last]
    return replace(alternating("interleaved", num_ahead, groups, virtual_stages), peaks=tuple(peaks))


def breadth_first(num_ranks: int, num_micro_batches: int, virtual_stages: int) -> Schedule:
    """Run all micro-batches through a rank's first stage, then through its next, and back.

    Bubble (p-1)/(v m) of the ideal time if m >= p, all activations live.  A stage's backward passes are consecutive,
    so that the all-reduce of its gradients overlaps with those of the next stage.
    """
    num_ahead = [virtual_stages * num_micro_batches] * num_ranks
    return alternating("breadth_first", num_ahead, [range(num_micro_batches)], virtual_stages)


def alternating(name: str, num_ahead: Sequence[int], groups: Sequence[range], virtual_stages: int = 1) -> Schedule:
    """Run each rank's `num_ahead` forward passes, which is its peak, then alternate backward and forward passes.

    Each group of micro-batches passes all of a rank's stages before the next one; micro-batches below 0 are left out.
    """
    orders = []
    for rank, number in enumerate(num_ahead):
        stages = range(rank, len(num_ahead) * virtual_stages, len(num_ahead))
        forward, backward = (
            [Action(stage, kind, micro_batch) for group in groups for stage in own for micro_batch in group]
            for kind, own in ((FORWARD, stages), (BACKWARD, stages[::-1]))
        )
        later = forward[number:]
        steady = chain.from_iterable(zip(backward, later, strict=False))
        order = (*forward[:number], *steady, *backward[len(later) :])
        orders.append(tuple(action for action in order if action.micro_batch >= 0))
    return Schedule(name, tuple(orders), tuple(num_ahead))
