"""Activation recomputation: a module saves only its inputs, and repeats its forward pass in the backward pass.

Source: Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016, arXiv 1604.06174; Korthikanti et al.,
"Reducing Activation Recomputation in Large Transformer Models", 2022, arXiv 2205.05198, section 5 (selective).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from parallelism.numerics.dropout import BatchPosition
from parallelism.step.deferred import CURRENT, deferring


def recompute(module: nn.Module, position: BatchPosition | None = None, method: str = "forward") -> None:
    """Make a module recompute the activations of one of its methods; parameter names do not change.

    In the backward pass, the method runs again with the saved inputs; the recomputation repeats the dropout masks, by
    `position` or of torch's own dropout.
    """
    forward, position = getattr(module, method), position or BatchPosition()

    def checkpointed(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, context_fn=partial(contexts, position), **kwargs)

    setattr(module, method, checkpointed)  # a wrapper module would change parameter names


def contexts(position: BatchPosition) -> tuple[AbstractContextManager, AbstractContextManager]:
    """Return the contexts of the forward pass and of its recomputation, to which this batch and deferral return."""
    samples, positions, deferred = position.samples, position.positions, CURRENT.get()

    @contextmanager
    def as_before() -> Iterator[None]:
        now = position.samples, position.positions
        position.samples, position.positions = samples, positions
        try:
            with deferring(deferred):
                yield
        finally:
            position.samples, position.positions = now

    return nullcontext(), as_before()
