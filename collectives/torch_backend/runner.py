"""The ranks of a process group, and the running of their calls."""

import math
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from mpi4py import MPI
from torch._C._distributed_c10d import ProcessGroup, Work

from collectives.communicator import Communicator
from collectives.job.errors import CommunicationError, InputError
from collectives.torch_backend import tensors
from collectives.torch_backend.call import Tensors, TorchCall, caller
from collectives.torch_backend.work import Finished, Line, Pending, Run, at_once, seconds

SHORTEST_SLEEP_S, LONGEST_SLEEP_S = 1e-4, 0.05
Base: Any = ProcessGroup  # whose declared overloads are for its callers; torch asks a backend for one of each


class Runner(Base):
    """A process group without its calls: these run in the order in which they are made, each once ranks have agreed."""

    def __init__(self, comm: Communicator, store: dist.Store, timeout: timedelta, name: str):
        super().__init__(comm.rank, comm.size)
        self.comm, self.store, self.limit_s, self._name = comm, store, seconds(timeout), name
        self.line = Line()
        comm.barrier()  # which all ranks are here for
        self.coalesced: list[Work] | None = None
        self.failure = ""
        self.num_monitored = 0
        self.finished = Finished()

    # --- what torch asks of a group itself ---

    def rank(self) -> int:
        return self.comm.rank

    def size(self) -> int:
        return self.comm.size

    def name(self) -> str:
        return "collectives"

    getBackendName = _get_backend_name = name  # noqa: N815  as C++ calls it

    @property
    def group_name(self) -> str:
        return self._name

    @property
    def group_desc(self) -> str:
        return self._description

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _set_group_desc(self, description: str) -> None:
        self._description = description

    def getGroupName(self) -> str:  # noqa: N802  as C++ calls it
        return self._name

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")] + [torch.device("cuda")] * torch.cuda.is_available()

    def _get_backend(self, device: torch.device) -> "Runner":
        return self

    supports_splitting = supports_coalescing = supports_time_estimate = supports_shrinking = False

    def set_timeout(self, timeout: timedelta) -> None:
        self.limit_s = seconds(timeout)

    def shutdown(self) -> None:
        """End the group, and give back what it holds, unless a call has failed on any rank: it may not come here."""
        self.line.end()
        if not self.failure and self.all_are_done():
            self.comm.free()
        self.failure = self.failure or "the group has been destroyed"

    def abort(self) -> None:
        """End the group without waiting for anyone."""
        self.fail("the group has been aborted")

    def all_are_done(self) -> bool:
        """Whether every rank ends the group, and none of them because a call has failed."""
        came = self.comm.mpi.Ibarrier()
        deadline_s = time.monotonic() + self.limit_s
        sleep_s = SHORTEST_SLEEP_S
        while not came.Test():
            if time.monotonic() > deadline_s or (sleep_s == LONGEST_SLEEP_S and self.store.check(["failed"])):
                return False
            time.sleep(sleep_s)
            sleep_s = min(2 * sleep_s, LONGEST_SLEEP_S)
        return True

    def fail(self, words: str) -> None:
        """No call in this group can be made any more."""
        self.failure = words
        self.store.set("failed", words)

    # --- running calls ---

    def run(self, call: TorchCall, options: Any = None) -> Work:
        """Run a call, or have it run."""
        call.place = caller(sys._getframe(1))
        return self.submit(partial(self.execute, call, options), call.taken or call.given, options)

    def submit(self, execute: Callable[[Run], None], results: Tensors, options: Any) -> Work:
        """Do what makes calls, all of which run in one way, or have it done in its turn."""
        if not getattr(options, "asyncOp", True) and self.line.free:
            made_s = time.monotonic()
            with self.line.running:
                execute(partial(at_once, made_s))
            return self.finished
        work = Pending(execute, results)
        self.line.add(work)
        if self.coalesced is not None:
            self.coalesced.append(work)
        return work

    def execute(self, call: TorchCall, options: Any, run: Run) -> None:
        """Run a call to its end; what goes wrong is torch's kind of error."""

        limit_s = seconds(getattr(options, "timeout", None))
        if limit_s == math.inf:
            limit_s = self.limit_s
        if self.failure:
            raise dist.DistBackendError(f"{call.said}: {self.failure}")
        try:
            if refusal := call.refuse():
                self.comm._resolver.refuse(call.collective, refusal, lambda plan: run(plan, limit_s), call.place)
            tensors.run(self.comm, call, lambda plan: run(plan, limit_s))
        except TimeoutError:
            within = f"within its timeout of {limit_s:g} s"
            self.fail(f"{call.said} was not over {within}: not all {self.comm.size} ranks have come")
            raise dist.DistBackendError(self.failure) from None
        except InputError as error:
            raise dist.DistBackendError(str(error)) from None
        except (CommunicationError, MPI.Exception) as error:
            self.fail(str(error))
            raise dist.DistBackendError(self.failure) from error
