"""Working memory that is let go where nothing is in it, and is there again, as zeros, once it is written."""

from __future__ import annotations

import mmap
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from collectives import arrays
from collectives.arrays import to_torch

if TYPE_CHECKING:
    import torch

LARGE_BYTES = 2 << 20  # of a large page, which is there at once where 512 others would be one by one


class Transient:
    """A flat array whose memory comes with what is written, and goes by `let_go()`; it stays at one address.

    `tensor` is torch's view.  On a device, memory stays, and `let_go()` only sets it to zero.
    """

    def __init__(self, count: int, dtype: torch.dtype, device: str = "cpu"):
        known, self.pages = arrays.dtype_of(str(dtype).removeprefix("torch.")), None
        if device == "cpu" and count:
            self.pages = large_pages(count * known.itemsize)
            self.array: Any = np.frombuffer(self.pages, np.uint8, count * known.itemsize).view(known)
        else:
            self.array = arrays.device(device).empty(count, known)
        self.tensor: Tensor = to_torch(self.array)
        self.let_go()

    def let_go(self) -> None:
        """Set all to zero."""
        if self.pages and hasattr(mmap, "MADV_DONTNEED"):
            self.pages.madvise(mmap.MADV_DONTNEED)
        else:
            self.tensor.zero_()


def large_pages(nbytes: int) -> mmap.mmap:
    """Private memory for so many bytes, in large pages where the system has them."""
    pages = mmap.mmap(-1, -(-nbytes // LARGE_BYTES) * LARGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # of a system that has none
            pages.madvise(mmap.MADV_HUGEPAGE)
    return pages
