"""ZeRO scene: the parameters, gradients and optimizer states that a rank holds, event by event of a step.

The events come from ZeRO's own code, run here as one rank of several, with collectives that move no data: their effect
on a rank's memory does not depend on the values.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from parallelism.data.units import ShardGroups
from parallelism.zero.sharded import Sharded
from teaching.page.assemble import Scene

LAYERS = 4
RANKS = (2, 3, 4, 8)
SHARD_LENGTH = 128  # of a layer
MICRO_BATCHES = (1, 2)
NONE, SHARD, MOVING, WHOLE = range(4)  # a rank's part of a layer; MOVING: all of it, during a collective


def scene() -> Scene:
    data = {
        f"{stage}": {f"{size}x{count}": trace(stage, size, count) for size in RANKS for count in MICRO_BATCHES}
        for stage in (0, 1, 2, 3)
    }
    return Scene("zero", data)


class Held(NamedTuple):
    """A rank's parts of each layer's parameters, gradients and optimizer states: one of NONE to WHOLE each."""

    parameters: list[int]
    gradients: list[int]
    optimizer: list[int]


class StillPlan:
    """A collective that moves no data, and reports when it begins and ends."""

    def __init__(self, recorder: EventLog, collective: str, sent: int):
        self.recorder, self.collective, self.sent = recorder, collective, sent
        self.layer = -1
        self.under_way = False

    def start(self) -> StillPlan:
        self.under_way = True
        self.recorder.sent += self.sent
        self.recorder.event(f"{self.collective} begins", self.layer)
        return self

    def wait(self) -> None:
        if self.under_way:
            self.under_way = False
            if self.collective != "all-gather":
                self.recorder.has_gradient[self.layer] = SHARD if self.collective == "reduce-scatter" else WHOLE
            self.recorder.event(f"{self.collective} ends", self.layer)

    def advance(self) -> None:
        pass

    def done(self) -> bool:
        return False


class StillCommunicator:
    """A communicator of one rank of several, without the others."""

    rank = 0

    def __init__(self, recorder: EventLog, size: int):
        self.recorder, self.size = recorder, size

    @contextmanager
    def agreed(self, name: str) -> Iterator[None]:
        yield

    def empty(self, count: int, dtype: str, device: str) -> Any:
        return np.zeros(count, dtype)

    def broadcast(self, x: Any, root: int = 0) -> Any:
        return x

    def plan(self, collective: str, x: Any, **more: Any) -> StillPlan:
        """Bind a collective; in a ring, a rank sends all but its chunk, twice that for an all-reduce."""
        counts = more.get("counts") or [len(x) // self.size] * self.size
        sent = (sum(counts) - counts[self.rank]) * (2 if collective == "all_reduce" else 1)
        return StillPlan(self.recorder, collective.replace("_", "-"), sent)


class VectorLayer(nn.Module):
    """A layer with a number of elements that the ranks divide evenly."""

    def __init__(self, number: int, size: int, recorder: EventLog):
        super().__init__()
        self.number, self.recorder = number, recorder
        self.weight = nn.Parameter(torch.ones(SHARD_LENGTH * size))

    def forward(self, x: Tensor) -> Tensor:
        self.recorder.event("forward", self.number)
        return x + (self.weight * x).sum()

    def gradient_appears(self, _: Tensor) -> None:
        self.recorder.has_gradient[self.number] = WHOLE
        self.recorder.event("gradient appears", self.number)

    def follow_backward(self, _: nn.Module, inputs: Any, output: Tensor) -> None:
        output.register_hook(lambda gradient: self.recorder.event("backward", self.number))


class EventLog:
    """Events of a step, each with the parts that a rank holds, and the volume it has sent."""

    def __init__(self, zero_stage: int, size: int):
        self.zero_stage, self.size, self.sent = zero_stage, size, 0
        self.rows: list[tuple[str, int, Held, int]] = []
        self.replica: Any = None
        self.has_gradient = [NONE] * LAYERS

    def event(self, what: str, layer: int) -> None:
        if self.replica is not None:
            self.rows.append((what, layer, self.held(), self.sent))

    def held(self) -> Held:
        own = WHOLE if self.zero_stage == 0 else SHARD
        return Held(self.parameters(), self.gradients(), [own] * LAYERS)

    def parameters(self) -> list[int]:
        replica = self.replica
        if self.zero_stage < 3:
            coming = [plan.layer for plan in replica.gathering if plan.under_way]
            return [MOVING if layer in coming else WHOLE for layer in range(LAYERS)]
        layers = [replica.layers[layer] for layer in range(LAYERS)]
        return [WHOLE if layer.here else MOVING if layer.slot.user is layer else SHARD for layer in layers]

    def gradients(self) -> list[int]:
        states = list(self.has_gradient)
        for bucket in self.replica.buckets:
            if bucket.plan.under_way:
                states[bucket.plan.layer] = MOVING
        return states


def trace(zero_stage: int, size: int, num_micro_batches: int) -> list[tuple[str, int, Held, int]]:
    """Run a step by ZeRO's code on a model with some layers, and return its events."""
    recorder = EventLog(zero_stage, size)
    comm: Any = StillCommunicator(recorder, size)
    modules = [VectorLayer(number, size, recorder) for number in range(LAYERS)]
    for layer in modules:
        layer.weight.register_post_accumulate_grad_hook(layer.gradient_appears)  # ahead of ZeRO's own
    model = nn.Sequential(*modules)
    layers = [str(number) for number in range(LAYERS)]

    def make_optimizer(pieces: list[nn.Parameter]) -> Any:
        return torch.optim.SGD([{"params": pieces}], lr=0.0)

    bucket_mb = SHARD_LENGTH * size * 4 / 2**20  # one layer
    module = Sharded(model, ShardGroups(comm, comm), make_optimizer, zero_stage, layers, bucket_mb=bucket_mb)
    name_plans(module)
    recorder.replica = module.replica
    for layer in modules:
        layer.register_forward_hook(layer.follow_backward)
    step(module, recorder, num_micro_batches)
    return recorder.rows


def name_plans(module: Sharded) -> None:
    """Tell each plan which layer it moves."""
    replica: Any = module.replica
    layer_of = {param: int(name.split(".")[0]) for name, param in replica.params.items()}
    for bucket in replica.buckets:
        bucket.plan.layer = layer_of[bucket.params[0]]
    for plan, bucket in zip(replica.gathering, replica.buckets, strict=bool(replica.gathering)):
        plan.layer = bucket.plan.layer
    for number in range(LAYERS) if replica.zero_stage == 3 else ():
        for plan in replica.layers[number].plans:
            plan.layer = number


def step(module: Sharded, recorder: EventLog, num_micro_batches: int) -> None:
    for number in range(num_micro_batches):
        last = number == num_micro_batches - 1
        module.sync = last
        module(torch.ones(1, requires_grad=True)).sum().backward()
    recorder.event("gradients are whole", -1)
    module.replica.masters.take_gradients()
    recorder.event("optimizer updates", -1)
    module.replica.update()
    module.zero_grad()
    recorder.has_gradient = [NONE] * LAYERS
    recorder.event("step ends", -1)
