"""Pipeline stages that sleep, so that a few cores can emulate many ranks.

A stage multiplies its input by its weight, after a sleep; the gradients of its input and of its weight take a sleep
each, too.  Messages between stages are therefore real, losses and gradients can be compared, and the time of each
action is known.
"""

import time
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn import functional as F


class Naps(NamedTuple):
    """Seconds of each action of a stage; a whole backward pass is `inputs` and `weights`."""

    forward: float
    inputs: float
    weights: float


class Nap(torch.autograd.Function):
    """Pass a tensor on after a sleep, and its gradient after another."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward_s: float, backward_s: float) -> Tensor:
        ctx.backward_s = backward_s
        time.sleep(forward_s)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        time.sleep(ctx.backward_s)
        return gradients[0], None, None


class Layer(nn.Module):
    """x times a number, slowly.  The two gradients are separate nodes, which can be computed separately."""

    def __init__(self, naps: Naps, weight: float = 1.0):
        super().__init__()
        self.naps = naps
        self.weight = nn.Parameter(torch.tensor(weight))

    def forward(self, x: Tensor) -> Tensor:
        if not x.requires_grad and torch.is_grad_enabled():  # on the first stage, which sleeps like the others
            x = x.detach().requires_grad_()
        x = Nap.apply(x, self.naps.forward, self.naps.inputs)
        return x * Nap.apply(self.weight, 0.0, self.naps.weights)


class Sleeping:
    """A pipeline stage: the first takes the batch's `tokens`, the last compares with its `targets`."""

    def __init__(self, layer: nn.Module, is_first: bool, is_last: bool):
        self.layer, self.is_first, self.is_last = layer, is_first, is_last
        self.alive: dict[int, tuple[Tensor, GradientEdge]] = {}  # input, and the output's graph edge
        self.gradients: dict[int, Tensor] = {}  # of outputs, until `backward_weights`

    @property
    def num_alive(self) -> int:
        return len(self.alive)

    def forward(self, micro_batch: int, x: Tensor | None, batch: Any) -> Tensor:
        x = (batch.tokens if self.is_first else x).detach().requires_grad_(torch.is_grad_enabled())
        y = self.layer(x)
        if self.is_last:
            y = F.mse_loss(y, batch.targets)
        if torch.is_grad_enabled():
            self.alive[micro_batch] = x, get_gradient_edge(y)
        return y.detach()

    def backward(self, micro_batch: int, gradient: Tensor) -> Tensor | None:
        x, end = self.alive.pop(micro_batch)
        torch.autograd.backward(end, gradient)
        return None if self.is_first else x.grad

    def backward_inputs(self, micro_batch: int, gradient: Tensor) -> Tensor | None:
        x, end = self.alive[micro_batch]
        self.gradients[micro_batch] = gradient
        (result,) = torch.autograd.grad(end, x, gradient, retain_graph=True)
        return None if self.is_first else result

    def backward_weights(self, micro_batch: int) -> None:
        _, end = self.alive.pop(micro_batch)
        torch.autograd.backward(end, self.gradients.pop(micro_batch), inputs=list(self.layer.parameters()))
