"""Gradient accumulation: where each parameter's gradients are summed, and hooks that run when one is added.

A parameter carries `wide_grad` if its gradients are of another dtype, and torch's own hooks.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


def own_gradient(param: nn.Parameter, home: Tensor | None) -> None:
    """Accumulate a parameter's gradients in `home`, which may be of another dtype; nowhere if it is None."""
    if home is None or home.dtype == param.dtype:
        param.grad = home
    else:
        param.wide_grad = home  # type: ignore[attr-defined]
        param.register_post_accumulate_grad_hook(widen)


def widen(param: Tensor) -> None:
    """Add a new gradient to the sum in another dtype; a deferred gradient is still missing."""
    if param.grad is not None:
        param.wide_grad.add_(param.grad)  # type: ignore[attr-defined]
        param.grad = None


def gradient_of(param: Tensor) -> Tensor | None:
    """Return the tensor that accumulates a parameter's gradients."""
    return getattr(param, "wide_grad", param.grad)


def with_gradients_apart(param: nn.Parameter) -> Tensor:
    """Return an alias of the parameter's memory whose gradients are accumulated separately; hooks run for both."""
    use, home = param.detach().requires_grad_(), gradient_of(param)
    assert home is not None
    if home is param.grad:
        use.grad = torch.zeros_like(home)
    else:
        use.wide_grad = torch.zeros_like(home)  # type: ignore[attr-defined]
    for hook in torch_hooks(param).values():
        use.register_post_accumulate_grad_hook(hook)
    return use


def torch_hooks(tensor: Tensor) -> dict:
    return getattr(tensor, "_post_accumulate_grad_hooks", None) or {}


def remove_hooks(tensor: Tensor) -> None:
    """Remove torch's hooks: Python's garbage collector sees neither torch's reference to them nor theirs to others.

    Observed in torch 2.13: PyFunctionTensorPostAccGradHooks holds a reference of its own to the dict of hooks.
    """
    torch_hooks(tensor).clear()
