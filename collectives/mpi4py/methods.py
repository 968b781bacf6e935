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
from collectives.mpi4py.policy import NEVER, CallPolicy, Ours
from collectives.mpi4py.requests import library_wait_all, start_all, wait_all

Method = Callable[..., Any]

# The argument whose bytes, in a NumPy array, are the vector's; in the second table, those of a block of it.
SIZED_BY = {"Bcast": 0, "Allreduce": 1, "Reduce": 0, "Reduce_scatter_block": 0, "Reduce_scatter": 0, "Allgather": 1}
SIZED_BY |= {"Allgatherv": 1, "Alltoall": 1, "Scan": 1, "Exscan": 1}
BLOCK_SIZED_BY = {"Gather": 0, "Scatter": 1}


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
            ours.policy, ours.saved_s = policy, {}
            return ours
        ours = self.by_handle[comm.handle] = Ours(comm, policy)
        comm.Set_attr(self.keyval, True)  # its callback runs when the communicator is freed
        return ours

    def heed(self, policy: CallPolicy) -> None:
        """Replace the methods whose calls may be ours."""
        for name, most in self.small_bytes.items():
            if policy.small_bytes(name) < most:
                self.small_bytes[name] = policy.small_bytes(name)
                replace(name, functools.partial(self.blocking, name))
                replace(f"I{name.lower()}", functools.partial(self.nonblocking, name))
                replace(f"{name}_init", functools.partial(self.persistent, name))

    def ours(self, comm: MPI.Comm) -> Ours | None:
        """Return ours of a communicator, None where all of its calls are the library's."""
        ours = self.by_handle.get(comm.handle)
        return self.add(comm, self.policy) if ours is None and self.policy and comm else ours

    def forget(self, comm: MPI.Comm, keyval: int, value: Any) -> None:
        self.by_handle.pop(comm.handle, None)

    def blocking(self, name: str, library: Method) -> Method:
        where, block_where = SIZED_BY.get(name, 1 << 30), BLOCK_SIZED_BY.get(name, 1 << 30)
        small = self.small_bytes[name]

        def method(comm: Any, *args: Any, **kwargs: Any) -> Any:
            if len(args) > where and most_bytes(args[where]) < small:
                return library(comm, *args, **kwargs)
            if len(args) > block_where and most_bytes(args[block_where]) * comm.Get_size() < small:
                return library(comm, *args, **kwargs)
            ours = self.ours(comm)
            call = ours and ours.described(name, args, kwargs)
            self.note(name, ours, call)
            return ours.run(call) if ours and call else library(comm, *args, **kwargs)

        return shortcut(name, library, method, small)

    def nonblocking(self, name: str, library: Method) -> Method:
        """Return a method that waits for no other rank: the library's until a blocking call has set ours up."""
        where, small = SIZED_BY.get(name, 1 << 30), self.small_bytes[name]

        def method(comm: Any, *args: Any, **kwargs: Any) -> Any:
            if len(args) > where and most_bytes(args[where]) < small:
                return library(comm, *args, **kwargs)
            ours = self.ours(comm)
            call = ours and ours.policy.has_threads and ours.described(name, args, kwargs, may_wait=False)
            self.note(f"I{name.lower()}", ours, call)
            return ours.start(call) if ours and call else library(comm, *args, **kwargs)

        return shortcut(name, library, method, small)

    def persistent(self, name: str, library: Method) -> Method:
        def method(comm: Any, *args: Any, **kwargs: Any) -> Any:
            ours, options = self.ours(comm), {key: value for key, value in kwargs.items() if key != "info"}
            call = ours and ours.policy.has_threads and ours.described(name, args, options)
            self.note(f"{name}_init", ours, call)
            return ours.bind(call) if ours and call else library(comm, *args, **kwargs)

        return method

    def freeing(self, library: Method) -> Method:
        """Return a method that also frees our communicator, as all ranks do."""

        def method(comm: Any) -> None:
            if ours := self.by_handle.get(comm.handle):
                ours.free()
            library(comm)

        return method

    def note(self, name: str, ours: Ours | None, call: Any) -> None:
        if ours:
            ours.policy.note(name, ours.saving_s(call) if call else None)


