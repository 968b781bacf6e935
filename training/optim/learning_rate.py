"""Learning rate schedules."""

from __future__ import annotations

import math
from collections.abc import Callable

STABLE = "wsd"  # warm-up, stable, decay

# Remaining fraction of the decay, 1 to 0, by the fraction of decay steps done, 0 to 1.
COURSES: dict[str, Callable[[float], float]] = {
    "cosine": lambda progress: 0.5 * (1 + math.cos(math.pi * progress)),
    "linear": lambda progress: 1 - progress,
    "constant": lambda progress: 1.0,
    STABLE: lambda progress: 1 - progress,
}


def learning_rate(
    iteration: int,
    lr: float,
    warmup_iters: int,
    max_iters: int,
    schedule: str = "cosine",
    min_lr: float | None = None,
    decay_iters: int | None = None,
) -> float:
    """Return the learning rate: linear warm-up to `lr`, then decay to `min_lr`, or a tenth; iterations count from 1.

    The decay ends at step `decay_iters`, or `max_iters`.  With "wsd" it takes the last `decay_iters` steps, or a fifth
    of all.

    >>> [learning_rate(i, 1.0, 2, 4) for i in (1, 2, 3, 4)]
    [0.5, 1.0, 0.55, 0.1]
    >>> [learning_rate(i, 1.0, 0, 5, "wsd", min_lr=0.0, decay_iters=2) for i in (1, 2, 3, 4, 5)]
    [1.0, 1.0, 1.0, 0.5, 0.0]

    Source: nanoGPT, `get_lr` in train.py; Hu et al., "MiniCPM: Unveiling the Potential of Small Language Models with
    Scalable Training Strategies", 2024, arXiv 2404.06395 (warm-up, stable, decay; there the decay is exponential).
    """
    if iteration <= warmup_iters:
        return lr * iteration / warmup_iters
    begin, end = warmup_iters, decay_iters or max_iters
    if schedule == STABLE:
        begin, end = max(begin, max_iters - (decay_iters or math.ceil(max_iters / 5))), max_iters
    least = lr / 10 if min_lr is None else min_lr
    progress = min(1.0, max(0.0, (iteration - begin) / max(1, end - begin)))
    weight = COURSES[schedule](progress)
    return weight * lr + (1 - weight) * least
