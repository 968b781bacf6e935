"""An arena: a module's parameters and gradients as slices of two flat arrays."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from collectives.arrays import to_torch

if TYPE_CHECKING:
    from collectives import Communicator

ALIGNMENT_BYTES = 64  # where each parameter begins, so that kernels find cache lines and vectors whole


class Arena:
    """Moves a module's parameters into one flat array, and gives them gradients in another of the same layout.

    The arrays are NumPy's or CuPy's (`device`), from `comm.empty`; torch sees them through DLPack, without a copy.
    A collective on `parameters` or `gradients` is one on all of them.  Gaps between parameters hold zeros.

    Gradients stay where they are: clear them with `zero_grad()`, not by setting them to None.

    With `dtype`, parameters become of it; what they were is in `originals`, by name, until somebody takes it.  With
    another `grad_dtype`, they have no `grad`: each gradient that appears is added to `wide_grad` at once, and goes.

    Raises: ValueError for a module with parameters of several dtypes, or with none.
    """

    def __init__(
        self,
        module: nn.Module,
        comm: Communicator,
        device: str = "cpu",
        dtype: torch.dtype | None = None,
        grad_dtype: torch.dtype | None = None,
    ):
        params = dict(module.named_parameters())
        if not params:
            raise ValueError("an arena holds parameters, but the module has no parameters")
        dtypes = {p.dtype for p in params.values()}
        if len(dtypes) != 1:
            raise ValueError(f"an arena holds parameters of one dtype, the module has {sorted(map(str, dtypes))}")
        dtype = dtype or dtypes.pop()
        step = ALIGNMENT_BYTES // dtype.itemsize
        self.slices: dict[str, slice] = {}
        end = 0
        for name, param in params.items():
            begin = -(-end // step) * step
            end = begin + param.numel()
            self.slices[name] = slice(begin, end)
        self.originals: dict[str, Tensor] = {}
        self.parameters, self._parameters = self._allocate(comm, end, dtype, device)
        self.gradients, self._gradients = self._allocate(comm, end, grad_dtype or dtype, device)
        for name, param in params.items():
            self._adopt(name, param)

    def _allocate(self, comm: Communicator, count: int, dtype: Any, device: str) -> tuple[Any, Any]:
        """A flat array of zeros, and torch's view of it."""
        array = comm.empty(count, str(dtype).removeprefix("torch."), device)
        tensor = to_torch(array)
        tensor.zero_()
        return array, tensor

    def _adopt(self, name: str, param: nn.Parameter) -> None:
        place = self.slices[name]
        home = self._parameters[place].view(param.shape)
        home.copy_(param.data)
        if home.dtype != param.dtype:
            self.originals[name] = param.data
        param.data = home
        gradient = self._gradients[place].view(param.shape)
        param.grad = gradient if param.requires_grad and gradient.dtype == home.dtype else None
        if param.requires_grad and gradient.dtype != home.dtype:
            param.wide_grad = gradient  # type: ignore[attr-defined]
            param.register_post_accumulate_grad_hook(widen)

    def zero_grad(self) -> None:
        """Set all gradients to zero, in place."""
        self._gradients.zero_()


def widen(param: Tensor) -> None:
    """Add a gradient that has appeared to those in another dtype."""
    assert param.grad is not None
    param.wide_grad.add_(param.grad)  # type: ignore[attr-defined]
    param.grad = None
