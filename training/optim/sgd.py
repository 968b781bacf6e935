"""Stochastic gradient descent with momentum."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from training.optim.optimizer import GroupedOptimizer


class SGD(GroupedOptimizer):
    """Gradient descent with momentum: bitwise torch.optim.SGD(fused=True), whose operator it calls.

    `groups` have a "weight_decay"; its product with the parameter is added to the gradient.

    Source: Sutskever et al., "On the Importance of Initialization and Momentum in Deep Learning", 2013, section 2, in
    torch's form: the momentum is a sum of gradients, and the learning rate scales the whole of it.
    """

    def __init__(self, groups: Iterable[Mapping[str, Any]], lr: float, momentum: float = 0.9):
        super().__init__(groups, lr=lr, momentum=momentum)

    def update(
        self, gradients: Mapping[nn.Parameter, Tensor], group: Mapping[str, Any], skipped: Tensor | None
    ) -> None:
        buffers = [self.momentum_buffer(param) for param in gradients]
        torch._fused_sgd_(
            [*gradients],
            [*gradients.values()],
            buffers if group["momentum"] else [],  # the operator takes none without momentum
            weight_decay=group["weight_decay"],
            momentum=group["momentum"],
            lr=group["lr"],
            dampening=0.0,
            nesterov=False,
            maximize=False,
            is_first_step=False,  # the initial momentum is 0
            found_inf=skipped,
        )
