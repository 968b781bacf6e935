"""The methods of mpi4py's communicators, replaced by ones that choose between the library's and ours.

They are replaced in the library's own classes: so communicators of any origin keep their types, handles and pickles.
The state of a communicator is dropped when MPI frees it.
"""

import ctypes
import functools
import gc
from collections.abc import Callable
from typing import Any

from mpi4py import MPI
from numpy import ndarray

from collectives.mpi4py.calls import DESCRIBE
from collectives.mpi4py.policy import NAMES, NEVER, CallPolicy, Ours
from collectives.mpi4py.requests import library_wait_all, start_all, wait_all
from collectives.schedule.spec import COLLECTIVES, Chunks

Method = Callable[..., Any]


class Communicators:
    """The state of the communicators of a process, by their handles."""

    def __init__(self) -> None:
        self.by_handle: dict[int, Ours] = {}
        self.policy: CallPolicy | None = None  # of those without a state yet; None: their calls are the library's
        self.small_bytes = dict.fromkeys(DESCRIBE, NEVER)  # below which a method's calls are the library's
        self.keyval = MPI.Comm.Create_keyval(delete_fn=self.forget)
        for name in ("Free", "Disconnect"):
            replace(name, self.freeing)
        replace_in(MPI.Prequest, "Startall", classmethod(start_all))
        for name in library_wait_all:
            replace_in(MPI.Request, name, classmethod(functools.partial(wait_all, name)))

    def add_all(self, policy: CallPolicy) -> None:
        """Apply a policy to the calls of all communicators."""
        self.policy = policy
        self.heed(policy)

    def add(self, comm: MPI.Comm, policy: CallPolicy) -> Ours:
        """Apply a policy to a communicator's calls."""
        self.heed(policy)
        if ours := self.by_handle.get(comm.handle):
            ours.policy = policy
            return ours
        ours = self.by_handle[comm.handle] = Ours(comm, policy)
        comm.Set_attr(self.keyval, True)  # its callback runs when the communicator is freed
        return ours

    def heed(self, policy: CallPolicy) -> None:
        """Replace the methods whose calls may be ours."""
        for name, most in self.small_bytes.items():
            if policy.small_bytes(name) < most:
                self.small_bytes[name] = policy.small_bytes(name)
                for method, run in ((name, Ours.run), (f"I{name.lower()}", Ours.start), (f"{name}_init", Ours.bind)):
                    replace(method, functools.partial(self.replacement, name, run))

    def ours(self, comm: MPI.Comm) -> Ours | None:
        """Return ours of a communicator, None where all of its calls are the library's."""
        ours = self.by_handle.get(comm.handle)
        return self.add(comm, self.policy) if ours is None and self.policy and comm else ours

    def forget(self, comm: MPI.Comm, keyval: int, value: Any) -> None:
        self.by_handle.pop(comm.handle, None)

    def replacement(self, name: str, run: Method, library: Method) -> Method:
        """Return a method that passes small arrays to the library at once, and chooses for others.

        `run` is that of `Ours` for a call that is ours.
        """

        def choose(comm: Any, *args: Any, **kwargs: Any) -> Any:
            ours = self.ours(comm)
            call = ours and ours.described(name, run, args, kwargs)
            if ours:
                ours.policy.note(library.__name__, is_ours=call is not None)
            return run(ours, call) if call else library(comm, *args, **kwargs)

        return shortcut(name, library, choose, self.small_bytes[name])

    def freeing(self, library: Method) -> Method:
        """Return a method that also frees our communicator, as all ranks do."""

        def method(comm: Any) -> None:
            if ours := self.by_handle.get(comm.handle):
                ours.free()
            library(comm)

        return method


@functools.cache
def communicators() -> Communicators:
    """Return the state of this process's communicators, initially of none."""
    return Communicators()


def shortcut(name: str, library: Method, general: Method, small: int) -> Method:
    """Return a method that passes calls on a vector of less than `small` bytes to the library, others to `general`.

    These are most calls, and short: parameters by name save half of the time that a tuple and a dict of all would take.
    """
    spec = COLLECTIVES[NAMES[name]]
    by_input = spec.gives is Chunks.ALL and spec.gets is Chunks.OWN  # which of two buffers has the vector's length
    is_block = spec.gives is Chunks.ALL_ON_ROOT  # neither has on most ranks: `recvbuf` is a block of it

    def one_buffer(comm: Any, buf: Any, *rest: Any, **named: Any) -> Any:
        method = library if (buf.nbytes if type(buf) is ndarray else most_bytes(buf)) < small else general
        return method(comm, buf, *rest, **named)

    def two_buffers(comm: Any, sendbuf: Any, recvbuf: Any, *rest: Any, **named: Any) -> Any:
        sized = sendbuf if by_input else recvbuf
        nbytes = sized.nbytes if type(sized) is ndarray else most_bytes(sized)
        method = library if nbytes * (comm.Get_size() if is_block else 1) < small else general
        return method(comm, sendbuf, recvbuf, *rest, **named) if rest or named else method(comm, sendbuf, recvbuf)

    return two_buffers if "out" in spec.takes else one_buffer


def most_bytes(data: Any) -> int:
    """Return an upper bound of the bytes of plain data; a huge number for data that need a closer check."""
    if type(data) is list and data and type(data[0]) is ndarray:
        kind = data[-1] if isinstance(data[-1], MPI.Datatype) else None
        if kind and len(data) == 3 and type(data[1]) is int:
            return data[1] * kind.Get_size()  # type: ignore[no-any-return]
        if kind is None or kind.is_predefined:
            return data[0].nbytes  # type: ignore[no-any-return]
    return NEVER


def replace(name: str, make: Callable[[Method], Method]) -> None:
    """Replace a method of communicators, if there is one, by a wrapper of the library's."""
    for library_class in (MPI.Comm, MPI.Intracomm):
        if function := vars(library_class).get(name):
            function = getattr(function, "__wrapped__", function)
            replace_in(library_class, name, functools.update_wrapper(make(function), function))


def replace_in(library_class: type, name: str, value: Any) -> None:
    """Replace an attribute of an extension module's class, which refuses that but in its dictionary."""
    gc.get_referents(vars(library_class))[0][name] = value
    ctypes.pythonapi.PyType_Modified(ctypes.py_object(library_class))
