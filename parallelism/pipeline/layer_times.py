"""Layer times: measure each layer's passes, to balance stages and to predict the times of schedules."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

import collectives
from parallelism.pipeline.schedule.price import Costs
from parallelism.pipeline.stage import Batch, Layer, Stage

REPEATS = 3  # of a layer's passes


def measure(model: nn.Module, layers: Sequence[Layer], batch: Batch) -> np.ndarray:
    """Return each layer's minimum seconds on a batch: forward, backward for inputs, backward for weights.

    Gradients do not change.  Collective if the layers communicate; each rank returns its own times.

    Shapes: (layers, 3).
    """
    gradients = {p: p.grad for p in model.parameters()}
    model.zero_grad(set_to_none=True)
    x, times_s = None, []
    for layer in layers:
        stage = Stage(layer, splits=True)
        times_s.append(np.min([passes_s(stage, x, batch) for _ in range(REPEATS)], axis=0))
        with torch.no_grad():
            x = stage.forward(0, x, batch)
    for p, gradient in gradients.items():
        p.grad = gradient
    return np.array(times_s)


def agreed(times_s: np.ndarray, comm: collectives.Communicator) -> np.ndarray:
    """Return the mean times over all ranks, identical on each.  Collective."""
    return comm.broadcast(comm.all_reduce(times_s, op="avg"))


def message_s(x: Tensor, comm: collectives.Communicator, repeats: int = 5) -> float:
    """Return the seconds that such a tensor takes from rank 0 to rank 1, the same on all ranks.  Collective."""
    x, shortest = x.detach().contiguous(), np.full(1, np.inf)
    for _ in range(repeats if comm.rank < 2 else 0):
        begin = time.perf_counter()
        for act in (comm.send, comm.recv)[:: 1 if comm.rank == 0 else -1]:
            act(x, 1 - comm.rank)
        shortest = np.minimum(shortest, (time.perf_counter() - begin) / 2)
    return float(comm.all_reduce(shortest, op="min")[0])


def stage_costs(times_s: np.ndarray, parts: Sequence[range], message: float) -> Costs:
    """Return the costs of stages, given the layers of each.

    >>> stage_costs(np.array([[1, 2, 3], [1, 1, 1], [4, 4, 4]]), [range(0, 2), range(2, 3)], message=0.5)
    Costs(forward=[2, 4], inputs=[3, 4], weights=[4, 4], message=0.5)
    """
    forward, inputs, weights = np.transpose([times_s[part.start : part.stop].sum(0) for part in parts]).tolist()
    return Costs(forward, inputs, weights, message)


def passes_s(stage: Stage, x: Tensor | None, batch: Batch) -> np.ndarray:
    """Return the seconds of a stage's forward pass, and of its backward pass for inputs and for weights."""
    device = batch.tokens.device
    marks = [now(device)]
    y = stage.forward(0, x, batch)
    marks.append(now(device))
    stage.backward_inputs(0, torch.ones_like(y))
    marks.append(now(device))
    stage.backward_weights(0)
    return np.diff([*marks, now(device)])


def now(device: torch.device | str) -> float:
    """Return the time in seconds, after waiting for the work queued on a device."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
