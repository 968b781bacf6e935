"""Memory that the system has back while only zeros are in it."""

from __future__ import annotations

import mmap
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from collectives.arrays import views
from collectives.arrays.views import to_torch

if TYPE_CHECKING:
    import torch


class ReleasableBuffer:
    """A flat array, at first of zeros, whose memory comes with what is written and goes with `zero()`.

    It stays at one address; `tensor` is torch's view.  On a device, memory stays.
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
        """Set all to zero, and let the memory go."""
        if self.pages:
            self.pages.madvise(mmap.MADV_DONTNEED)
        else:
            self.tensor.zero_()


def large_pages(nbytes: int) -> mmap.mmap:
    """Private memory for so many bytes, in large pages where the system has them: these come faster than small ones."""
    pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # of a system that has none
            pages.madvise(mmap.MADV_HUGEPAGE)
    return pages
