"""Asynchronous copies between host and device: the host starts a copy, and reads the result later."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor


class Moment:
    """A point in time: now, or for a GPU when the work queued so far on its current stream is done."""

    def __init__(self, device: str | torch.device):
        self.host_s = time.perf_counter()
        self.event: Any = None
        if torch.device(device).type == "cuda":
            self.event = torch.cuda.Event(enable_timing=True)
            self.event.record(torch.cuda.current_stream(device))

    def wait(self) -> None:
        if self.event:
            self.event.synchronize()

    def since(self, earlier: Moment) -> float:
        """Return the seconds from an earlier moment of the same device to this one, both of which are over."""
        if self.event:
            return earlier.event.elapsed_time(self.event) / 1e3  # milliseconds
        return self.host_s - earlier.host_s


class Readback:
    """A tensor for the host to read: `x` itself, or of a GPU a copy after the work queued so far on its current stream.

    Nothing may write to the tensor afterwards.  `ended` is the moment at which the copy is complete.
    """

    def __init__(self, x: Tensor):
        self.x, self.is_late = x, x.is_cuda
        if self.is_late:
            self.x = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
            self.x.copy_(x, non_blocking=True)
        self.ended = Moment(x.device)

    def read(self) -> Tensor:
        """Wait for the copy, but not for work queued after it."""
        self.ended.wait()
        return self.x


def to_device(x: Tensor, device: str | torch.device) -> Tensor:
    """Return a host tensor on a device; the copy may still be in flight."""
    return x if torch.device(device).type == "cpu" else x.pin_memory().to(device, non_blocking=True)
