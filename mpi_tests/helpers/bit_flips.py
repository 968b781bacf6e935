"""One bit flipped in one tensor of a rank's training run, by its kind, once or more often from a step on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from parallelism.data.averaging import Averaging
from parallelism.data.replica import Replica
from parallelism.numerics.exact import Rounding
from training.health.corruption import CorruptionCheck
from training.parallel.run import TrainingRun

SUM_BIT, GRADIENT_BIT, WEIGHT_BIT = 40, 24, 20  # of int64, and of float32


def flip(tensor: torch.Tensor, bit: int) -> None:
    """Flip a bit of the middle element."""
    bits = tensor.detach().view(-1).view({4: torch.int32, 8: torch.int64}[tensor.element_size()])
    bits[len(bits) // 2] ^= 1 << bit


def in_sum(replica, parameter, micro_batch):
    flip(replica.sums.owner(parameter).rounding.total, SUM_BIT)
    return True


def in_gradient(rounding, gradient):
    """Flip a bit of the exponent of a gradient of the rank's own, not of one that it computes for another."""
    if not gradient.any() or not rounding.observe or rounding.observe.func.__self__.replaying:
        return False
    flip(gradient, GRADIENT_BIT)
    return True


def in_result(replica):
    name = next(name for name in replica.masters.params if name not in replica.own.tied.across)
    flip(replica.masters.params[name].rounding.total, SUM_BIT)
    return True


def in_weight(check, step):
    flip(next(iter(check.state.state())).tensor, WEIGHT_BIT)
    return True


def in_state(check, step):
    flip(next(part for part in check.state.state() if part.kind == "exp_avg").tensor, WEIGHT_BIT)
    return True


class Target(NamedTuple):
    """A method of a class, before or after which a fault happens; `words` are those of the finding."""

    kind: type
    name: str
    fault: Callable[..., bool]
    is_before: bool
    words: str


TARGETS = {
    "sum": Target(
        Averaging,
        "gradient_ready",
        in_sum,
        True,
        r"rank {rank} has a sum of gradients of \S+ that is not that of its micro-batches",
    ),
    "gradient": Target(
        Rounding, "add", in_gradient, True, r"rank {rank} computes another gradient of \S+ for a micro-batch than"
    ),
    "message": Target(
        Replica, "step_done", in_result, False, r"rank {rank} has a gradient of \S+ that is not the sum of all ranks"
    ),
    "weight": Target(
        CorruptionCheck, "after", in_weight, False, r"parameter of \S+ has changed on rank {rank} since the last step"
    ),
    "state": Target(
        CorruptionCheck, "after", in_state, False, r"exp_avg of \S+ has changed on rank {rank} since the last step"
    ),
}


def plant(kind: str, first: int, times: int = 1, patch: Callable[[Any, str, Any], None] = setattr) -> None:
    """Have this process flip a bit, so many times from step `first` on."""
    target = TARGETS[kind]
    now, left = 0, times
    own_passes, own = TrainingRun.passes, getattr(target.kind, target.name)

    def passes(run, step, *arguments):
        nonlocal now
        now = step
        return own_passes(run, step, *arguments)

    def act(*arguments):
        nonlocal left
        if now >= first and left:
            left -= target.fault(*arguments)

    def method(*arguments):
        if target.is_before:
            act(*arguments)
        result = own(*arguments)
        if not target.is_before:
            act(*arguments)
        return result

    patch(TrainingRun, "passes", passes)
    patch(target.kind, target.name, method)
