"""How long each layer's passes take: what stages are balanced by, and schedules are priced with."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from parallelism.stage import Batch, Layer, Stage, nothing


class Times(NamedTuple):
    """Seconds of a layer's passes: forward, and backward for inputs and for weights."""

    forward: float
    inputs: float
    weights: float


def measure(
    model: nn.Module,
    layers: Sequence[Layer],
    batch: Batch,
    prepare: Callable[[Batch], None] = nothing,
    repeats: int = 3,
) -> list[Times]:
    """The shortest times of each layer on a batch.  Gradients stay as they are.

    Collective where ranks share layers; each then has times of its own.

    >>> from models.gpt import GPT, GPTConfig
    >>> from parallelism.partition import balance
    >>> from parallelism.stage import gpt2_layers
    >>> gpt, tokens = GPT(GPTConfig(n_layer=5)), torch.zeros(2, 8, dtype=torch.int64)
    >>> costs = [sum(times) for times in measure(gpt, gpt2_layers(gpt), Batch(tokens, targets=tokens))]
    >>> sum(len(part) for part in balance(costs, num_stages=2))
    5
    """
    gradients = {p: p.grad for p in model.parameters()}
    model.zero_grad(set_to_none=True)
    x, found = None, []
    for layer in layers:
        stage = Stage(layer, prepare, splits=True)
        runs = [passes(stage, x, batch) for _ in range(repeats)]
        found.append(Times(*map(min, zip(*runs, strict=True))))
        with torch.no_grad():
            x = stage.forward(0, x, batch)
    for p, gradient in gradients.items():
        p.grad = gradient
    return found


def passes(stage: Stage, x: Tensor | None, batch: Batch) -> Times:
    begin = now(batch.tokens)
    y = stage.forward(0, x, batch)
    forward = now(y)
    stage.backward_inputs(0, torch.ones_like(y))
    inputs = now(y)
    stage.backward_weights(0)
    return Times(forward - begin, inputs - forward, now(y) - inputs)


def now(x: Tensor) -> float:
    """Once all is done that was asked of the device where `x` is."""
    if x.is_cuda:
        torch.cuda.synchronize(x.device)
    return time.perf_counter()
