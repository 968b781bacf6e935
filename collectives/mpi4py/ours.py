"""Our collectives on one of mpi4py's communicators."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from mpi4py import MPI

from collectives.communicator import Communicator
from collectives.mpi4py.buffers import NotOurs
from collectives.mpi4py.calls import DESCRIBE, CollectiveCall, Ranks, arguments
from collectives.mpi4py.policy import CallPolicy, seconds_saved
from collectives.mpi4py.requests import PersistentRequest, Run, StartedRequest
from collectives.runtime.resolve import Request

ALONE = Ranks(0, 1)

# Errors of arguments that are invalid, or not for us.  Any other error is of an array's own code: it might not recur,
# and the library would then run the call here that we run on the other ranks.
REFUSALS = NotOurs, TypeError, ValueError, LookupError, AttributeError, BufferError, ImportError, OverflowError
REFUSALS += (MPI.Exception,)  # type: ignore[assignment]


class Ours:
    """The choice for each of a communicator's calls, and our communicator, which the first call of ours sets up."""

    def __init__(self, mpi: MPI.Comm, policy: CallPolicy):
        self.mpi, self.policy = mpi, policy
        self.ranks = ALONE if mpi.Is_inter() else Ranks(mpi.Get_rank(), mpi.Get_size())
        self.comm: Communicator | None = None
        self.saved_s: dict[tuple[str, int], float | None] = {}

    def described(self, name: str, args: tuple, kwargs: dict[str, Any], may_wait: bool = True) -> CollectiveCall | None:
        """Describe a call that will be ours; None for one that is the library's.

        The first one sets up our communicator, which waits for the other ranks; if waiting is not allowed, it is the
        library's.
        """
        call = None
        if self.ranks.size > 1:
            with suppress(*REFUSALS):  # the library reports any fault of the arguments
                call = DESCRIBE[name](self.ranks, *args, **kwargs)
        if call and self.policy.is_worth_it(call.collective, call.nbytes, is_started=not may_wait):
            if self.comm is None and may_wait:
                self.set_up()
            return call if self.saving_s(call) is not None else None
        return None

    def saving_s(self, call: CollectiveCall) -> float | None:
        """Return the seconds that a call saves, None if it will be the library's."""
        if self.comm is None:
            return None
        key = call.collective, call.nbytes
        if key not in self.saved_s:
            self.saved_s[key] = seconds_saved(self.comm, *key, self.policy)
        return self.saved_s[key]

    def set_up(self) -> None:
        """Make our communicator, and the parts that its calls would else make on first use.  Collective."""
        self.comm = Communicator(self.mpi)
        self.comm._resolver.gate()
        self.comm._resolver.binder.reads_processes  # noqa: B018

    def run(self, call: CollectiveCall) -> None:
        assert self.comm is not None
        call.begin()
        self.comm._resolver.run(*call[:4])
        call.end()

    def start(self, call: CollectiveCall) -> MPI.Request:
        assert self.comm is not None
        return StartedRequest(Run(call, self.comm._resolver.plan_later(Request(*call[:4]))))

    def bind(self, call: CollectiveCall) -> MPI.Prequest:
        assert self.comm is not None
        return PersistentRequest(call, self.comm._resolver.plan(call.collective, call.x, arguments(call)))

    def free(self) -> None:
        if self.comm is not None:
            self.comm.free()
            self.comm = None
