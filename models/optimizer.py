"""Optimizers: what is common to them, and AdamW."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

BETAS = (0.9, 0.95)


class GroupedOptimizer:
    """Updates groups of parameters, each with "params", of one dtype and device, and its own settings.

    A parameter without a gradient is not changed.

    Unlike torch's optimizers, these do not import its compiler, which takes 2 s per rank.
    """

    def __init__(self, groups: Iterable[Mapping[str, Any]], **settings: Any):
        self.param_groups: list[dict[str, Any]] = [{**settings, **group} for group in groups]
        self.state: defaultdict[nn.Parameter, dict[str, Tensor]] = defaultdict(dict)

    @torch.no_grad()
    def step(self, skipped: Tensor | None = None) -> None:
        """Update parameters and states, unless `skipped`, a float32 tensor on their device, is 1."""
        for group in self.param_groups:
            gradients = {param: param.grad for param in group["params"] if param.grad is not None}
            if gradients:
                self.update(gradients, group, skipped)

    def update(
        self, gradients: Mapping[nn.Parameter, Tensor], group: Mapping[str, Any], skipped: Tensor | None
    ) -> None:
        """Update the parameters of a group that have gradients."""
        raise NotImplementedError

    def momentum_buffer(self, param: nn.Parameter) -> Tensor:
        """Return the momentum of a parameter, initially 0."""
        state = self.state[param]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(param)
        return state["momentum_buffer"]


class AdamW(GroupedOptimizer):
    """Adam with decoupled weight decay: bitwise torch.optim.AdamW(fused=True), whose operator it calls.

    `groups` have a "weight_decay".  States and their names are torch's.

    Source: Loshchilov and Hutter, "Decoupled Weight Decay Regularization", 2019, arXiv 1711.05101.
    """

    def __init__(
        self,
        groups: Iterable[Mapping[str, Any]],
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
    ):
        super().__init__(groups, lr=lr, betas=betas, eps=eps)

    def update(
        self, gradients: Mapping[nn.Parameter, Tensor], group: Mapping[str, Any], skipped: Tensor | None
    ) -> None:
        states = [self.state[param] or self._start(param) for param in gradients]
        steps = [state["step"] for state in states]
        # A list, as a single tensor would be read on the host.
        torch._foreach_add_(steps, [1 - skipped] * len(steps) if skipped is not None else 1)
        torch._fused_adamw_(
            [*gradients],
            [*gradients.values()],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            steps,
            lr=group["lr"],
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            amsgrad=False,
            maximize=False,
            found_inf=skipped,
        )

    def _start(self, param: nn.Parameter) -> dict[str, Tensor]:
        """Create a parameter's states; the step count is on its device, too, as the operator requires."""
        step = torch.zeros((), dtype=torch.float32, device=param.device)
        self.state[param] |= {"step": step, "exp_avg": torch.zeros_like(param), "exp_avg_sq": torch.zeros_like(param)}
        return self.state[param]


class Together:
    """Several optimizers for different parameters, as one."""

    def __init__(self, *optimizers: GroupedOptimizer):
        self.optimizers = optimizers
        self.param_groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        self.state: defaultdict[nn.Parameter, dict[str, Tensor]] = defaultdict(dict)
        for optimizer in optimizers:
            optimizer.state = self.state

    def step(self, skipped: Tensor | None = None) -> None:
        for optimizer in self.optimizers:
            optimizer.step(skipped)


def adamw(
    params: Iterable[nn.Parameter],
    lr: float,
    weight_decay: float,
    betas: tuple[float, float] = BETAS,
    eps: float = 1e-8,
) -> AdamW:
    """Make the AdamW of a GPT.

    It reads and writes each number once; on a GPU it needs few kernels, for which an arena's alignment suffices.
    """
    return AdamW(decay_groups(params, weight_decay), lr, betas, eps)


def decay_groups(params: Iterable[nn.Parameter], weight_decay: float) -> list[dict[str, Any]]:
    """Return groups in which matrices have weight decay, and biases and norms have none."""
    params = list(params)
    return [
        {"params": [p for p in params if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0},
    ]
