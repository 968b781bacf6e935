"""Releasable buffers: memory goes back to the operating system while it holds only zeros."""

import mmap
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor

from collectives.arrays import views
from collectives.arrays.views import to_torch


class ReleasableBuffer:
    """A flat array, initially zeros, whose pages are allocated by the first write and released by `zero()`.

    Its address never changes; `tensor` is torch's view.  Device memory is not released.
    """

    def __init__(self, count: int, dtype: torch.dtype, device: str = "cpu"):
        np_dtype, self.pages = views.dtype_of(str(dtype).removeprefix("torch.")), None
        if device == "cpu" and count and hasattr(mmap, "MADV_DONTNEED"):
            self.pages = large_pages(count * np_dtype.itemsize)
            self.array: Any = np.frombuffer(self.pages, np.uint8, count * np_dtype.itemsize).view(np_dtype)
        else:
            self.array = views.device(device).empty(count, np_dtype)
        self.tensor: Tensor = to_torch(self.array)
        self.zero()

    def zero(self) -> None:
        """Set all elements to zero, and release the memory."""
        if self.pages:
            self.pages.madvise(mmap.MADV_DONTNEED)
        else:
            self.tensor.zero_()


def large_pages(nbytes: int) -> mmap.mmap:
    """Map private memory, in huge pages where the system has them: faulting these in takes less time."""
    pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # no huge pages on this system
            pages.madvise(mmap.MADV_HUGEPAGE)
    return pages
