"""Losses and gradients that are not finite: all ranks agree who had the first, and what becomes of the step."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from collectives import InputError
from collectives.arrays import to_torch
from parallelism.precision import LossScale

if TYPE_CHECKING:
    from collectives import Communicator

POLICIES = ("stop", "skip", "ignore")
LOSS, GRADIENT, NORM, NOTHING = range(4)  # what is not finite; the first that any rank has is told
WORDS_BYTES = 256


class Watch:
    """Sees a rank's own gradients, before they are summed up with other ranks': `found` is whose is not finite.

    That is the parameter's name, and the first's in the order of a backward pass.
    """

    def __init__(self) -> None:
        self.found = ""

    def look(self, slices: Mapping[str, slice], begin: int, gradients: Any) -> None:
        """At gradients of an arena with these slices, from the element `begin` on.  Costs a sum, if they are finite."""
        run = to_torch(gradients)
        if self.found or math.isfinite(float(run.sum(dtype=torch.promote_types(run.dtype, torch.float32)))):
            return
        for name, place in reversed(list(slices.items())):
            own = run[max(0, place.start - begin) : max(0, place.stop - begin)]
            if not own.isfinite().all():
                self.found = name
                return


class Guard:
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
        watch: Watch | None = None,
        say: Callable[[str], None] = print,
    ):
        if policy not in POLICIES:
            raise ValueError(f"non-finite policy {policy!r} is unknown: use {', '.join(POLICIES)}")
        self.comm, self.policy, self.say = comm, policy, say
        self.scale, self.watch = scale or LossScale(1.0, None), watch or Watch()
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
        self.watch.found = ""
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
        if not math.isfinite(loss):
            return LOSS, f"rank {self.comm.rank} has a loss of {loss}"
        if self.watch.found:
            return GRADIENT, f"rank {self.comm.rank} has a gradient of {self.watch.found} that is not finite"
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
