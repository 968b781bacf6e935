"""Schedules with whole backward passes: naive, GPipe and 1F1B with one stage per rank, and with several.

Of several, stage s belongs to rank s % p, so that a micro-batch passes all ranks once for each of a rank's v stages.

Sources: Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism", 2019, section
2.3; Narayanan et al., "PipeDream: Generalized Pipeline Parallelism for DNN Training", 2019, section 3.2 (1F1B), and
"Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", 2021, sections 2.2.1 (with a flush)
and 2.2.2 (interleaved); Lamy-Poirier, "Breadth-First Pipeline Parallelism", 2022.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import chain

from parallelism.pipeline.schedule.actions import BACKWARD, FORWARD, Action, Order, Schedule


def naive(num_ranks: int, num_micro_batches: int) -> Schedule:
    """Let one stage compute at a time: a micro-batch goes forward and backward before the next one begins."""
    steps = [(kind, micro_batch) for micro_batch in range(num_micro_batches) for kind in (FORWARD, BACKWARD)]
    orders = [tuple(Action(stage, *step) for step in steps) for stage in range(num_ranks)]
    return Schedule("naive", tuple(orders), (1,) * num_ranks)


def gpipe(num_ranks: int, num_micro_batches: int) -> Schedule:
    """Run all forward passes, then all backward passes.  Bubble (p-1)/(m+p-1), all activations live."""
    return replace(breadth_first(num_ranks, num_micro_batches, 1), name="gpipe")


def one_f_one_b(num_ranks: int, num_micro_batches: int) -> Schedule:
    """Run forward passes until the first backward pass is possible, then alternate.

    Bubble (p-1)/(m+p-1) as GPipe's, but stage s has at most p-s live activations.
    """
    peaks = tuple(min(num_ranks - stage, num_micro_batches) for stage in range(num_ranks))
    every = [range(num_micro_batches)]
    orders = []
    for stage, peak in enumerate(peaks):
        forward, backward = (rounds([stage], kind, every) for kind in (FORWARD, BACKWARD))
        orders.append(alternate(forward, backward, peak))
    return Schedule("1f1b", tuple(orders), peaks)


def alternate(forward: list[Action], backward: list[Action], num_ahead: int) -> Order:
    """Run `num_ahead` forward passes, then alternate backward and forward passes."""
    later = forward[num_ahead:]
    steady = chain.from_iterable(zip(backward, later, strict=False))
    return (*forward[:num_ahead], *steady, *backward[len(later) :])


def interleaved(num_ranks: int, num_micro_batches: int, virtual_stages: int) -> Schedule:
    """Run 1F1B in groups of p micro-batches: a group passes all of a rank's stages before the next one enters.

    Bubble (p-1)/(v m) of the ideal time if p divides m.  Otherwise it is the schedule for the next such m, without the
    excess micro-batches, which are removed from the first group, where that costs least.  Removing them cannot cause a
    deadlock; running smaller groups by the same rule can.
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
    """
    every = [range(num_micro_batches)]
    orders = []
    for rank in range(num_ranks):
        stages = range(rank, num_ranks * virtual_stages, num_ranks)
        orders.append((*rounds(stages, FORWARD, every), *rounds(stages[::-1], BACKWARD, every)))
    return Schedule("breadth_first", tuple(orders), (virtual_stages * num_micro_batches,) * num_ranks)


def rounds(stages: Sequence[int], kind: str, groups: Iterable[range]) -> list[Action]:
    """Pass each group of micro-batches through all stages."""
    return [Action(stage, kind, micro_batch) for group in groups for stage in stages for micro_batch in group]
