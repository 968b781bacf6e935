"""Losses and gradients that are not finite: all ranks agree who had the first, and what becomes of the step."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from collectives import InputError
from parallelism.deferred import when_added
from parallelism.precision import LossScale

if TYPE_CHECKING:
    from collectives import Communicator

POLICIES = ("stop", "skip", "ignore")
LOSS, GRADIENT, NORM, NOTHING = range(4)  # what is not finite; the first that any rank has is told
WORDS_BYTES = 256


class GradientMonitor:
    """Looks at the gradients of a model's parameters as they appear, before they are summed up with other ranks'.

    To be made before whatever reduces them.  Those that are put off it sees once they are added.  Costs a sum of each
    gradient.
    """

    def __init__(self, model: nn.Module):
        self._sums: dict[str, Tensor] = {}
        for name, param in model.named_parameters():
            if param.requires_grad:
                param.register_post_accumulate_grad_hook(partial(self._appeared, name))
                when_added(param, partial(self._look, name))

    def _appeared(self, name: str, param: Tensor) -> None:
        if param.grad is not None:
            self._look(name, param.grad)

    def _look(self, name: str, gradient: Tensor) -> None:
        total = gradient.sum(dtype=torch.promote_types(gradient.dtype, torch.float32))
        self._sums[name] = self._sums[name] + total if name in self._sums else total

    def found(self) -> str:
        """The first, in the order of the backward pass, that was not finite since this was asked last."""
        sums, self._sums = self._sums, {}
        if not sums or torch.stack(list(sums.values())).isfinite().all():
            return ""
        return next(name for name, total in sums.items() if not total.isfinite())


class StepGuard:
    """Says whether a step may update the weights, the same on all ranks of `comm`, and tells a loss scale.  Collective.

    Where a loss or gradient is not finite, by `policy` the run is stopped, or the step is skipped, and `say` is given
    the line that names the first rank and parameter; or the step is done all the same.  While a loss scale can be the
    cause, and fall, the step is skipped.

    Raises: ValueError for an unknown policy.
    """

    def __init__(
        self,
        comm: Communicator,
        policy: str = "stop",
        scale: LossScale | None = None,
        monitor: GradientMonitor | None = None,
        say: Callable[[str], None] = print,
    ):
        if policy not in POLICIES:
            raise ValueError(f"non-finite policy {policy!r} is unknown: use {', '.join(POLICIES)}")
        self.comm, self.policy, self.say = comm, policy, say
        self.scale, self.monitor = scale or LossScale(1.0, None), monitor
        self._first = np.zeros(1, np.int64)
        self._agree = comm.plan("all_reduce", self._first, op="min")

    def passes(self, step: int, loss: float, norm: float) -> bool:
        """Whether to update the weights, given this rank's loss, 0 if it has none, and the norm of all gradients.

        One tiny all-reduce.  Collective.

        Raises: InputError on every rank, if the run is to stop.
        """
        if self.policy == "ignore" and self.scale.growth_interval is None:
            return True
        kind, words = self._what(loss, norm)
        by_scale = kind != LOSS and self.scale.can_fall
        self.scale.update(kind == NOTHING)
        if kind == NOTHING or (self.policy == "ignore" and not by_scale):
            return True
        line = f"step {step}: {words}"
        if self.policy == "stop" and not by_scale:
            raise InputError(f"{line}: lower the learning rate, or let such steps be skipped")
        self.say(f"{line}; skipped" + (f", the loss scale is {self.scale.value:g} now" if by_scale else ""))
        return False

    def _what(self, loss: float, norm: float) -> tuple[int, str]:
        """What is not finite, and the words of the rank that has the first of it."""
        kind, words = self._own(loss, norm)
        self._first[0] = kind * self.comm.size + self.comm.rank
        self._agree()
        kind, rank = divmod(int(self._first[0]), self.comm.size)
        return kind, "" if kind == NOTHING else self._told(words, rank)

    def _own(self, loss: float, norm: float) -> tuple[int, str]:
        name = self.monitor.found() if self.monitor else ""
        if not math.isfinite(loss):
            return LOSS, f"rank {self.comm.rank} has a loss of {loss}"
        if name:
            return GRADIENT, f"rank {self.comm.rank} has a gradient of {name} that is not finite"
        if not math.isfinite(norm):
            return NORM, f"the norm of the gradients is {norm}, but no rank's own gradients are to blame"
        return NOTHING, ""

    def _told(self, words: str, root: int) -> str:
        """The words of one rank, on all."""
        letters = np.zeros(WORDS_BYTES, np.uint8)
        said = words.encode()[:WORDS_BYTES]
        letters[: len(said)] = np.frombuffer(said, np.uint8)
        self.comm.broadcast(letters, root=root)
        return letters.tobytes().rstrip(b"\0").decode(errors="replace")
