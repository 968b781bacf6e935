"""mpi4py's communicators, with collectives that are ours where that is worth it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from mpi4py import MPI

from collectives.communicator import Communicator
from collectives.mpi4py.calls import DESCRIBE, Call, Ranks, arguments
from collectives.mpi4py.policy import Policy, seconds_saved
from collectives.mpi4py.requests import PersistentRequest, Run, StartedRequest
from collectives.runtime.resolve import Request

Method = Callable[..., Any]


class Ours:
    """Our collectives on one of mpi4py's communicators, set up by the first call that is to be ours."""

    def __init__(self, mpi: MPI.Comm, policy: Policy):
        self.mpi, self.policy = MPI.Intracomm(mpi), policy
        self.ranks = Ranks(mpi.Get_rank(), mpi.Get_size()) if mpi else Ranks(0, 1)
        self.comm: Communicator | None = None
        self.saved_s: dict[tuple[str, int], float | None] = {}

    def described(self, name: str, args: tuple, kwargs: dict[str, Any]) -> Call | None:
        """Describe a call that is worth it; None for one that is the library's."""
        call = None
        with suppress(Exception):  # whatever is wrong with the arguments, the library says it
            call = DESCRIBE[name](self.ranks, *args, **kwargs)
        if call and self.ranks.size > 1 and self.policy.is_worth_it(call.collective, call.nbytes):
            return call
        return None

    def takes(self, name: str, call: Call | None) -> bool:
        """Decide on a call, as all ranks do, and note it."""
        saved_s = None
        if call is not None and self.comm is not None:
            key = call.collective, call.nbytes
            if key not in self.saved_s:
                self.saved_s[key] = seconds_saved(self.comm, *key, self.policy)
            saved_s = self.saved_s[key]
        self.policy.note(name, saved_s)
        return saved_s is not None

    def set_up(self) -> None:
        """Make our communicator, and what its calls would else make when they first wait for others.  Collective."""
        if self.comm is None:
            self.comm = Communicator(self.mpi)
            self.comm._resolver.gate()
            self.comm._resolver.binder.reads_processes  # noqa: B018

    def run(self, call: Call) -> None:
        assert self.comm is not None
        call.begin()
        self.comm._resolver.run(*call[:4])
        call.end()

    def start(self, call: Call) -> MPI.Request:
        assert self.comm is not None
        return StartedRequest(Run(call, self.comm._resolver.plan_later(Request(*call[:4]))))

    def bind(self, call: Call) -> MPI.Prequest:
        assert self.comm is not None
        return PersistentRequest(call, self.comm._resolver.plan(call.collective, call.x, arguments(call)))

    def free(self) -> None:
        if self.comm is not None:
            self.comm.free()
            self.comm = None


class Face:
    """What a communicator's class has before the library's own: the methods below, and what makes communicators."""

    policy = Policy()
    _ours: Ours | None = None

    @property
    def ours(self) -> Ours:
        if self._ours is None:
            assert isinstance(self, MPI.Comm)
            self._ours = Ours(self, self.policy)
        return self._ours


def blocking(name: str, library: Method) -> Method:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        ours = self.ours
        call = ours.described(name, args, kwargs)
        if call is not None:
            ours.set_up()
        return ours.run(call) if ours.takes(name, call) else library(self, *args, **kwargs)

    return method


def nonblocking(name: str, library: Method) -> Method:
    """May not wait for others to come: it is the library's until a blocking call has set ours up."""

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        ours = self.ours
        call = ours.described(name, args, kwargs) if ours.policy.has_threads else None
        return ours.start(call) if ours.takes(f"I{name.lower()}", call) else library(self, *args, **kwargs)

    return method


def persistent(name: str, library: Method) -> Method:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        ours, given = self.ours, {key: value for key, value in kwargs.items() if key != "info"}
        call = ours.described(name, args, given) if ours.policy.has_threads else None
        if call is not None:
            ours.set_up()
        return ours.bind(call) if ours.takes(f"{name}_init", call) else library(self, *args, **kwargs)

    return method


def wrapping(library: Method) -> Method:
    """Return a method of the library that makes communicators, as one that makes ours."""

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        made = library(self, *args, **kwargs)
        if isinstance(made, tuple):
            return tuple(wrap(each, self.policy) if isinstance(each, MPI.Comm) else each for each in made)
        return wrap(made, self.policy)

    return method


def freeing(library: Method) -> Method:
    def method(self: Any) -> None:
        if self._ours is not None:
            self._ours.free()
            self._ours = None
        library(self)

    return method


MAKING = "Clone Dup Dup_with_info Idup Idup_with_info Create Create_group Split Split_type Create_cart Create_graph "
MAKING += "Create_dist_graph Create_dist_graph_adjacent Shrink Ishrink Sub"
FREEING = "Free Disconnect"


def our_class(library: type) -> type:
    """Return a class of the library's with the methods that may be ours."""
    wrappers: list[tuple[str, Method]] = [(name, functools.partial(blocking, name)) for name in DESCRIBE]
    wrappers += [(f"I{name.lower()}", functools.partial(nonblocking, name)) for name in DESCRIBE]
    wrappers += [(f"{name}_init", functools.partial(persistent, name)) for name in DESCRIBE]
    wrappers += [(name, wrapping) for name in MAKING.split()] + [(name, freeing) for name in FREEING.split()]
    methods = {}
    for name, wrapper in wrappers:
        if function := getattr(library, name, None):
            methods[name] = functools.update_wrapper(wrapper(function), function)
    return type(library.__name__, (Face, library), methods)


CLASSES = {
    library: our_class(library)
    for library in (MPI.Cartcomm, MPI.Graphcomm, MPI.Distgraphcomm, MPI.Intracomm)  # the most special ones first
}


def wrap(comm: MPI.Comm, policy: Policy) -> Any:
    """Return an intracommunicator as one of ours, whose calls follow a policy; another communicator as it is."""
    if isinstance(comm, Face):
        comm.policy = policy
        return comm
    for library, own in CLASSES.items():
        if isinstance(comm, library):
            wrapped = own(comm)
            wrapped.policy = policy
            return wrapped
    return comm
