"""The ranks of a process group, and the running of their calls."""

import math
import sys
import time
from collections import OrderedDict
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from mpi4py import MPI
from torch._C._distributed_c10d import ProcessGroup, Work

from collectives.communicator import Communicator
from collectives.errors import CommunicationError, InputError
from collectives.plan import Plan
from collectives.torch_backend import bound
from collectives.torch_backend.call import Call, Tensors, caller
from collectives.torch_backend.work import Finished, Line, Pending, Run, at_once, seconds

SHORTEST_SLEEP_S, LONGEST_SLEEP_S = 1e-4, 0.05
MOST_BOUND = 256  # kinds of calls kept bound
Base: Any = ProcessGroup  # whose declared overloads are for its callers; torch asks a backend for one of each


class Runner(Base):
    """A process group without its calls: these run in the order in which they are made, each once ranks have agreed."""

    def __init__(self, comm: Communicator, store: dist.Store, timeout: timedelta, name: str):
        super().__init__(comm.rank, comm.size)
        self.comm, self.store, self.limit_s, self._name = comm, store, seconds(timeout), name
        self.line = Line()
        self.word = comm.empty(7, "int64")  # digest, numbers of the bindings, whether tensors move; numbers negated
        self.num_bound = 0
        self.compare = comm.plan("all_reduce", self.word, op="max")
        self.bound: OrderedDict[tuple, bound.Bindings] = OrderedDict()
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
            self.bound.clear()
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

    def run(self, call: Call, options: Any = None) -> Work:
        """Run a call, or have it run."""
        call.place = caller(sys._getframe(1))
        return self.submit(partial(self.execute, call, options), call.taken or call.given, options)

    def submit(self, execute: Callable[[Run], None], tensors: Tensors, options: Any) -> Work:
        """Do what makes calls, all of which run in one way, or have it done in its turn."""
        if not getattr(options, "asyncOp", True) and self.line.free:
            made_s = time.monotonic()
            with self.line.running:
                execute(partial(at_once, made_s))
            return self.finished
        work = Pending(execute, tensors)
        self.line.add(work)
        if self.coalesced is not None:
            self.coalesced.append(work)
        return work

    def execute(self, call: Call, options: Any, run: Run) -> None:
        """Run a call to its end; what goes wrong is torch's kind of error."""

        limit_s = seconds(getattr(options, "timeout", None))
        if limit_s == math.inf:
            limit_s = self.limit_s
        if self.failure:
            raise dist.DistBackendError(f"{call.said}: {self.failure}")
        try:
            self.agreed(call, lambda plan: run(plan, limit_s))
        except TimeoutError:
            within = f"within its timeout of {limit_s:g} s"
            self.fail(f"{call.said} was not over {within}: not all {self.comm.size} ranks have come")
            raise dist.DistBackendError(self.failure) from None
        except InputError as error:
            raise dist.DistBackendError(str(error)) from None
        except (CommunicationError, MPI.Exception) as error:
            self.fail(str(error))
            raise dist.DistBackendError(self.failure) from error

    def agreed(self, call: Call, run: Callable[[Plan], None]) -> None:
        """Run a call that all ranks make alike, once all have bound it.

        Bindings are of all ranks together, and which ones a rank finds depends on its tensors: unless all have found
        the same, they bind anew.
        """
        bindings, place = self.bindings(call), bound.place_of(call)
        direct, staged = bindings.direct.get(place), bindings.staged
        numbers = bindings.digest, direct.number if direct else 0, staged.number if staged else 0
        self.word[:] = *numbers, bindings.moves(call, place), *(-number for number in numbers)
        run(self.compare)
        alike, same_direct, same_staged, moves = compared(self.word.tolist())
        known = (direct if same_direct else staged if moves and same_staged else None) if alike else None
        made = known or self.bind(call, bindings, place, direct=not moves)
        made.run(call, run)

    def bindings(self, call: Call) -> bound.Bindings:
        """Those of calls of its kind."""
        kind = () if call.failure else bound.kind(call)
        if not (known := self.bound.get(kind)):
            known = bound.Bindings(call.digest)
            if not call.refuse():
                self.bound[kind] = known
            if len(self.bound) > MOST_BOUND:
                self.bound.popitem(last=False)
        return known

    def bind(self, call: Call, bindings: bound.Bindings, place: bound.Place, direct: bool) -> bound.Bound:
        """Collective.  Raises: InputError on every rank where one cannot make the call, or ranks make others."""
        self.comm.compare(call.said, call.refuse(), call.place)
        self.num_bound += 1
        made = bound.bind(self.comm, call, self.num_bound, direct)
        bindings.keep(made, place, direct)
        return made


def compared(word: list[int]) -> tuple[bool, bool, bool, bool]:
    """Whether ranks make one call, have bound it where it is, and to a buffer; and whether one wants the buffer."""
    digest, direct, staged, moves, *lowest = word
    same = [high == -low for high, low in zip((digest, direct, staged), lowest, strict=True)]
    return same[0], same[1] and direct > 0, same[2] and staged > 0, moves > 0
