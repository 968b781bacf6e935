"""Split backward passes: linear layers defer weight gradients, which no other stage waits for, to fill the bubble.

Where sequences are divided into parts, layers compute part by part: each part's result and gradients have the same
bits, whichever parts a rank holds.

Source: Qi et al., "Zero Bubble Pipeline Parallelism", 2023, arXiv 2401.10241, section 2.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from parallelism.buffers.gradients import accumulate, gradient_of


class WeightGradients:
    """Deferred gradients of linear layers' weights and biases; with `at_once`, they are computed immediately.

    For each product, only the layer's input and the gradient of its output are kept.  When all deferred contributions
    to a parameter's gradient have been added, `on_ready(parameter)` is called.

    `parts` is the number of parts that this rank's tokens are divided into, or None if layers compute them at once.
    """

    def __init__(self, on_ready: Callable[[Tensor], None] = lambda parameter: None, parts: int | None = None) -> None:
        self.at_once, self.on_ready, self.parts = False, on_ready, parts
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
            for part, of_part in zip(cut(x, self.parts), cut(gradient, self.parts), strict=True):
                left, right = (tensor.reshape(-1, tensor.shape[-1]) for tensor in (of_part, part))  # (tokens, width)
                add_product(weight, left.t(), right)
                if bias is not None:
                    accumulate(bias, left.sum(0))
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
        with LayerMode() if deferred else nullcontext():
            yield
    finally:
        CURRENT.reset(token)


class LayerMode(TorchFunctionMode):
    """Replaces every call of `F.linear` by `linear`, and those of `BY_PARTS` by `PartsFunction` if there are parts."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        function, deferred = func, CURRENT.get()
        if func is F.linear:
            function = linear
        elif func in BY_PARTS and deferred and deferred.parts:
            function = partial(by_parts, func, deferred.parts)
        return function(*args, **(kwargs or {}))


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    deferred, every = current(weight, bias), CURRENT.get()
    if deferred is None and every and every.parts:  # as of frozen weights
        return by_parts(F.linear, every.parts, x, weight, bias)
    if deferred is None or not (torch.is_grad_enabled() or deferred.parts):
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
        return product(x, autocast(weight).t(), None if bias is None else autocast(bias), deferred.parts)

    @staticmethod
    def backward(ctx, gradient: Tensor):  # type: ignore[override]
        (x,) = ctx.saved_tensors
        ctx.deferred.defer(ctx.weight, ctx.bias, x, gradient)
        if not ctx.needs_input_grad[0]:
            return None, None, None, None
        weight = ctx.weight.to(gradient.dtype)
        return product(gradient, weight, None, ctx.deferred.parts), None, None, None


def product(x: Tensor, weight: Tensor, bias: Tensor | None, parts: int | None) -> Tensor:
    """Return x @ weight, plus the bias if there is one.  Shapes: x (..., seq, width), weight (width, out)."""
    if not parts:
        return x @ weight if bias is None else F.linear(x, weight.t(), bias)
    tokens, *rest = x.movedim(-2, 0).shape
    out = x.new_empty((tokens, *rest[:-1], weight.shape[1]))
    for part, result in zip(cut(x, parts), out.chunk(parts), strict=True):
        rows, into = part.view(-1, part.shape[-1]), result.view(-1, result.shape[-1])
        torch.mm(rows, weight, out=into) if bias is None else torch.addmm(bias, rows, weight, out=into)
    return out.movedim(0, -2)


BY_PARTS = (F.layer_norm, F.rms_norm, F.embedding, F.gelu)


def by_parts(func: Callable[..., Tensor], parts: int, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Call a function of tokens x and of parameters part by part; each part's gradients are accumulated one by one."""

    def call(part: Tensor, *params: Tensor) -> Tensor:
        following = iter(params)
        filled = [next(following) if isinstance(arg, Tensor) else arg for arg in (*args, *kwargs.values())]
        return func(part, *filled[: len(args)], **dict(zip(kwargs, filled[len(args) :], strict=True)))

    params = [arg for arg in (*args, *kwargs.values()) if isinstance(arg, Tensor)]
    return PartsFunction.apply(call, parts, x, *params)


class PartsFunction(torch.autograd.Function):
    """Calls `call(part, *params)` for each part of x, and again in the backward pass.

    Saves only x: ZeRO may have freed the parameters until the backward pass, and what is saved would not notice.
    """

    @staticmethod
    def forward(ctx, call: Callable[..., Tensor], parts: int, x: Tensor, *params: Tensor) -> Tensor:  # type: ignore[override]
        kind = x.device.type
        ctx.call, ctx.parts, ctx.params = call, parts, params
        ctx.autocast = kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)
        ctx.save_for_backward(x)
        return joined(call(part, *params) for part in cut(x, parts))

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: Tensor):  # type: ignore[override]
        (x,), needed, dx = ctx.saved_tensors, ctx.needs_input_grad[2:], []
        trained = [param for param, needs in zip(ctx.params, needed[1:], strict=True) if needs]
        for part, of_part in zip(cut(x, ctx.parts), cut(gradient, ctx.parts), strict=True):
            with torch.enable_grad(), torch.autocast(*ctx.autocast):
                pairs = zip((part, *ctx.params), needed, strict=True)
                inputs = [each.detach().requires_grad_(needs) for each, needs in pairs]
                y = ctx.call(*inputs)
            gradients = [*torch.autograd.grad(y, [each for each in inputs if each.requires_grad], of_part)]
            if needed[0]:
                dx.append(gradients.pop(0))
            for param, of_param in zip(trained, gradients, strict=True):
                accumulate(param, of_param)
        return None, None, joined(dx) if dx else None, *[None] * len(ctx.params)


def cut(x: Tensor, parts: int | None) -> list[Tensor]:
    """Divide tokens into contiguous parts, if there are any.

    Shapes: (..., seq, width) to (seq/parts, ..., width), or (..., seq) of integers to (seq/parts, ...).
    """
    if not parts:
        return [x]
    return [part.contiguous() for part in x.movedim(-2 if x.is_floating_point() else -1, 0).chunk(parts)]


def joined(parts: Iterable[Tensor]) -> Tensor:
    """Join parts of tokens: (seq/parts, ..., width) to (..., seq, width), in memory of tokens first, as `cut` needs."""
    return torch.cat([*parts]).movedim(0, -2)


def autocast(x: Tensor) -> Tensor:
    """Cast x to the dtype that linear layers compute in."""
    kind = x.device.type
    if x.dtype == torch.float64 or not torch.is_autocast_enabled(kind):
        return x
    return x.to(torch.get_autocast_dtype(kind))
