"""Non-finite losses and gradients: all ranks agree on the first one, and on skipping the step or stopping the run.

A loss scale keeps small gradients from underflowing in float16.

Source: Micikevicius et al., "Mixed Precision Training", 2018, arXiv 1710.03740, section 3.2; the defaults of the loss
scale are those of torch.amp.GradScaler.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

import collectives
from parallelism.buffers.gradients import gradient_of
from parallelism.buffers.tensor_collectives import ExposedTime
from parallelism.step.events import Listener

LOWEST, HIGHEST = 1.0, 2.0**24  # loss scales


class LossScale:
    """Factor by which the loss is multiplied, kept on the device, as the gradients are.

    Halved after a step with non-finite gradients, which is skipped; doubled after `growth_interval` good steps in a
    row; constant if that is None.  All ranks must make the same updates.  `good_steps` counts since the last change.
    """

    def __init__(self, value: float = 2.0**16, growth_interval: int | None = 2000, device: str = "cpu"):
        self.growth_interval = growth_interval
        self.value = torch.tensor(value, dtype=torch.float64, device=device)
        self.good_steps = torch.zeros_like(self.value)

    def update(self, finite: Tensor) -> None:
        if self.growth_interval is None:
            return
        good_steps = torch.where(finite, self.good_steps + 1, 0.0)
        grows = good_steps == self.growth_interval
        grown = torch.where(grows, (self.value * 2).clamp(max=HIGHEST), self.value)
        self.value = torch.where(finite, grown, (self.value / 2).clamp(min=LOWEST))
        self.good_steps = torch.where(grows, 0.0, good_steps)

    @property
    def inverse(self) -> Tensor | None:
        """Factor that unscales gradients, or None if they are not scaled."""
        return None if self.growth_interval is None else self.value.reciprocal()

    @property
    def can_fall(self) -> Tensor:
        """Whether the scale can be reduced further, which may make non-finite gradients finite."""
        return self.value > (math.inf if self.growth_interval is None else LOWEST)

    def state(self) -> tuple[float, int]:
        """Read the scale and the number of good steps from the device."""
        return float(self.value), int(self.good_steps)

    def load(self, value: float, good_steps: int) -> None:
        """Restore a state, unless the scale is constant."""
        if self.growth_interval is not None:
            self.value.fill_(value)
            self.good_steps.fill_(good_steps)


POLICIES = ("stop", "skip", "ignore")
LOSS, GRADIENT, NORM, NOTHING = range(4)  # the non-finite quantity; the first on any rank is reported


class FiniteCheck(Protocol):
    """Says which of a rank's gradients are finite."""

    def take(self, device: torch.device) -> tuple[list[str], Tensor]:
        """Return the names of the step's gradients in the order of the backward pass, and whether each is finite."""


class GradientMonitor(Listener):
    """Checks the gradients of the parameters in `names` once they are ready, at the cost of summing each.

    It must be notified ahead of the listeners that reduce gradients over ranks.
    """

    def __init__(self, names: Mapping[Tensor, str]):
        self.names = names
        self._sums: dict[str, Tensor] = {}

    def gradient_ready(self, parameter: Tensor, micro_batch: int) -> None:
        name, gradient = self.names[parameter], gradient_of(parameter)
        assert gradient is not None
        total = gradient.sum(dtype=torch.promote_types(gradient.dtype, torch.float32))
        self._sums[name] = self._sums[name] + total if name in self._sums else total

    def take(self, device: torch.device) -> tuple[list[str], Tensor]:
        """Return the names of new gradients, in the order of the backward pass, and whether each is finite."""
        sums, self._sums = self._sums, {}
        finite = torch.stack(list(sums.values())).isfinite() if sums else torch.ones(0, dtype=torch.bool, device=device)
        return list(sums), finite


class Verdict(NamedTuple):
    """The ranks' decision about a step, kept on the device until it is read."""

    skipped: Tensor | None  # 1 to skip the update of the weights, else 0; None if never skipped
    numbers: Tensor  # arguments of `StepGuard.tell`
    names: list[str]  # of this rank's gradients


