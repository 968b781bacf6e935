"""Mixed precision: 16 bits to compute with, float32 weights for the optimizer, and a loss that is scaled.

Source: Micikevicius et al., "Mixed Precision Training", 2018, arXiv 1710.03740, sections 3.1 (master weights) and 3.2
(scaling of the loss).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from parallelism.buffers.arena import Arena, gradient_of, lay_out, line_length
from parallelism.numerics.clipping import scale_all
from parallelism.placement import place, placement_of

if TYPE_CHECKING:
    from collectives import Communicator

HALVES = ("bfloat16", "float16")
DTYPES = ("float32", "float64", *HALVES)


@dataclass(frozen=True)
class Precision:
    """What is computed in which dtype.

    A 16-bit `dtype` alone computes in it by autocast, with float32 weights.  With `master_weights` the model's
    parameters are of it, too, and `MasterWeights` keeps float32 ones for the optimizer.  Gradients are kept and reduced
    in `grad_dtype`, float32 if None; of float32 weights, bfloat16 is how they travel.

    Raises: ValueError for what doesn't go together.
    """

    dtype: str = "float32"
    master_weights: bool = False
    grad_dtype: str | None = None

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype={self.dtype} is unknown: use {', '.join(DTYPES)}")
        if self.master_weights and self.dtype not in HALVES:
            raise ValueError(
                f"master_weights are kept beside 16-bit parameters, but dtype={self.dtype}: use {' or '.join(HALVES)}"
            )
        if self.grad_dtype not in (None, *self.grad_dtypes):
            beside = f"dtype={self.dtype}, master_weights={self.master_weights}"
            raise ValueError(f"grad_dtype={self.grad_dtype} beside {beside}: use {' or '.join(self.grad_dtypes)}")

    @property
    def grad_dtypes(self) -> tuple[str, ...]:
        """In which gradients may be reduced, the default first."""
        if self.dtype == "float64":
            return ("float64",)
        return "float32", self.dtype if self.master_weights else "bfloat16"

    @property
    def wire_dtype(self) -> str | None:
        """In which float32 gradients travel, if in another."""
        return "bfloat16" if self.grad_dtype == "bfloat16" and not self.master_weights else None

    def computing(self, device: str) -> Any:
        """What forward passes are enclosed in."""
        enabled = self.dtype in HALVES and not self.master_weights
        return torch.autocast(device.partition(":")[0], getattr(torch, self.dtype), enabled=enabled)

    @property
    def arena_dtypes(self) -> dict[str, Any]:
        """In what a model's parameters and gradients are held, if not in the parameters' own: as `Arena` takes it."""
        if not self.master_weights:
            return {}
        return {"dtype": getattr(torch, self.dtype), "grad_dtype": getattr(torch, self.grad_dtype or "float32")}

    def arena(self, model: nn.Module, comm: Communicator, device: str = "cpu") -> Arena:
        """The arena of a model of float32, or of float64, parameters."""
        return Arena(model, comm, device, **self.arena_dtypes)

    def loss_scale(self, device: str = "cpu") -> LossScale:
        if self.dtype == "float16":
            return LossScale(device=device)
        return LossScale(value=1.0, growth_interval=None, device=device)


class LossScale:
    """By what a loss is multiplied, so that small gradients are numbers of float16: on the device, as gradients are.

    Halved after a step whose gradients are not finite, which is skipped; doubled after `growth_interval` good ones in a
    row; with None, it stays.  Every rank must be told the same.  `good_steps` are those since it last changed.

    Source: as of the module; numbers as in torch.amp.GradScaler.
    """

    def __init__(
        self,
        value: float = 2.0**16,
        growth_interval: int | None = 2000,
        lowest: float = 1.0,
        highest: float = 2.0**24,
        device: str = "cpu",
    ):
        self.growth_interval, self.lowest, self.highest = growth_interval, lowest, highest
        self.value = torch.tensor(value, dtype=torch.float64, device=device)
        self.good_steps = torch.zeros_like(self.value)

    def update(self, finite: Tensor) -> None:
        if self.growth_interval is None:
            return
        good_steps = torch.where(finite, self.good_steps + 1, 0.0)
        grows = good_steps == self.growth_interval
        grown = torch.where(grows, (self.value * 2).clamp(max=self.highest), self.value)
        self.value = torch.where(finite, grown, (self.value / 2).clamp(min=self.lowest))
        self.good_steps = torch.where(grows, 0.0, good_steps)

    @property
    def inverse(self) -> Tensor | None:
        """By what gradients are multiplied, None where they stay as they are."""
        return None if self.growth_interval is None else self.value.reciprocal()

    @property
    def can_fall(self) -> Tensor:
        """Whether gradients that are not finite may be so by the scale alone."""
        return self.value > (math.inf if self.growth_interval is None else self.lowest)

    def state(self) -> tuple[float, int]:
        """Its value and its good steps, read from the device."""
        return float(self.value), int(self.good_steps)

    def load(self, value: float, good_steps: int) -> None:
        """Go on from a state, unless this one stays."""
        if self.growth_interval is not None:
            self.value.fill_(value)
            self.good_steps.fill_(good_steps)


class MasterWeights:
    """What an optimizer updates in place of `params`, which compute: `pieces`, in at least float32, by the same names.

    `params` are a model's parameters, or what a rank owns of each, the elements `spans`, flat, with the gradients in
    place.  Frozen ones have no pieces: they stay as they are.  Pieces are placed as parameters are.

    Parameters of 32 or 64 bits are their own pieces, and nothing is copied.  Else the pieces lie in one flat tensor,
    `weights`, and begin as what whole parameters were before they were rounded, `originals`, or as they are.

    A step is `take_gradients`, the optimizer's own, and `give_parameters`.
    """

    def __init__(
        self,
        params: Mapping[str, nn.Parameter],
        originals: Mapping[str, Tensor] | None = None,
        spans: Mapping[str, slice] | None = None,
    ):
        self.params = {name: param for name, param in params.items() if param.requires_grad}
        self.spans = dict(spans or {name: slice(0, param.numel()) for name, param in params.items()})
        self.weights: Tensor | None = None
        self.pieces = self.params
        if any(is_rounded(param) for param in self.params.values()):
            self._widen(originals or {})

    def _widen(self, originals: Mapping[str, Tensor]) -> None:
        slices, count = lay_out(self.params, line_length(torch.float32))
        self.weights = torch.zeros(count, dtype=torch.float32, device=next(iter(self.params.values())).device)
        self.pieces = {}
        for name, param in self.params.items():
            value = self.weights[slices[name]]
            value.copy_(originals[name].reshape(-1)[self.spans[name]] if name in originals else param.data.view(-1))
            self.pieces[name] = like(param, value.view(param.shape))

    @classmethod
    def of(cls, model: nn.Module, arena: Arena) -> MasterWeights:
        """Of a whole arena, whose originals go."""
        masters = cls(dict(model.named_parameters()), arena.originals)
        arena.originals = {}
        return masters

    @torch.no_grad()
    def take_gradients(self, factor: Tensor | None = None) -> None:
        """Give the pieces their gradients, times a factor if there is one."""
        narrow, widened, given = [], [], []
        for name, piece in self.pieces.items():
            gradient = gradient_of(self.params[name])
            assert gradient is not None
            if gradient.dtype != piece.dtype:
                narrow.append(gradient)
                gradient = torch.empty_like(piece)
                widened.append(gradient)
            piece.grad = gradient
            given.append(gradient)
        if widened:
            torch._foreach_copy_(widened, narrow)  # on a GPU many tensors by one kernel
        if given and factor is not None:
            scale_all(given, factor)

    @torch.no_grad()
    def give_parameters(self) -> None:
        """Round the pieces to the parameters, and let copies of gradients go."""
        if self.weights is not None and self.pieces:
            torch._foreach_copy_([self.params[name] for name in self.pieces], list(self.pieces.values()))
            for piece in self.pieces.values():
                piece.grad = None

    @contextmanager
    def exact(self, model: nn.Module, shard: Communicator | None = None) -> Iterator[None]:
        """Where the parameters of a model are what they are rounded from, to be read: not to compute with them.

        Ranks of `shard` have pieces of them.  Collective.
        """
        rounded = {name: p for name, p in model.named_parameters() if p.requires_grad and is_rounded(p)}
        before = {param: param.data for param in rounded.values()}
        for name, param in rounded.items():
            param.data = self._gathered(name, param, shard) if shard else self.pieces[name].data
        try:
            yield
        finally:
            for param, data in before.items():
                param.data = data

    def _gathered(self, name: str, param: nn.Parameter, shard: Communicator) -> Tensor:
        whole = torch.zeros(param.numel(), dtype=torch.float32, device=param.device)
        if name in self.pieces:
            whole[self.spans[name]] = self.pieces[name].data.view(-1)
        return shard.all_reduce(whole).view(param.shape)


def is_rounded(param: Tensor) -> bool:
    """Whether it has fewer bits than what an optimizer updates."""
    return param.dtype.itemsize < torch.float32.itemsize


def like(param: nn.Parameter, value: Tensor) -> nn.Parameter:
    """A parameter of that value, placed as another is."""
    piece = nn.Parameter(value)
    place(piece, **placement_of(param))
    return piece
