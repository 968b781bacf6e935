"""Calls on tensors: submission, waiting, and differentiation."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor

from collectives.horovod.matching import Description, NamedCall, TensorFacts
from collectives.horovod.process_sets import ProcessSet
from collectives.horovod.tensor_calls import Tensors


def submit(
    process_set: ProcessSet,
    run: Callable[..., Any],
    tensors: Tensors,
    name: str | None,
    failure: str = "",
    num_free: int = 0,
    agree: dict[str, Any] | None = None,
    **local: Any,
) -> NamedCall:
    """Submit a call that runs `run(comm, tensors, **agree, **local)`.

    Ranks must agree in `agree`, and in the tensors' dtypes and shapes, except for the first `num_free` dims.
    """
    calls, kind = process_set.matched, run.__name__
    wrong = next((x for x in tensors if not isinstance(x, Tensor) or x.layout is not torch.strided), None)
    if wrong is not None:
        what = f"tensor of layout {wrong.layout}" if isinstance(wrong, Tensor) else type(wrong).__name__
        failure, tensors = f"{what}: pass dense tensors", ()
    elif kind in ("allgather", "alltoall", "reducescatter") and any(x.dim() == 0 for x in tensors):
        failure = "tensor of shape () has no rows: pass x.reshape(1)"
    agree = agree or {}
    facts = tuple(TensorFacts.of(x, num_free) for x in tensors)
    description = Description(kind, name or calls.name(kind), facts, tuple(agree.items()), failure)
    return calls.add(NamedCall(description, partial(run, calls.comm, tensors, **agree, **local)))


def synchronize(handle: NamedCall) -> Any:
    """Return the result of an asynchronous call.

    Raises: HorovodInternalError on every rank if the call is invalid on one, or the ranks' calls differ.
    """
    assert handle.calls is not None
    return handle.calls.wait(handle)


def poll(handle: NamedCall) -> bool:
    """Return whether an asynchronous call is complete; run it, if the other ranks wait or poll, too."""
    assert handle.calls is not None
    return handle.calls.poll(handle)


class Differentiable(torch.autograd.Function):
    """`do` to tensors forwards, `undo` to gradients backwards."""

    @staticmethod
    def forward(ctx: Any, do: Callable, undo: Callable, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.undo = undo
        return tuple(do(tensors))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        return None, None, *ctx.undo(gradients)


def alone(grouped: Callable) -> Callable[..., Any]:
    """Convert a call on a list of tensors to one on a tensor."""

    @wraps(grouped)
    def single(tensor: Tensor, *arguments: Any, **named: Any) -> Any:
        result = grouped([tensor], *arguments, **named)
        if not isinstance(result, NamedCall):
            return result[0]
        run = result.run
        result.run = lambda: run()[0]
        return result

    single.__name__ = single.__qualname__ = grouped.__name__.removeprefix("grouped_")
    return single
