"""Layer times: measure each layer's passes and each rank's speed, to balance stages and to predict schedules' times."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

import collectives
from parallelism.mesh import Mesh
from parallelism.pipeline.balance import relative_speeds
from parallelism.pipeline.schedule.price import Costs
from parallelism.pipeline.stage import Batch, Layer, Stage

FEWEST, MOST = 3, 50  # repeats of a layer's passes
SHORTEST_S = 0.3  # to measure all layers: many times the slices in which a rank gets its share of a core


def measure(model: nn.Module, layers: Sequence[Layer], batch: Batch, comm: collectives.Communicator) -> np.ndarray:
    """Return each layer's seconds on a batch: forward, backward for inputs, backward for weights.

    They are in proportion to the least of each, which vary less than the mean, and add up to the mean of all.
    Gradients and buffers do not change.  Collective, as layers communicate; each rank returns its own times.

    Shapes: (layers, 3).
    """
    gradients, buffers = {p: p.grad for p in model.parameters()}, {b: b.clone() for b in model.buffers()}
    model.zero_grad(set_to_none=True)
    _, once_s = (np.array([sweep(layers, batch, 1).sum()]) for _ in range(2))  # the first time all is set up
    repeats = math.ceil(SHORTEST_S / float(comm.all_reduce(once_s, op="min")[0]))
    times_s = sweep(layers, batch, min(max(FEWEST, repeats), MOST))
    for p, gradient in gradients.items():
        p.grad = gradient
    for buffer, value in buffers.items():
        buffer.copy_(value)
    return times_s.min(1) * (times_s.mean(1).sum() / times_s.min(1).sum())


def sweep(layers: Sequence[Layer], batch: Batch, repeats: int) -> np.ndarray:
    """Return the seconds of each layer's passes, (layers, repeats, 3)."""
    x, times_s = None, []
    for layer in layers:
        stage = Stage(layer, splits=True)
        times_s.append([passes_s(stage, x, batch) for _ in range(repeats)])
        with torch.no_grad():
            x = stage.forward(0, x, batch)
    return np.array(times_s)


def speeds(seconds: float, mesh: Mesh) -> list[float]:
    """Return the speed of each rank of a pipeline beside the fast ones, from the seconds of the same work.  Collective.

    It is that of the slowest replica.
    """
    replicas = mesh.along(*(axis for axis in mesh.shape if axis != "pp"))
    slowest_s = mesh.pp.all_gather(replicas.all_reduce(np.array([seconds]), op="max"))
    return relative_speeds(slowest_s.tolist())


def agreed(times_s: np.ndarray, comm: collectives.Communicator, counts: bool = True) -> np.ndarray:
    """Return the mean of the times of ranks that count, identical on all.  Collective."""
    number = comm.all_reduce(np.array([float(counts)]))
    return comm.broadcast(comm.all_reduce(times_s * counts) / number)


def message_s(x: Tensor, comm: collectives.Communicator, repeats: int = 5) -> float:
    """Return the seconds that such a tensor takes from rank 0 to rank 1, the same on all ranks.  Collective."""
    x, shortest = x.detach().contiguous(), np.full(1, np.inf)
    for _ in range(repeats if comm.rank < 2 else 0):
        begin = time.perf_counter()
        for act in (comm.send, comm.recv)[:: 1 if comm.rank == 0 else -1]:
            act(x, 1 - comm.rank)
        shortest = np.minimum(shortest, (time.perf_counter() - begin) / 2)
    return float(comm.all_reduce(shortest, op="min")[0])


def stage_costs(times_s: np.ndarray, parts: Sequence[range], message: float, speeds: Sequence[float]) -> Costs:
    """Return the costs of stages, given the layers and the speed of each.

    >>> stage_costs(np.array([[1, 2, 3], [1, 1, 1], [4, 4, 4]]), [range(0, 2), range(2, 3)], 0.5, [1, 0.5])
    Costs(forward=[2.0, 8.0], inputs=[3.0, 8.0], weights=[4.0, 8.0], message=0.5)
    """
    each_s = [times_s[part.start : part.stop].sum(0) / speed for part, speed in zip(parts, speeds, strict=True)]
    forward, inputs, weights = np.transpose(each_s).tolist()
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
