"""Stages of a pipeline, cut from a model: forward, and backward whole or in two parts, micro-batch by micro-batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from parallelism.buffers.transfer import to_device
from parallelism.pipeline.deferred import WeightGradients, deferring


class Batch(NamedTuple):
    """A micro-batch, as every stage has it.

    Shapes: tokens, targets and documents (batch, seq), positions (seq) or (batch, seq), samples (batch).
    """

    tokens: Tensor
    targets: Tensor
    positions: Tensor | None = None
    documents: Tensor | None = None
    samples: Tensor | None = None

    def to(self, device: str) -> Batch:
        """Copy to a device; the copy may still be in flight when this returns."""
        return Batch(*(None if part is None else to_device(part, device) for part in self))  # type: ignore[arg-type]


class Layer(NamedTuple):
    """What a pipeline cannot cut: the names of the modules it owns, and what they make of the layer before it."""

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


class Absent(nn.Module):
    """Takes the place of a module that another stage has."""

    def __init__(self, name: str):
        super().__init__()
        self.name = name

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(f"{self.name} is of another stage, on another rank")


def nothing(_: Any) -> None:
    pass


def cut(
    model: nn.Module,
    layers: Sequence[Layer],
    stages: Mapping[int, range],
    prepare: Callable[[Batch], None] = nothing,
    splits: bool = False,
    appeared: Callable[[Tensor], None] = nothing,
) -> dict[int, Stage]:
    """Cut out this rank's stages, by number; `stages` says which layers each has.  Other modules are deleted.

    Parameters keep their names.  A parameter that modules share stays one where all of them are here.  `prepare` is
    called before each forward pass.  With `splits`, backward passes may be done in two parts; `appeared` is called with
    each parameter whose gradient was put off, once it is computed.
    """
    own_names = {name for part in stages.values() for layer in layers[part.start : part.stop] for name in layer.modules}
    for name in (name for layer in layers for name in layer.modules if name not in own_names):
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, Absent(name))
    return {
        number: Stage(reduce(joined, layers[part.start : part.stop]), prepare, splits, appeared)
        for number, part in stages.items()
    }


class SavedForBackward(NamedTuple):
    """What a stage keeps of a micro-batch until the end of its backward pass.

    That is its input, if it isn't the first, where the graph of its output ends, if any of it is trained, and what is
    put off.
    """

    x: Tensor | None
    end: Tensor | None
    later: WeightGradients | None


class Stage:
    """Some layers of a model.  Gradients accumulate in the parameters' `grad`.

    With `splits`, a backward pass may be done in two parts; `appeared` is as of `cut`.
    """

    def __init__(
        self,
        layer: Layer,
        prepare: Callable[[Batch], None] = nothing,
        splits: bool = False,
        appeared: Callable[[Tensor], None] = nothing,
    ):
        self.layer, self.prepare, self.splits, self.appeared = layer, prepare, splits, appeared
        self._alive: dict[int, SavedForBackward] = {}

    def puts_off(self, micro_batch: int, parameter: Tensor) -> bool:
        """Return whether a part of a parameter's gradient is deferred to `backward_weights`."""
        saved = self._alive.get(micro_batch)
        return saved is not None and saved.later is not None and saved.later.puts_off(parameter)

    @property
    def num_alive(self) -> int:
        """Micro-batches whose activations are kept."""
        return len(self._alive)

    def forward(self, micro_batch: int, x: Tensor | None, batch: Batch) -> Tensor:
        """Return the output for the next stage, or the scalar loss on the last one.  The first stage's x is None."""
        self.prepare(batch)
        needs_gradient = torch.is_grad_enabled()
        later = WeightGradients(self.appeared) if self.splits and needs_gradient else None
        if x is not None:
            x = x.detach().requires_grad_(needs_gradient)
        with deferring(later):
            y = self.layer.run(x, batch)
        if needs_gradient:
            end = GradientSource.apply(y) if y.requires_grad else None
            self._alive[micro_batch] = SavedForBackward(x, end, later)  # not y, whose memory may go
        return y.detach()

    def backward(self, micro_batch: int, gradient: Tensor) -> Tensor | None:
        """Return the input's gradient, given the output's; of the last stage, given the weight of the loss."""
        saved = self._alive.pop(micro_batch)
        if saved.later:
            saved.later.at_once = True
        return backward(saved, gradient)

    def backward_inputs(self, micro_batch: int, gradient: Tensor) -> Tensor | None:
        """Run the backward pass, but defer the gradients of linear layers' weights to `backward_weights`."""
        saved = self._alive[micro_batch]
        assert saved.later, "the stage was cut without splits=True"
        self._alive[micro_batch] = SavedForBackward(None, None, saved.later)
        return backward(saved, gradient)

    def backward_weights(self, micro_batch: int) -> None:
        later = self._alive.pop(micro_batch).later
        assert later
        later.add()


def backward(saved: SavedForBackward, gradient: Tensor) -> Tensor | None:
    if saved.end is not None:
        saved.end.grad_fn.gradient = gradient  # type: ignore[union-attr]
        torch.autograd.backward((saved.end,))
    return None if saved.x is None else saved.x.grad


class GradientSource(torch.autograd.Function):
    """A scalar whose backward pass gives the tensor it was made of the `gradient` of the node.

    Given a gradient itself, torch 2.13 imports SymPy to compare shapes, which takes each rank 0.6 s in its first step.
    """

    @staticmethod
    def forward(ctx, y: Tensor) -> Tensor:  # type: ignore[override]
        return y.new_zeros(())

    @staticmethod
    def backward(ctx, one: Tensor) -> Tensor:  # type: ignore[override]
        return ctx.gradient
