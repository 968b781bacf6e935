"""Schedules with one stage per rank: naive, GPipe, 1F1B.

Sources: Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism", 2019, section
2.3; Narayanan et al., "PipeDream: Generalized Pipeline Parallelism for DNN Training", 2019, section 3.2 (1F1B), and
"Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", 2021, section 2.2.1 (with a flush).
"""

from __future__ import annotations

from itertools import chain

from parallelism.pipeline.schedule.actions import BACKWARD, FORWARD, Action, Order, Schedule


def passes(stage: int, kind: str, micro_batches: range) -> list[Action]:
    return [Action(stage, kind, micro_batch) for micro_batch in micro_batches]


def naive(num_ranks: int, num_micro_batches: int) -> Schedule:
    """Let one stage compute at a time: a micro-batch goes forward and backward before the next one begins."""
    orders = [
        tuple(chain.from_iterable((Action(s, FORWARD, m), Action(s, BACKWARD, m)) for m in range(num_micro_batches)))
        for s in range(num_ranks)
    ]
    return Schedule("naive", tuple(orders), (1,) * num_ranks)


def gpipe(num_ranks: int, num_micro_batches: int) -> Schedule:
    """Run all forward passes, then all backward passes.  Bubble (p-1)/(m+p-1), all activations live."""
    every = range(num_micro_batches)
    orders = [(*passes(stage, FORWARD, every), *passes(stage, BACKWARD, every)) for stage in range(num_ranks)]
    return Schedule("gpipe", tuple(orders), (num_micro_batches,) * num_ranks)


def one_f_one_b(num_ranks: int, num_micro_batches: int) -> Schedule:
    """Run forward passes until the first backward pass is possible, then alternate.

    Bubble (p-1)/(m+p-1) as GPipe's, but stage s has at most p-s live activations.
    """
    peaks = tuple(min(num_ranks - stage, num_micro_batches) for stage in range(num_ranks))
    every = range(num_micro_batches)
    orders = [
        alternate(passes(stage, FORWARD, every), passes(stage, BACKWARD, every), peak)
        for stage, peak in enumerate(peaks)
    ]
    return Schedule("1f1b", tuple(orders), peaks)


def alternate(forward: list[Action], backward: list[Action], num_ahead: int) -> Order:
    """Run `num_ahead` forward passes, then alternate backward and forward passes."""
    later = forward[num_ahead:]
    steady = chain.from_iterable(zip(backward, later, strict=False))
    return (*forward[:num_ahead], *steady, *backward[len(later) :])
