"""How a GPT is updated: AdamW, and a learning rate that warms up and falls along a cosine."""

import math
from collections.abc import Iterable

import torch
from torch import nn


def adamw(params: Iterable[nn.Parameter], lr: float, weight_decay: float) -> torch.optim.AdamW:
    """AdamW with weight decay on matrices only, not on biases and norms.

    It reads and writes each number once, on a GPU by few kernels: parameters in an arena begin where those want them.
    """
    params = list(params)
    groups = [
        {"params": [p for p in params if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), fused=True)


def learning_rate(iteration: int, lr: float, warmup_iters: int, max_iters: int) -> float:
    """Linear warm-up to `lr`, then a cosine to a tenth of it; iterations count from 1.

    >>> [learning_rate(i, 1.0, 2, 4) for i in (1, 2, 3, 4)]
    [0.5, 1.0, 0.55, 0.1]
    """
    if iteration <= warmup_iters:
        return lr * iteration / warmup_iters
    done = (iteration - warmup_iters) / max(1, max_iters - warmup_iters)
    return lr * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * done)))
