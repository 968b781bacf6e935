"""Flat arrays: an arena's hold a module's parameters and gradients; a releasable buffer's zeros occupy no memory."""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import collectives
from collectives.arrays import views
from collectives.arrays.views import to_torch
from parallelism.buffers.gradients import own_gradient

ALIGNMENT_BYTES = 64  # of each parameter, so that kernels use whole cache lines and vectors


class Arena:
    """Moves a module's parameters into one flat array, and their gradients into another of the same layout.

    They are torch tensors of memory from `comm.empty`, on a GPU as well, so that collectives on slices of them follow
    torch's current stream.  One collective on `parameters` or `gradients` covers all of them.  Gaps between parameters
    hold zeros.

    Gradients must stay in the array: clear them with `zero_grad()`, not by setting them to None.  Frozen parameters
    have none, and with gradients=False none is allocated.

    `dtype` converts the parameters; their values before the conversion are in `originals`, by name.  With a different
    `grad_dtype` they have no `grad`: each new gradient is added to `wide_grad` and freed.

    Raises: ValueError if the module has no parameters, or parameters of several dtypes.
    """

    def __init__(
        self,
        module: nn.Module,
        comm: collectives.Communicator,
        device: str = "cpu",
        gradients: bool = True,
        dtype: torch.dtype | None = None,
        grad_dtype: torch.dtype | None = None,
    ):
        params = dict(module.named_parameters())
        param_dtype = one_dtype(params.values())
        dtype = dtype or param_dtype
        self.originals = {} if dtype == param_dtype else {name: param.data for name, param in params.items()}
        self.slices, count = lay_out(params, line_length(dtype))
        self.parameters = allocate(comm, count, dtype, device)
        trained = {name: param for name, param in params.items() if gradients and param.requires_grad}
        _, num_trained = lay_out(trained, line_length(dtype))  # which come first
        self.gradients = allocate(comm, num_trained, grad_dtype or dtype, device)
        for name, param in params.items():
            span = self.slices[name]
            home = self.parameters[span].view(param.shape)
            home.copy_(param.data)
            param.data = home
            own_gradient(param, self.gradients[span].view(param.shape) if name in trained else None)
        self._gradients = [(name, param, param.grad) for name, param in params.items() if param.grad is not None]

    def broadcast(self, comm: collectives.Communicator) -> None:
        """Broadcast the parameters of rank 0, and their `originals`, to all ranks.  Collective."""
        comm.broadcast(self.parameters, root=0)
        for original in self.originals.values():
            comm.broadcast(original, root=0)

    def check_gradients(self) -> None:
        """Raise RuntimeError if a gradient is no longer in the arena, as when an optimizer sets it to None."""
        for name, param, gradient in self._gradients:
            if param.grad is not gradient:
                raise RuntimeError(
                    f"the gradient of {name} was replaced, and would not be averaged over the ranks: clear gradients "
                    "by the module's zero_grad(), or by optimizer.zero_grad(set_to_none=False)"
                )

    def zero_grad(self) -> None:
        """Set all gradients to zero, in place."""
        self.gradients.zero_()


def one_dtype(params: Iterable[nn.Parameter]) -> torch.dtype:
    dtypes = {p.dtype for p in params}
    if not dtypes:
        raise ValueError("an arena holds parameters, but the module has no parameters")
    if len(dtypes) != 1:
        raise ValueError(f"an arena holds parameters of one dtype, the module has {sorted(map(str, dtypes))}")
    return dtypes.pop()


def line_length(dtype: torch.dtype) -> int:
    """Return the alignment of parameters in elements."""
    return ALIGNMENT_BYTES // dtype.itemsize


def lay_out(params: Mapping[str, nn.Parameter], line: int) -> tuple[dict[str, slice], int]:
    """Return each parameter's slice of a flat array, aligned to `line` elements, and the array's length.

    Frozen parameters come last, so that the gradients are contiguous.

    >>> lay_out({"a": nn.Parameter(torch.zeros(3)), "b": nn.Parameter(torch.zeros(2, 10))}, line=16)
    ({'a': slice(0, 3, None), 'b': slice(16, 36, None)}, 48)
    """
    slices, end = {}, 0
    for name, param in sorted(params.items(), key=lambda item: not item[1].requires_grad):
        slices[name] = slice(end, end + param.numel())
        end += -(-param.numel() // line) * line
    return slices, end


def allocate(comm: collectives.Communicator, shape: int | tuple[int, ...], dtype: torch.dtype, device: str) -> Tensor:
    """Allocate a tensor of zeros in symmetric memory.  Collective."""
    return to_torch(comm.empty(shape, str(dtype).removeprefix("torch."), device)).zero_()


class ReleasableBuffer:
    """A flat array, initially zeros, whose pages are allocated by the first write and released by `zero()`.

    `tensor` is the memory, whose address never changes.  Device memory is not released.
    """

    def __init__(self, count: int, dtype: torch.dtype, device: str = "cpu"):
        np_dtype, self.pages = views.dtype_of(str(dtype).removeprefix("torch.")), None
        if device == "cpu" and count and hasattr(mmap, "MADV_DONTNEED"):
            self.pages = mmap.mmap(-1, count * np_dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            if hasattr(mmap, "MADV_HUGEPAGE"):  # faulting these in takes less time
                with suppress(OSError):  # no huge pages on this system
                    self.pages.madvise(mmap.MADV_HUGEPAGE)
            array: Any = np.frombuffer(self.pages, np.uint8, count * np_dtype.itemsize).view(np_dtype)
        else:
            array = views.device(device).empty(count, np_dtype)
        self.tensor: Tensor = to_torch(array)
        self.zero()

    def zero(self) -> None:
        """Set all elements to zero, and release the memory."""
        if self.pages:
            self.pages.madvise(mmap.MADV_DONTNEED)
        else:
            self.tensor.zero_()
