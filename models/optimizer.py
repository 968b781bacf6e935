"""Optimizers: what all of them do, and AdamW."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, MutableMapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn

BETAS = (0.9, 0.95)


class Optimizer(Protocol):
    """What is asked of one: torch's are such, but for `skipped`, and AdamW here."""

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameter groups, each with "params" and "lr", which may be changed between steps."""

    @property
    def state(self) -> MutableMapping[Any, Any]:
        """The tensors that belong to each parameter, by their names."""

    def step(self, skipped: Any = None) -> Any: ...


class GroupedOptimizer:
    """Updates parameters in groups, each with "params", all of one dtype and device, and with settings of its own.

    A parameter without a gradient stays as it is.

    Optimizers of torch import its compiler when they are made, which takes each rank 2 s; these do not.
    """

    def __init__(self, groups: Iterable[Mapping[str, Any]], **settings: Any):
        self.param_groups: list[dict[str, Any]] = [{**settings, **group} for group in groups]
        self.state: defaultdict[nn.Parameter, dict[str, Tensor]] = defaultdict(dict)

    @torch.no_grad()
    def step(self, skipped: Tensor | None = None) -> None:
        """Update the parameters, and the states; where `skipped`, of float32 on their device, is 1, neither."""
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
    """Adam with decoupled weight decay: bit for bit torch.optim.AdamW(fused=True), whose operator it calls.

    `groups` have a "weight_decay".  Parameters have the states that torch gives them, by the same names.

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
        torch._foreach_add_(steps, [1 - skipped] * len(steps) if skipped is not None else 1)  # one tensor would be read
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
        """Make a parameter's states: the number of steps is on its device, too, where the operator wants it."""
        step = torch.zeros((), dtype=torch.float32, device=param.device)
        self.state[param] |= {"step": step, "exp_avg": torch.zeros_like(param), "exp_avg_sq": torch.zeros_like(param)}
        return self.state[param]


class Together:
    """Several optimizers, each of parameters of its own, as one."""

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

    It reads and writes each number once, on a GPU by few kernels: parameters in an arena begin where those want them.
    """
    return AdamW(decay_groups(params, weight_decay), lr, betas, eps)


def decay_groups(params: Iterable[nn.Parameter], weight_decay: float) -> list[dict[str, Any]]:
    """Weights decay in matrices only, not in biases and norms."""
    params = list(params)
    return [
        {"params": [p for p in params if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0},
    ]
