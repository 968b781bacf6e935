"""The learning rate of each step."""

from __future__ import annotations

import math


def learning_rate(iteration: int, lr: float, warmup_iters: int, max_iters: int) -> float:
    """Linear warm-up to `lr`, then a cosine to a tenth of it; iterations count from 1.

    >>> [learning_rate(i, 1.0, 2, 4) for i in (1, 2, 3, 4)]
    [0.5, 1.0, 0.55, 0.1]
    """
    if iteration <= warmup_iters:
        return lr * iteration / warmup_iters
    done = (iteration - warmup_iters) / max(1, max_iters - warmup_iters)
    return lr * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * done)))
