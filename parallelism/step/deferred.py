"""Split backward passes: linear layers defer weight gradients, which no other stage waits for, to fill the bubble.

Source: Qi et al., "Zero Bubble Pipeline Parallelism", 2023, arXiv 2401.10241, section 2.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from parallelism.buffers.gradients import accumulate, gradient_of


class WeightGradients:
    """Deferred gradients of linear layers' weights and biases; with `at_once`, they are computed immediately.

    For each product, only the layer's input and the gradient of its output are kept.  When all deferred contributions
    to a parameter's gradient have been added, `on_ready(parameter)` is called.
    """

    def __init__(self, on_ready: Callable[[Tensor], None] = lambda parameter: None) -> None:
        self.at_once, self.on_ready = False, on_ready
        self._waiting: deque[tuple[Tensor, Tensor | None, Tensor, Tensor]] = deque()
        self._products: Counter[Tensor] = Counter()  # deferred, by parameter

    def defer(self, weight: Tensor, bias: Tensor | None, x: Tensor, gradient: Tensor) -> None:
        self._waiting.append((weight, bias, x.detach(), gradient))  # x itself would keep its graph alive
        if self.at_once:
            self.flush()  # autograd calls the parameters' hooks afterwards
        else:
            self._products.update([weight] if bias is None else [weight, bias])

    def is_deferred(self, parameter: Tensor) -> bool:
        """Return whether a part of a parameter's gradient is still deferred."""
        return self._products[parameter] > 0

    @torch.no_grad()
    def flush(self) -> None:
        """Add the deferred gradients to the parameters' gradients in place; the parameters' hooks are not called."""
        while self._waiting:
            weight, bias, x, gradient = self._waiting.popleft()
            x, gradient = (tensor.reshape(-1, tensor.shape[-1]) for tensor in (x, gradient))  # (tokens, width)
            add_product(weight, gradient.t(), x)
            if bias is not None:
                accumulate(bias, gradient.sum(0))
            for parameter in [weight] if bias is None else [weight, bias]:
                self._products[parameter] -= 1
                if self._products[parameter] == 0:
                    self.on_ready(parameter)


def add_product(parameter: Tensor, left: Tensor, right: Tensor) -> None:
    home = gradient_of(parameter)
    if home is not None and home.dtype == left.dtype:
        home.addmm_(left, right)  # needs no memory for the product
    else:
        accumulate(parameter, left @ right)


CURRENT: ContextVar[WeightGradients | None] = ContextVar("CURRENT", default=None)


@contextmanager
def deferring(deferred: WeightGradients | None) -> Iterator[None]:
    """Let linear layers that run in this context defer their weight gradients to `deferred`, if it is not None."""
    token = CURRENT.set(deferred)
    try:
        with LinearMode() if deferred else nullcontext():
            yield
    finally:
        CURRENT.reset(token)


class LinearMode(TorchFunctionMode):
    """Replaces every call of `F.linear` by `linear`."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        function = linear if func is F.linear else func
        return function(*args, **(kwargs or {}))


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    deferred = current(weight, bias)
    if deferred is None or not torch.is_grad_enabled():
        return F.linear(x, weight, bias)
    return LinearFunction.apply(autocast(x), weight, bias, deferred)


def current(*weights: Tensor | None) -> WeightGradients | None:
    """Return the object to which these weights' gradients are deferred, or None if they are computed immediately."""
    trained = all(weight is None or (weight.is_leaf and weight.requires_grad) for weight in weights)
    return CURRENT.get() if trained else None


class LinearFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor | None, deferred: WeightGradients) -> Tensor:  # type: ignore[override]
        ctx.deferred, ctx.weight, ctx.bias = (
            deferred,
            weight,
            bias,
        )  # attributes, as saved tensors may be returned as copies
        ctx.save_for_backward(x)
        return F.linear(x, autocast(weight), None if bias is None else autocast(bias))

    @staticmethod
    def backward(ctx, gradient: Tensor):  # type: ignore[override]
        (x,) = ctx.saved_tensors
        ctx.deferred.defer(ctx.weight, ctx.bias, x, gradient)
        dx = gradient @ ctx.weight.to(gradient.dtype) if ctx.needs_input_grad[0] else None
        return dx, None, None, None


def autocast(x: Tensor) -> Tensor:
    """Cast x to the dtype that linear layers compute in."""
    kind = x.device.type
    if x.dtype == torch.float64 or not torch.is_autocast_enabled(kind):
        return x
    return x.to(torch.get_autocast_dtype(kind))
