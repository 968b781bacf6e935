"""Asynchronous copies between host and device: the host starts a copy, and reads the result later."""

from __future__ import annotations

import time

import torch
from torch import Tensor


class HostReadback:
    """A host tensor, which can be read immediately."""

    is_late = False

    def __init__(self, x: Tensor):
        self.x, self.ended_s = x, time.perf_counter()

    def read(self) -> Tensor:
        return self.x


class CudaReadback:
    """A GPU tensor, copied to pinned memory after the work queued so far on the current stream.

    `ended_s` is the time at which the host read it.
    """

    is_late = True

    def __init__(self, x: Tensor):
        self.x, self.ended_s = torch.empty(x.shape, dtype=x.dtype, pin_memory=True), 0.0
        self.x.copy_(x, non_blocking=True)
        self.copied = torch.cuda.current_stream(x.device).record_event()

    def read(self) -> Tensor:
        """Wait for the copy, but not for work queued after it."""
        self.copied.synchronize()
        self.ended_s = time.perf_counter()
        return self.x


Readback = HostReadback | CudaReadback


def to_device(x: Tensor, device: str | torch.device) -> Tensor:
    """Return a host tensor on a device; the copy may still be in flight."""
    return x if torch.device(device).type == "cpu" else x.pin_memory().to(device, non_blocking=True)


def read_back(x: Tensor) -> Readback:
    """Start copying a tensor to the host; nothing may write to it afterwards."""
    return CudaReadback(x) if x.is_cuda else HostReadback(x)
