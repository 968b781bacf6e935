"""Where a call stands in a device's work: after what its caller's stream holds when it is made."""

from collections.abc import Callable, Sequence

import torch


class Order:
    """Of a call that another thread runs, whose stream is not the caller's."""

    def __init__(self, device: torch.device):
        self.device = device
        self.made = torch.cuda.current_stream(device).record_event()

    def run(self, execute: Callable[[], None]) -> None:
        """Execute it after what came before it; all its work is over when this returns, on whatever stream that is."""
        stream = torch.cuda.Stream(self.device)
        with torch.cuda.stream(stream):
            stream.wait_event(self.made)
            execute()
            stream.synchronize()


def device_of(tensors: Sequence[torch.Tensor]) -> torch.device | None:
    """The tensors' device, if it has streams."""
    return next((tensor.device for tensor in tensors if tensor.is_cuda), None)
