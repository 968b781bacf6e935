"""Messages between two ranks."""

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from mpi4py import MPI

from collectives.communicator import Communicator
from collectives.job.errors import CommunicationError
from collectives.torch_backend.work import Finished, seconds


class Delivery(Finished):
    """A message under way, of a tensor's own memory, or of a copy where that has gaps."""

    def __init__(
        self, comm: Communicator, tensor: torch.Tensor, peer: int | None, tag: int, limit_s: float, *, sends: bool
    ):
        super().__init__([tensor])
        self.limit_s = limit_s
        self.compact = tensor.detach().contiguous()
        deliver: Any = comm.send if sends else comm.recv
        self.receives_copy = not sends and self.compact.data_ptr() != tensor.data_ptr()
        self.work = deliver(self.compact.view(-1).view(torch.uint8), peer, tag, blocking=False)
        self.letter = self.work.rounds[0]
        self.error: dist.DistBackendError | None = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        limit_s = min(self.limit_s, seconds(timeout))
        try:
            self.work.wait(limit_s)
        except TimeoutError:
            self.error = dist.DistBackendError(f"{self.work.words} was not over after {limit_s:g} s")
            raise self.error from None
        except (CommunicationError, MPI.Exception) as error:
            self.error = dist.DistBackendError(str(error))
            raise self.error from error
        self.copy_back()
        return True

    def copy_back(self) -> None:
        """What remains to be done when the message has come, perhaps to another thread."""
        if self.work.device.is_async:
            self.work.device.synchronize()
        if self.receives_copy:
            self.tensors[0].detach().copy_(self.compact)
            self.receives_copy = False

    def is_completed(self) -> bool:
        ended = self.work.done()
        if ended:
            self.copy_back()
        return ended

    def is_success(self) -> bool:
        return self.error is None and self.is_completed()

    def exception(self) -> BaseException | None:
        return self.error

    def _source_rank(self) -> int:
        return self.letter.peer

    source_rank = _source_rank
