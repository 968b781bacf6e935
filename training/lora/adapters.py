"""Adapters: a product of two small matrices, beside each linear layer that has one, on any layout of the layer.

With W frozen, a layer computes W x + alpha/rank B A x.  A starts with random numbers and B with zeros.

Source: Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", 2021, arXiv 2106.09685, section 4.1.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from models.decoder import Decoder
from parallelism.tensor.layers import ColumnLinear, ReplicatedLinear, RowLinear
from training.lora.targets import Target, targets_of
from training.settings.fields import RunSettings


class Factors(NamedTuple):
    """The matrices of an adapter.  Shapes: A (rank, in), B (out, rank)."""

    A: Tensor
    B: Tensor


class LowRank(nn.Module):
    """The product B A x, scaled, for a layer that is whole, or divided over tp as `layer` is.

    Beside a column-parallel layer, A is replicated and B has some rows; beside a row-parallel one, A has some columns
    and B is replicated.  What ranks exchange is `rank` wide.  Its outputs are the layer's `number`-th stacked ones, in
    which each of several `pieces` is split.

    Shapes: x and the result as the layer's.
    """

    def __init__(self, layer: nn.Module, factors: Factors, scale: float, number: int, pieces: tuple[int, ...]):
        super().__init__()
        self.scale, self.number = scale, number
        a, b = (linear(factor) for factor in factors)
        self.A: Any = a
        self.B: Any = b
        if isinstance(layer, ColumnLinear):
            self.A, self.B = ReplicatedLinear(a, layer.axis), ColumnLinear(b, layer.axis, pieces)
        elif isinstance(layer, RowLinear):
            self.A, self.B = RowLinear(a, layer.axis), ReplicatedLinear(b, layer.axis)

    def forward(self, x: Tensor) -> Tensor:
        return self.B(self.A(x)) * self.scale


def linear(weight: Tensor) -> nn.Linear:
    """Return a layer with a weight, without bias."""
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    layer.weight = nn.Parameter(weight)
    return layer


def attach_adapters(model: Decoder, settings: RunSettings, values: Mapping[str, Factors] | None = None) -> list[Target]:
    """Freeze a model, plain or divided, and add the adapters that a run's settings ask for; return their targets.

    A layer's adapters are its submodule `lora`, by the names of Hugging Face's layers.  `values` has their matrices, by
    paths there; by default they are drawn from the seed.
    """
    targets, rank = targets_of(model, settings.lora_targets), settings.lora_rank or 1
    model.requires_grad_(False)
    generator = torch.Generator().manual_seed(settings.seed)
    for target in targets:
        layer: Any = model.get_submodule(target.layer)
        if not hasattr(layer, "lora"):
            layer.lora = nn.ModuleDict()
            layer.lora.hook = layer.register_forward_hook(partial(add_adapters, target.lengths))
        factors = values[target.path] if values else drawn(shapes_of(model, target, rank), generator)
        pieces = getattr(layer, "pieces", (1,)) if len(target.lengths) == 1 else (1,)
        factors = Factors(*(factor.to(layer.weight) for factor in factors))
        layer.lora[target.name] = LowRank(layer, factors, scale_of(settings), target.number, pieces)
    return targets


def scale_of(settings: RunSettings) -> float:
    assert settings.lora_rank
    assert settings.lora_alpha
    return settings.lora_alpha / settings.lora_rank


def drawn(shapes: tuple[tuple[int, int], tuple[int, int]], generator: torch.Generator) -> Factors:
    """Draw a new adapter's A uniformly, as nn.Linear's weight; B is 0."""
    of_a, of_b = shapes
    bound = 1 / math.sqrt(of_a[1])
    return Factors(torch.empty(of_a).uniform_(-bound, bound, generator=generator), torch.zeros(of_b))


def shapes_of(model: Decoder, target: Target, rank: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the shapes of a target's A and B before they are divided."""
    inputs, outputs = whole_shape(model.get_submodule(target.layer))
    return (rank, inputs), (outputs * target.lengths[target.number] // sum(target.lengths), rank)


def whole_shape(layer: Any) -> tuple[int, int]:
    """Return the numbers of inputs and outputs of a layer before it was divided."""
    outputs, inputs = layer.weight.shape
    size = layer.axis.ranks.size if isinstance(layer, ColumnLinear | RowLinear) else 1
    return (inputs * size, outputs) if isinstance(layer, RowLinear) else (inputs, outputs * size)


def add_adapters(lengths: tuple[int, ...], layer: Any, args: tuple[Tensor], y: Tensor) -> Tensor:
    """Add the adapters' results to those of the outputs that are stacked in a layer."""
    parts = [*y.split([y.shape[-1] * length // sum(lengths) for length in lengths], -1)]
    for adapter in layer.lora.values():
        parts[adapter.number] = parts[adapter.number] + adapter(args[0])
    return torch.cat(parts, -1) if len(parts) > 1 else parts[0]


def describe(settings: RunSettings, targets: Sequence[Target]) -> str:
    """Return a line on a run's adapters, empty if there are none."""
    names = sorted({target.suffix for target in targets})
    scaling = f"rank {settings.lora_rank}, alpha {settings.lora_alpha:g}" if targets else ""
    return f"adapters of {scaling} are trained, beside {', '.join(names)}" if targets else ""


def factors_of(model: Decoder, targets: list[Target]) -> dict[str, Factors]:
    """Return the matrices of a plain model's adapters, by Hugging Face's paths."""
    adapters = {target.path: adapter_of(model, target) for target in targets}
    return {path: Factors(each.A.weight.detach(), each.B.weight.detach()) for path, each in adapters.items()}


def adapter_of(model: Decoder, target: Target) -> Any:
    layer: Any = model.get_submodule(target.layer)
    return layer.lora[target.name]


@torch.no_grad()
def merge(model: Decoder, targets: list[Target]) -> None:
    """Add the adapters of a plain model to its weights, and remove them."""
    for target in targets:
        layer: Any = model.get_submodule(target.layer)
        adapter = adapter_of(model, target)
        rows = [len(layer.weight) * length // sum(target.lengths) for length in target.lengths]
        part = layer.weight.split(rows)[target.number]
        part += adapter.scale * adapter.B.weight @ adapter.A.weight
    for target in targets:
        layer = model.get_submodule(target.layer)
        if hasattr(layer, "lora"):
            layer.lora.hook.remove()
            del layer.lora
    model.requires_grad_(True)
