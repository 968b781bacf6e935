"""Asynchronous copies between host and device: the host starts a copy, and reads the result later."""

import time

import torch
from torch import Tensor


class Readback:
    """A tensor for the host to read: `x` itself, or of a GPU a copy after the work queued so far on its current stream.

    Nothing may write to the tensor afterwards.  `ended_s` is the time at which the host had it.
    """

    def __init__(self, x: Tensor):
        self.x, self.is_late, self.ended_s = x, x.is_cuda, 0.0 if x.is_cuda else time.perf_counter()
        if self.is_late:
            self.x = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
            self.x.copy_(x, non_blocking=True)
            self.copied = torch.cuda.current_stream(x.device).record_event()

    def read(self) -> Tensor:
        """Wait for the copy, but not for work queued after it."""
        if self.is_late:
            self.copied.synchronize()
            self.ended_s = time.perf_counter()
        return self.x


def to_device(x: Tensor, device: str | torch.device) -> Tensor:
    """Return a host tensor on a device; the copy may still be in flight."""
    return x if torch.device(device).type == "cpu" else x.pin_memory().to(device, non_blocking=True)
