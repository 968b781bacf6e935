"""Mixed precision: the dtypes of computation, storage and communication.  The planner uses it, without torch.

Source: Micikevicius et al., "Mixed Precision Training", 2018, arXiv 1710.03740, section 3.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from parallelism.numerics.non_finite import LossScale

ITEMSIZES = {"float32": 4, "float64": 8, "bfloat16": 2, "float16": 2}
HALVES = ("bfloat16", "float16")
DTYPES = tuple(ITEMSIZES)


class ElementBytes(NamedTuple):
    """Bytes per element of parameters, gradients, optimizer states, activations and the residual stream.

    `master` is that of the float32 master weights, 0 if there are none, and `cast` that of the copy of a parameter that
    matrix products use, 0 if they use the parameter.

    Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2019, arXiv
    1910.02054, section 3.1: Adam's two moments, with master weights, and these in float32, K = 12.
    """

    parameter: int
    gradient: int
    state: int
    activation: int
    residual: int
    cast: int = 0
    master: int = 0


@dataclass(frozen=True)
class Precision:
    """Dtypes of computation, parameters and gradients.

    A 16-bit `dtype` alone means autocast, with float32 weights.  With `master_weights` the model's parameters are of
    that dtype, too, and `MasterWeights` keeps float32 copies for the optimizer.  Gradients are kept and reduced in
    `grad_dtype`, float32 if None; with float32 weights, bfloat16 applies to communication only.

    Raises: ValueError for incompatible values.
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
        """Dtypes in which gradients may be reduced, the default first."""
        if self.dtype == "float64":
            return ("float64",)
        return "float32", self.dtype if self.master_weights else "bfloat16"

    @property
    def wire_dtype(self) -> str | None:
        """Dtype in which float32 gradients are sent, or None if that is float32."""
        return "bfloat16" if self.grad_dtype == "bfloat16" and not self.master_weights else None

    def computing(self, device: str) -> Any:
        """Return the context, such as autocast, for forward passes."""
        import torch

        enabled = self.dtype in HALVES and not self.master_weights
        return torch.autocast(device.partition(":")[0], getattr(torch, self.dtype), enabled=enabled)

    @property
    def arena_dtypes(self) -> dict[str, Any]:
        """Dtypes of the arena's parameters and gradients, where they differ from the model's; arguments of `Arena`."""
        if not self.master_weights:
            return {}
        import torch

        return {"dtype": getattr(torch, self.dtype), "grad_dtype": getattr(torch, self.grad_dtype or "float32")}

    def loss_scale(self, device: str = "cpu") -> LossScale:
        from parallelism.numerics.non_finite import LossScale

        if self.dtype == "float16":
            return LossScale(device=device)
        return LossScale(value=1.0, growth_interval=None, device=device)

    @property
    def element_bytes(self) -> ElementBytes:
        if self.dtype not in HALVES:
            size = ITEMSIZES[self.dtype]
            return ElementBytes(size, size, size, size, size)
        if not self.master_weights:
            return ElementBytes(4, 4, 4, 2, 4, cast=2)
        return ElementBytes(2, ITEMSIZES[self.grad_dtype or "float32"], 4, 2, 2, master=4)
