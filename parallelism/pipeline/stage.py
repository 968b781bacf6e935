"""Pipeline stages, cut from a model: run a micro-batch forward, and backward whole or in two parts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from parallelism.buffers.transfer import to_device
from parallelism.step.deferred import WeightGradients, deferring


class Batch(NamedTuple):
    """A micro-batch, identical on every stage.

    `num_targets` are the numbers of targets, but for the ignored ones, of the micro-batch and of the global batch, over
    all ranks that divide these.

    Shapes: tokens, targets and documents (batch, seq), positions (seq) or (batch, seq), samples (batch), num_targets
    (2).
    """

    tokens: Tensor
    targets: Tensor
    positions: Tensor | None = None
    documents: Tensor | None = None
    samples: Tensor | None = None
    num_targets: Tensor | None = None

    def to(self, device: str) -> Batch:
        """Start copying to a device; return before the copy is complete."""
        return Batch(*(None if part is None else to_device(part, device) for part in self))  # type: ignore[arg-type]


def count_targets(batches: Sequence[Batch]) -> tuple[Tensor, Tensor]:
    """Return the number of targets of each micro-batch, and that of the global batch, at least 1, in float64.

    Shapes: (micro-batches), and a scalar.
    """
    counts = torch.stack([batch.num_targets for batch in batches if batch.num_targets is not None])
    return counts[:, 0], counts[0, 1].clamp(min=1)


class Layer(NamedTuple):
    """Indivisible unit of a pipeline: the names of its modules, and their function of the previous layer's output.

    `run` gets None on the first layer, and returns the scalar loss on the last; `cost` is relative to other layers'.
    """

    name: str
    modules: tuple[str, ...]
    run: Callable[[Tensor | None, Batch], Tensor]
    cost: float


def joined(first: Layer, second: Layer) -> Layer:
    return Layer(
        f"{first.name}, {second.name}",
        first.modules + second.modules,
        lambda x, batch: second.run(first.run(x, batch), batch),
        first.cost + second.cost,
    )


def within(context: Callable[[Batch], AbstractContextManager], layer: Layer) -> Layer:
    """Return the layer, computed in a context that is made for each micro-batch, such as autocast's."""

    def run(x: Tensor | None, batch: Batch) -> Tensor:
        with context(batch):
            return layer.run(x, batch)

    return layer._replace(run=run)


class Absent(nn.Module):
    """Placeholder for a module of another stage."""

    def __init__(self, name: str):
        super().__init__()
        self.name = name

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(f"{self.name} is of another stage, on another rank")


def cut(model: nn.Module, layers: Sequence[Layer], stages: Mapping[int, range], **options: Any) -> dict[int, Stage]:
    """Cut out this rank's stages, by number, with the layers in `stages`.  Other modules are deleted.

    Parameter names do not change.  A tied parameter remains tied among this rank's modules.  `options` are a `Stage`'s.
    """
    own_names = {name for part in stages.values() for layer in layers[part.start : part.stop] for name in layer.modules}
    for name in (name for layer in layers for name in layer.modules if name not in own_names):
        model.set_submodule(name, Absent(name))
    return {number: Stage(reduce(joined, layers[part.start : part.stop]), **options) for number, part in stages.items()}


class SavedForBackward(NamedTuple):
    """State that a stage saves of a micro-batch until the end of its backward pass."""

    x: Tensor | None  # input; None on the first stage, and after `backward_inputs`
    end: Tensor | None  # root of the output's graph; None if that needs no gradient, and after `backward_inputs`
    deferred: WeightGradients  # deferred weight gradients; none if backward passes are whole


class Stage:
    """Consecutive layers of a model.  Gradients accumulate in the parameters' `grad`.

    With `splits`, a backward pass may be done in two parts; `on_ready` is called with each parameter whose gradient was
    deferred, once it is computed.  With `token_parts`, layers compute that many parts of the rank's tokens one by one.
    """

    def __init__(
        self,
        layer: Layer,
        splits: bool = False,
        on_ready: Callable[[Tensor], None] = lambda parameter: None,
        token_parts: int | None = None,
    ):
        self.layer, self.splits, self.on_ready, self.token_parts = layer, splits, on_ready, token_parts
        self._alive: dict[int, SavedForBackward] = {}

    def is_deferred(self, micro_batch: int, parameter: Tensor) -> bool:
        """Return whether part of a parameter's gradient is deferred to `backward_weights`."""
        return self._alive[micro_batch].deferred.is_deferred(parameter)

    @property
    def num_alive(self) -> int:
        """Number of micro-batches with live activations."""
        return len(self._alive)

    def forward(self, micro_batch: int, x: Tensor | None, batch: Batch) -> Tensor:
        """Return the output for the next stage, or the scalar loss on the last one; x is None on the first stage."""
        needs_gradient, deferred = torch.is_grad_enabled(), WeightGradients(self.on_ready, self.token_parts)
        if x is not None:
            x = x.detach().requires_grad_(needs_gradient)
        if self.token_parts and batch.positions is not None:  # autograd would add up samples' gradients
            batch = batch._replace(positions=batch.positions.expand_as(batch.tokens))
        with deferring(deferred if self.token_parts or (self.splits and needs_gradient) else None):
            y = self.layer.run(x, batch)
        if needs_gradient:
            end = GradientSource.apply(y) if y.requires_grad else None
            self._alive[micro_batch] = SavedForBackward(x, end, deferred)  # not y, whose memory can be freed
        return y.detach()

    def backward(self, micro_batch: int, gradient: Tensor) -> Tensor | None:
        """Return the input's gradient, given the output's gradient, or the weight of the loss on the last stage."""
        self._alive[micro_batch].deferred.at_once = True
        dx = self.backward_inputs(micro_batch, gradient)
        self.backward_weights(micro_batch)
        return dx

    def backward_inputs(self, micro_batch: int, gradient: Tensor) -> Tensor | None:
        """Run the backward pass, but defer the gradients of linear layers' weights to `backward_weights`."""
        x, end, deferred = self._alive[micro_batch]
        self._alive[micro_batch] = SavedForBackward(None, None, deferred)
        if end is not None:
            end.grad_fn.gradient = gradient  # type: ignore[union-attr]
            torch.autograd.backward((end,))
        return None if x is None else x.grad

    def backward_weights(self, micro_batch: int) -> None:
        """Add the deferred gradients, of a stage with `splits`."""
        self._alive.pop(micro_batch).deferred.flush()


class GradientSource(torch.autograd.Function):
    """Maps a tensor to a scalar, whose backward pass gives the tensor the `gradient` that was set on the node.

    If a gradient is passed to `backward`, torch 2.13 imports SymPy to compare shapes: 0.6 s per rank in the first step.
    """

    @staticmethod
    def forward(ctx, y: Tensor) -> Tensor:  # type: ignore[override]
        return y.new_zeros(())

    @staticmethod
    def backward(ctx, one: Tensor) -> Tensor:  # type: ignore[override]
        return ctx.gradient
