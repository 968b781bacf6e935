"""Exact gradient sums: gradients are added as integers, so that no order of the addition changes a bit of the sum.

A parameter's quantum is a power of two.  Each gradient of each of its uses in a micro-batch is rounded to multiples of
it, once, where the gradient appears; these are added up in int64, within a rank and over ranks.  The sum of a step is
thus the same for any layout whose ranks compute the same micro-batches, in any order of arrival.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from parallelism.buffers.gradients import widen
from parallelism.buffers.tensor_collectives import ExposedTime
from parallelism.mesh import Mesh
from parallelism.numerics.clipping import bits_of, from_bits, highest, kernels, power_of_two
from parallelism.numerics.dropout import kernels as pointwise_kernels

MOST_BITS = 51  # of one gradient in quanta, without its sign
SUM_BITS = 62  # of a sum of gradients
HEADROOM_BITS = 10  # by which a gradient may exceed the largest of the previous step
LEAST = -1000  # exponent of the quantum before the first step, too small for any gradient but 0


class Rounding:
    """A sum of gradients in integers, `total`; without memory for it, the first gradient waits to be rounded.

    It is the sum of a parameter and of its aliases, or of a piece of them.  A gradient is multiplied by `scale` and
    rounded; `quantum` is the value of 1 in the sum, and `peak` the largest absolute value of all gradients: scalars.
    If it `is_clear`, the next gradient replaces what is in memory, without reading it; `settle` writes the zeros of a
    sum that got none.  `observe`, if set, gets the integers of each gradient.
    """

    observe: Callable[[Tensor], None] | None = None

    def __init__(self, scale: Tensor, quantum: Tensor, peak: Tensor, total: Tensor | None = None):
        self.scale, self.quantum, self.peak, self.total = scale, quantum, peak, total
        self.is_clear = False
        self.waiting: Tensor | None = None

    def settle(self) -> None:
        if self.is_clear and self.total is not None:
            self.total.zero_()
        self.is_clear = False

    def piece(self, total: Tensor) -> Rounding:
        return Rounding(self.scale, self.quantum, self.peak, total)

    @torch.no_grad()
    def add(self, gradient: Tensor) -> None:
        """Round a gradient, and add it; it must not change afterwards."""
        if self.total is None:
            if self.waiting is None and not self.observe:
                self.waiting = gradient
                return
            self._begin(torch.empty(gradient.shape, dtype=torch.int64, device=gradient.device))
        self._add(gradient)

    @torch.no_grad()
    def move(self, home: Tensor) -> None:
        """Move the sum to other memory, flat, and leave none."""
        if self.total is None:
            self._begin(home)
            self.settle()
        else:
            home.copy_(self.total.view(-1))
        self.total = None

    def _begin(self, total: Tensor) -> None:
        """Provide memory for the sum, of the gradient that waits, if one does."""
        self.total, first, self.waiting = total, self.waiting, None
        self.is_clear = True
        if first is not None:
            self._add(first)

    def _add(self, gradient: Tensor) -> None:
        assert self.total is not None
        replaces, self.is_clear = self.is_clear, False
        flat = gradient.reshape(-1).to(torch.promote_types(gradient.dtype, torch.float32))
        total = self.total.view(-1)
        if self.observe:
            self.observe((flat.double() * self.scale).round_().long())
        if gradient.device.type == "cpu" and kernels():
            x = flat.numpy()
            bits = kernels().add_rounded(x, *bits_of(x), self.scale.numpy()[()], total.numpy(), replaces)
            peak = from_bits(bits, x.dtype)
            if peak > self.peak.numpy() or math.isnan(peak):
                self.peak.fill_(peak)
        else:
            wide = flat.double()
            self.peak.copy_(torch.maximum(self.peak, highest([wide], wide.device)[0]))
            rounded = (wide * self.scale).round_().long()
            total.copy_(rounded) if replaces else total.add_(rounded)

    @torch.no_grad()
    def floats(self, dtype: torch.dtype) -> Tensor:
        """Replace the integers by their values in a dtype of at most 64 bits, in the same memory; return these."""
        assert self.total is not None
        total, quantum = self.total.view(-1), self.quantum.to(dtype)
        out = total.view(dtype)[: len(total)]
        if total.device.type == "cpu" and kernels():
            kernels().to_floats(total.numpy(), quantum.numpy()[()], out.numpy())
        else:
            out.copy_(total.to(dtype) * quantum)
        return out.view(self.total.shape)


def weighted_sum(integers: Tensor, first: int = 0) -> int:
    """Return the sum of flat integers times the odd numbers 2 i + 1 of their positions i, from `first` on, modulo 2^64.

    It is linear: the weighted sums of several tensors add up to that of their sum.  Any one bit changes it.
    """
    if integers.device.type == "cpu" and pointwise_kernels():
        return int(pointwise_kernels().weighted(integers.numpy(), first)) % (1 << 64)
    weights = 2 * torch.arange(first, first + len(integers), device=integers.device) + 1
    return int((integers.long() * weights).sum()) % (1 << 64)


class ExactSums(ExposedTime):
    """Quanta of the gradients of a model's parameters `params`, on all ranks of a mesh.

    A quantum follows from the largest gradient of the parameter in the previous step, which is the same in all layouts;
    `exponents` has the binary logarithms, by the index in `names`, the names in the whole model.  41 bits of the
    largest gradient are kept, fewer for more than 2048 `addends` of a sum.  `tied` lists the names of each tied
    parameter in the whole model.

    A step consists of `begin`, the passes, and `fits`; if it does not, the step is to be computed again.  Construction
    is collective.
    """

    def __init__(
        self,
        params: Mapping[str, nn.Parameter],
        mesh: Mesh,
        tied: Iterable[Sequence[str]] = (),
        addends: int = 1,
        device: str = "cpu",
    ):
        first = {name: names[0] for names in tied for name in names}
        own = {name: first.get(name, name) for name in params}
        self.names = sorted({name for names in mesh.pp.all_gather_object([*own.values()]) for name in names})
        self.slots = {name: self.names.index(whole) for name, whole in own.items()}
        self.bits = min(MOST_BITS, SUM_BITS - (addends - 1).bit_length())
        self.exponents = torch.full((len(self.names),), LEAST, dtype=torch.int64, device=device)
        self.scales, self.quanta, self.peaks = torch.zeros((3, len(self.names)), dtype=torch.float64, device=device)
        self.highest = torch.zeros_like(self.peaks)
        self.agree = mesh.comm.plan("all_reduce", self.highest.view(torch.int64), op="max")  # of bits, NaN the largest
        for name, slot in self.slots.items():
            params[name].rounding = Rounding(  # type: ignore[attr-defined]
                self.scales[slot], self.quanta[slot], self.peaks[slot]
            )
            params[name].register_post_accumulate_grad_hook(widen)

    def begin(self) -> None:
        """Prepare for a step's gradients."""
        self.scales.copy_(power_of_two(-self.exponents))
        self.quanta.copy_(power_of_two(self.exponents))
        self.peaks.zero_()

    def fits(self) -> bool:
        """Return whether the integers of all ranks' gradients fit; choose the quanta of the next step.  Collective.

        A gradient that does not fit, or is not finite, makes its parameter's sum a NaN.  The host waits for its device.
        """
        self.highest.copy_(self.peaks)
        with self.waiting():
            self.agree()
        fit, finite = self.highest <= self.quanta * 2.0**self.bits, self.highest.isfinite()
        self.quanta.masked_fill_(~fit, torch.nan)
        chosen = torch.frexp(self.highest).exponent.long() + HEADROOM_BITS - self.bits
        chosen = chosen.clamp(min=LEAST)
        self.exponents = torch.where(finite & (self.highest > 0), chosen, self.exponents)
        return bool((fit | ~finite).all())

    def take(self, device: torch.device) -> tuple[list[str], Tensor]:
        """Return the parameters' names in the order of the backward pass, and whether each gradient is finite.

        As a `GradientMonitor`; of this rank's own gradients.
        """
        slots = torch.tensor([*self.slots.values()], device=device)
        return [*self.slots][::-1], self.peaks[slots].isfinite().flip(0)

    def state(self) -> dict[str, int]:
        """Return the exponents of the next step's quanta, by name."""
        return dict(zip(self.names, self.exponents.tolist(), strict=True))

    def load(self, state: Any) -> None:
        """Restore the exponents; raise ValueError if there is not one for each parameter."""
        is_whole = isinstance(state, dict) and [*state] == self.names
        if not is_whole or not all(isinstance(each, int) and LEAST <= each <= -LEAST for each in state.values()):
            raise ValueError(f"exponents={str(state)[:60]} are not those of the model's {len(self.names)} gradients")
        self.exponents = torch.tensor([*state.values()], device=self.exponents.device)