class StepGuard(ExposedTime):
    """Decides if a step may update the weights, the same on all ranks of `comm`; updates the loss scale.  Collective.

    After a non-finite loss or gradient, `policy` decides: "stop" raises an error, "skip" skips the step and passes a
    line with the first rank and parameter to `say`, "ignore" updates the weights anyway.  If the loss scale may be the
    cause, and can be reduced, the step is skipped.  `max_skips` other skips in a row are an error, which says whether
    all ranks' weights are finite: `weights()` returns this rank's by name.

    Raises: ValueError for an unknown policy.
    """

    def __init__(
        self,
        comm: collectives.Communicator,
        policy: str = "stop",
        scale: LossScale | None = None,
        monitor: FiniteCheck | None = None,
        say: Callable[[str], None] = print,
        device: str = "cpu",
        max_skips: float = math.inf,
        weights: Callable[[], Mapping[str, Tensor]] = dict,
    ):
        if policy not in POLICIES:
            raise ValueError(f"non-finite policy {policy!r} is unknown: use {', '.join(POLICIES)}")
        self.comm, self.rank, self.size, self.policy, self.say = comm, comm.rank, comm.size, policy, say
        self.max_skips, self.weights, self.num_skips = max_skips, weights, 0
        self.scale, self.monitor = scale or LossScale(1.0, None, device=device), monitor
        self._first = torch.zeros(1, dtype=torch.int64, device=device)
        self._agree = comm.plan("all_reduce", self._first, op="min")

    def judge(self, loss: Tensor, norm: Tensor) -> Verdict:
        """Agree on a step, given this rank's loss, or 0 if it has none, and the norm of all gradients.

        Cost: one all-reduce of one element, without a synchronization with the device.  Collective.
        """
        if self.policy == "ignore" and self.scale.growth_interval is None:
            return Verdict(None, loss.new_zeros(0), [])
        names, finite = self.monitor.take(loss.device) if self.monitor else ([], loss.new_ones(0, dtype=torch.bool))
        are_finite = torch.stack([loss.isfinite(), finite.all(), norm.isfinite()])
        own = are_finite.long().cumprod(0).sum()  # the first non-finite one: LOSS, ..., NOTHING
        self._first[0] = own * self.size + self.rank
        with self.waiting():
            self._agree()
        kind = self._first[0] // self.size
        is_good = kind == NOTHING
        by_scale = ~is_good & (kind != LOSS) & self.scale.can_fall
        self.scale.update(is_good)
        skipped = by_scale if self.policy == "ignore" else ~is_good
        numbers = torch.stack([x.double() for x in (self._first[0], by_scale, self.scale.value)])
        return Verdict(skipped.float(), torch.cat([numbers, finite]), names)

    def tell(self, step: int, names: list[str], numbers: Sequence[float], loss: float, norm: float) -> None:
        """Report a skipped step by its verdict's numbers; raise InputError on every rank if the run must not continue.

        Collective.
        """
        if not numbers:
            return
        first, by_scale, scale, *finite = numbers
        kind, rank = divmod(int(first), self.size)
        if kind == NOTHING or (self.policy == "ignore" and not by_scale):
            self.num_skips = 0
            return
        name = next((name for name, is_finite in zip(names, finite, strict=True) if not is_finite), "")
        words = (
            f"rank {rank} has a loss of {loss}",
            f"rank {rank} has a gradient of {name} that is not finite",
            f"the norm of the gradients is {norm}, but no rank's own gradients are to blame",
        )
        line = f"step {step}: {self.comm.broadcast_object(words[kind], rank)}"
        if self.policy == "stop" and not by_scale:
            raise collectives.InputError(f"{line}: lower the learning rate, or let such steps be skipped")
        self.num_skips += not by_scale
        if self.num_skips >= self.max_skips:
            steps = f"losses or gradients of max_skips={self.max_skips} steps in a row are not finite"
            raise collectives.InputError(f"{line}; {steps}, {self.state()}")
        self.say(f"{line}; skipped" + (f", the loss scale is {scale:g} now" if by_scale else ""))

    def state(self) -> str:
        """Say which weights are not finite, and what to do.  Collective."""
        names = self.comm.all_gather_object(first_not_finite(self.weights()))
        rank = next((rank for rank, name in enumerate(names) if name), None)
        if rank is None:
            return "but all weights are: lower the learning rate, or raise max_skips"
        return f"nor is {names[rank]} of rank {rank}: resume from a checkpoint, or lower the learning rate"


def first_not_finite(tensors: Mapping[str, Tensor]) -> str:
    """Return the name of the first tensor with an element that is not finite, or nothing."""
    return next((name for name, tensor in tensors.items() if not tensor.isfinite().all()), "")