@functools.cache
def communicators() -> Communicators:
    """Return the state of this process's communicators, initially of none."""
    return Communicators()


def shortcut(name: str, library: Method, general: Method, small: int) -> Method:
    """Return a method with the library's parameters that passes it small arrays at once, and others to `general`."""

    def one_buffer(comm: Any, buf: Any, root: int = 0) -> Any:
        if (buf.nbytes if type(buf) is ndarray else counted_bytes(buf)) < small:
            return library(comm, buf, root)
        return general(comm, buf, root)

    def two_buffers(comm: Any, sendbuf: Any, recvbuf: Any) -> Any:
        if type(recvbuf) is ndarray and recvbuf.nbytes < small:
            return library(comm, sendbuf, recvbuf)
        return general(comm, sendbuf, recvbuf)

    def gather_of_counts(comm: Any, sendbuf: Any, recvbuf: Any) -> Any:
        if type(recvbuf) is list and len(recvbuf) == 2 and type(recvbuf[1]) is list:  # [data, counts]
            data = recvbuf[0]
            if type(data) is ndarray and data.nbytes < small:
                return library(comm, sendbuf, recvbuf)
        return general(comm, sendbuf, recvbuf)

    def reduction(comm: Any, sendbuf: Any, recvbuf: Any, op: Any = MPI.SUM) -> Any:
        if (recvbuf.nbytes if type(recvbuf) is ndarray else counted_bytes(recvbuf)) < small:
            return library(comm, sendbuf, recvbuf, op)
        return general(comm, sendbuf, recvbuf, op)

    def reduction_to_blocks(comm: Any, sendbuf: Any, recvbuf: Any, op: Any = MPI.SUM) -> Any:
        if type(sendbuf) is ndarray and sendbuf.nbytes < small:
            return library(comm, sendbuf, recvbuf, op)
        return general(comm, sendbuf, recvbuf, op)

    def reduction_to_parts(comm: Any, sendbuf: Any, recvbuf: Any, recvcounts: Any = None, op: Any = MPI.SUM) -> Any:
        if type(sendbuf) is ndarray and sendbuf.nbytes < small:
            return library(comm, sendbuf, recvbuf, recvcounts, op)
        return general(comm, sendbuf, recvbuf, recvcounts, op)

    def blocks(comm: Any, sendbuf: Any, recvbuf: Any, root: int = 0) -> Any:
        if type(recvbuf) is ndarray and recvbuf.nbytes * comm.Get_size() < small:
            return library(comm, sendbuf, recvbuf, root)
        return general(comm, sendbuf, recvbuf, root)

    methods: dict[str, Method] = {
        "Bcast": one_buffer,
        "Allgather": two_buffers,
        "Alltoall": two_buffers,
        "Allgatherv": gather_of_counts,
        "Scatter": blocks,
    }
    methods |= {"Allreduce": reduction, "Scan": reduction}
    methods |= {"Reduce_scatter_block": reduction_to_blocks, "Reduce_scatter": reduction_to_parts}
    return methods.get(name, general)


def counted_bytes(spec: Any) -> int:
    """Return the bytes of `[array, count, datatype]`; a huge number for other data, which need a closer look."""
    if type(spec) is list and len(spec) == 3:
        data, count, kind = spec
        if type(data) is ndarray and type(count) is int and isinstance(kind, MPI.Datatype):
            return count * kind.Get_size()  # type: ignore[no-any-return]
    return NEVER


def most_bytes(data: Any) -> int:
    """Return an upper bound of the bytes of plain data; a huge number for data that need a closer check."""
    if type(data) is list:
        kind = data[-1] if data and isinstance(data[-1], MPI.Datatype) else None
        if not data or (kind and not kind.is_predefined):
            return NEVER
        data = data[0]
    return data.nbytes if type(data) is ndarray else NEVER


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
