"""Gradient accumulation: every sum of gradients is computed or described here, and where it is kept.

A rank's micro-batches are added one by one, in the order of their backward passes: by autograd in place, or by `add`
if each is reduced over the ranks first.  Each use of a tied parameter has a sum of its own, and these are added at the
end, so that the result does not depend on whether they are on one rank.  The reducing collective sums over ranks.

A parameter carries `wide_grad` if its gradients are of another dtype, or its `Rounding` if they are integers, and
torch's own hooks.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn


def own_gradient(param: Tensor, home: Tensor | None) -> None:
    """Accumulate a parameter's gradients in `home`, which may be of another dtype; nowhere if it is None."""
    if rounding := rounding_of(param):
        rounding.total = home
    elif home is None or home.dtype == param.dtype:
        param.grad = home
    else:
        param.wide_grad = home  # type: ignore[attr-defined]
        param.register_post_accumulate_grad_hook(widen)


def widen(param: Tensor) -> None:
    """Add a new gradient to the sum in another dtype; a deferred gradient is still missing."""
    if param.grad is not None:
        gradient, param.grad = param.grad, None
        accumulate(param, gradient)


def accumulate(param: Tensor, gradient: Tensor) -> None:
    """Add a gradient of a parameter, or of an alias of it, to the sum; it must not change afterwards."""
    home = gradient_of(param)
    if rounding := rounding_of(param):
        rounding.add(gradient)
    elif home is None:
        param.grad = gradient.to(param.dtype)
    else:
        home.add_(gradient)


def rounding_of(param: Tensor) -> Any:
    """Return the `Rounding` of a parameter whose gradients are added as integers, or None."""
    return getattr(param, "rounding", None)


def gradient_of(param: Tensor) -> Tensor | None:
    """Return the tensor that accumulates a parameter's gradients."""
    if rounding := rounding_of(param):
        return rounding.total
    return getattr(param, "wide_grad", param.grad)


def separate_alias(param: nn.Parameter) -> Tensor:
    """Return an alias of the parameter's memory whose gradients are accumulated separately; hooks run for both.

    Integers are added to the parameter's own.
    """
    use, home = param.detach().requires_grad_(), gradient_of(param)
    if rounding := rounding_of(param):
        use.rounding = rounding  # type: ignore[attr-defined]
        use.register_post_accumulate_grad_hook(widen)
    else:
        assert home is not None
        own_gradient(use, torch.zeros_like(home))
    for hook in torch_hooks(param).values():
        if hook is not widen:
            use.register_post_accumulate_grad_hook(hook)
    return use


def torch_hooks(tensor: Tensor) -> dict:
    return getattr(tensor, "_post_accumulate_grad_hooks", None) or {}


def remove_hooks(tensor: Tensor) -> None:
    """Remove torch's hooks: Python's garbage collector sees neither torch's reference to them nor theirs to others.

    Observed in torch 2.13: PyFunctionTensorPostAccGradHooks holds a reference of its own to the dict of hooks.
    """
    torch_hooks(tensor).clear()


@torch.no_grad()
def add(total: Tensor, gradient: Tensor, micro_batch: int | None) -> None:
    """Add the gradient of a micro-batch, numbered within the global batch, to the sum of the previous ones."""
    total.add_(gradient)


class TiedSums:
    """Gradient sums of parameters that a rank uses in several places: `uses` holds all but the first, by parameter."""

    def __init__(self, uses: Mapping[nn.Parameter, Iterable[Tensor]]):
        self.uses = uses
        self._owner: dict[Tensor, nn.Parameter] = {use: param for param, others in uses.items() for use in others}

    def owner(self, tensor: Tensor) -> Tensor:
        """Return the parameter to whose gradient `tensor` contributes, or `tensor` itself."""
        return self._owner.get(tensor, tensor)

    @torch.no_grad()
    def complete(self, param: Tensor) -> None:
        """Add the sums of a parameter's other uses to its gradient, and reset them."""
        for use in self.uses.get(param, ()):  # type: ignore[call-overload]
            total, summand = gradient_of(param), gradient_of(use)
            assert total is not None
            assert summand is not None
            if summand is not total:
                total.add_(summand)
                summand.zero_()
