"""Loss scaling, so that small gradients do not underflow in float16.

Source: Micikevicius et al., "Mixed Precision Training", 2018, arXiv 1710.03740, section 3.2; the defaults are those of
torch.amp.GradScaler.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


class LossScale:
    """Factor by which the loss is multiplied, kept on the device, as the gradients are.

    Halved after a step with non-finite gradients, which is skipped; doubled after `growth_interval` good steps in a
    row; constant if that is None.  All ranks must make the same updates.  `good_steps` counts since the last change.
    """

    def __init__(
        self,
        value: float = 2.0**16,
        growth_interval: int | None = 2000,
        lowest: float = 1.0,
        highest: float = 2.0**24,
        device: str = "cpu",
    ):
        self.growth_interval, self.lowest, self.highest = growth_interval, lowest, highest
        self.value = torch.tensor(value, dtype=torch.float64, device=device)
        self.good_steps = torch.zeros_like(self.value)

    def update(self, finite: Tensor) -> None:
        if self.growth_interval is None:
            return
        good_steps = torch.where(finite, self.good_steps + 1, 0.0)
        grows = good_steps == self.growth_interval
        grown = torch.where(grows, (self.value * 2).clamp(max=self.highest), self.value)
        self.value = torch.where(finite, grown, (self.value / 2).clamp(min=self.lowest))
        self.good_steps = torch.where(grows, 0.0, good_steps)

    @property
    def inverse(self) -> Tensor | None:
        """Factor that unscales gradients, or None if they are not scaled."""
        return None if self.growth_interval is None else self.value.reciprocal()

    @property
    def can_fall(self) -> Tensor:
        """Whether the scale can be reduced further, which may make non-finite gradients finite."""
        return self.value > (math.inf if self.growth_interval is None else self.lowest)

    def state(self) -> tuple[float, int]:
        """Read the scale and the number of good steps from the device."""
        return float(self.value), int(self.good_steps)

    def load(self, value: float, good_steps: int) -> None:
        """Restore a state, unless the scale is constant."""
        if self.growth_interval is not None:
            self.value.fill_(value)
            self.good_steps.fill_(good_steps)
