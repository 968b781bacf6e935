"""Layer times: measure each layer's passes, to balance stages and to predict the times of schedules."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

import collectives
from parallelism.pipeline.schedule.price import Costs
from parallelism.pipeline.stage import Batch, Layer, Stage, nothing


class LayerTimes(NamedTuple):
    """Times of a layer's passes in seconds: forward, backward for inputs, backward for weights."""

    forward: float
    inputs: float
    weights: float


def measure(
    model: nn.Module,
    layers: Sequence[Layer],
    batch: Batch,
    prepare: Callable[[Batch], None] = nothing,
    repeats: int = 3,
) -> list[LayerTimes]:
    """Measure each layer's minimum times on a batch.  Gradients do not change.

    Collective if the layers communicate; each rank returns its own times.
    """
    gradients = {p: p.grad for p in model.parameters()}
    model.zero_grad(set_to_none=True)
    x, times = None, []
    for layer in layers:
        stage = Stage(layer, prepare, splits=True)
        runs = [passes(stage, x, batch) for _ in range(repeats)]
        times.append(LayerTimes(*map(min, zip(*runs, strict=True))))
        with torch.no_grad():
            x = stage.forward(0, x, batch)
    for p, gradient in gradients.items():
        p.grad = gradient
    return times


def agreed(times: Sequence[LayerTimes], comm: collectives.Communicator) -> list[LayerTimes]:
    """Return the mean times over all ranks, identical on each.  Collective."""
    means = comm.broadcast(comm.all_reduce(np.array(times), op="avg"))
    return [LayerTimes(*row) for row in means.tolist()]


def message_s(x: Tensor, comm: collectives.Communicator, repeats: int = 5) -> float:
    """Return the seconds that such a tensor takes from rank 0 to rank 1, the same on all ranks.  Collective."""
    x, shortest = x.detach().contiguous(), np.full(1, np.inf)
    for _ in range(repeats if comm.rank < 2 else 0):
        begin = time.perf_counter()
        for act in (comm.send, comm.recv)[:: 1 if comm.rank == 0 else -1]:
            act(x, 1 - comm.rank)
        shortest = np.minimum(shortest, (time.perf_counter() - begin) / 2)
    return float(comm.all_reduce(shortest, op="min")[0])


def stage_costs(times: Sequence[LayerTimes], parts: Sequence[range], message: float) -> Costs:
    """Return the costs of stages, given the layers of each.

    >>> times = [LayerTimes(1, 2, 3), LayerTimes(1, 1, 1), LayerTimes(4, 4, 4)]
    >>> stage_costs(times, [range(0, 2), range(2, 3)], message=0.5)
    Costs(forward=[2, 4], inputs=[3, 4], weights=[4, 4], message=0.5)
    """
    stages = [LayerTimes(*map(sum, zip(*times[part.start : part.stop], strict=True))) for part in parts]
    forward, inputs, weights = map(list, zip(*stages, strict=True))
    return Costs(forward, inputs, weights, message)


def passes(stage: Stage, x: Tensor | None, batch: Batch) -> LayerTimes:
    device = batch.tokens.device
    begin = now(device)
    y = stage.forward(0, x, batch)
    forward = now(device)
    stage.backward_inputs(0, torch.ones_like(y))
    inputs = now(device)
    stage.backward_weights(0)
    return LayerTimes(forward - begin, inputs - forward, now(device) - inputs)


def now(device: torch.device | str) -> float:
    """Return the time in seconds, after waiting for the work queued on a device."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
