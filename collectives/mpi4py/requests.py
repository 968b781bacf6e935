"""Requests of our collectives that are MPI's own: generalized requests, which the end of a run completes.

So `Wait`, `Test`, `Waitall`, `Testany` and the like work on lists that mix ours and the library's, by the library
itself.  Runs go on in a thread, which needs MPI_THREAD_MULTIPLE: without it, these calls are the library's.
"""

import ctypes
from collections.abc import Sequence
from typing import Any, Self

from mpi4py import MPI

from collectives.mpi4py.calls import CollectiveCall
from collectives.runtime.plan import Plan
from collectives.runtime.started import StartedCall

library_start_all = MPI.Prequest.Startall
library_wait_all = {name: getattr(MPI.Request, name) for name in ("Waitall", "waitall")}


class Run:
    """A started run of a plan, which completes a generalized request when it ends."""

    def __init__(self, call: CollectiveCall, plan: Plan):
        self.call: CollectiveCall | None = call
        self.plan = plan
        self.request = MPI.Grequest.Start(self.query)
        call.load()
        plan.at_end = self.end
        plan.start()

    def end(self) -> None:
        """Complete the request, once no thread of ours refers to the arrays any more, which are the caller's again."""
        assert self.call is not None
        self.call.store()
        self.call = None
        if isinstance(self.plan, StartedCall):
            self.plan.release()
        self.request.Complete()

    def query(self, status: MPI.Status) -> None:
        """Let a device's stream follow the run, for whoever waits inside the library."""
        if not self.plan.is_under_way:
            self.plan.done()
        status.Set_source(MPI.UNDEFINED)
        status.Set_tag(MPI.UNDEFINED)
        status.Set_elements(MPI.BYTE, 0)
        status.Set_cancelled(False)


class OurRequest:
    """Base of our requests: waits for the run of the plan, before the library completes the request."""

    run: Run

    @property
    def is_active(self) -> bool:
        return MPI.Request.__bool__(self)  # type: ignore[arg-type]

    def Wait(self, status: MPI.Status | None = None) -> Any:
        if self.is_active:
            self.run.plan.wait()
        return super().Wait(status)  # type: ignore[misc]

    def Test(self, status: MPI.Status | None = None) -> bool:
        if self.is_active:
            self.run.plan.done()
        return super().Test(status)  # type: ignore[misc, no-any-return]


class StartedRequest(OurRequest, MPI.Grequest):
    """The request of a started call, as an `I...` method returns it."""

    def __new__(cls, run: Run) -> Self:
        self: Self = super().__new__(cls, run.request)
        self.run = run
        return self


class PersistentRequest(OurRequest, MPI.Prequest):
    """A plan as a persistent request: for the library null while inactive, and a generalized request once started."""

    plan: Plan | None
    call: CollectiveCall

    def __new__(cls, call: CollectiveCall, plan: Plan) -> Self:
        self: Self = super().__new__(cls)
        self.call, self.plan = call, plan
        return self

    def __bool__(self) -> bool:
        return self.plan is not None

    def Start(self) -> None:
        if self.plan is None or self.is_active:
            raise MPI.Exception(MPI.ERR_REQUEST)
        self.run = Run(self.call, self.plan)
        ctypes.c_uint64.from_address(MPI._addressof(self)).value = self.run.request.handle

    def Free(self) -> None:
        if self.plan is None:
            raise MPI.Exception(MPI.ERR_REQUEST)
        if self.is_active:
            self.Wait()
        self.plan.free()
        self.plan = None

    free = Free


def start_all(cls: type, requests: Sequence[MPI.Prequest]) -> None:
    """Start requests, ours and the library's, as `MPI.Prequest.Startall`."""
    ours = [request for request in requests if isinstance(request, PersistentRequest)]
    library_start_all([each for each in requests if not isinstance(each, PersistentRequest)] if ours else [*requests])
    for request in ours:
        request.Start()


def wait_all(name: str, cls: type, requests: Sequence[MPI.Request], statuses: list[MPI.Status] | None = None) -> Any:
    """Wait for requests, ours first: MPICH's Waitall aborts if a null request is beside an unfinished one of ours."""
    for request in requests:
        if isinstance(request, OurRequest):
            request.Wait()
    return library_wait_all[name](requests, statuses)
