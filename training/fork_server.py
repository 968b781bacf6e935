"""The server of a host that forks ranks for `training.forked`, once it has imported all that a run needs.

It forks one process for each connection, kills it when the connection ends, and reports its end over it.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import io
import json
import os
import selectors
import signal
import socket
import sys
import threading
from contextlib import suppress
from typing import Any, NamedTuple, NoReturn

from training.forked import is_own, run

IDLE_S = 120.0  # after the last rank
STATE_BYTES = 1 << 24
PR_SET_PDEATHSIG = 1
KERNELS = (  # modules that need Numba
    "collectives.runtime.backends.kernels",
    "collectives.runtime.backends.shared_memory",
    "parallelism.numerics.exact_kernels",
    "parallelism.numerics.pointwise_kernels",
)


class Rank(NamedTuple):
    """A fork: its number, and the connection to mpirun's process."""

    pid: int
    stub: socket.socket


def main() -> None:
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.bind("\0" + sys.argv[1])
    except OSError:  # another server does so
        return
    listener.listen(1 << 10)
    import_all()
    program = serve(listener)
    try:
        run(program)
    except SystemExit as error:
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
        end(error.code if isinstance(error.code, int) else bool(error.code))


def import_all() -> None:
    """Import what a run does, but do not start MPI."""
    from collectives.job.launch import import_mpi

    import_mpi()
    import collectives.communicator  # noqa: F401
    import training.loop  # noqa: F401
    from collectives.runtime.backends.compiler import load

    for name in KERNELS:
        load(name)
    gc.collect()
    gc.freeze()  # or each fork would copy the pages that its garbage collector counts in


def serve(listener: socket.socket) -> str:
    """Fork ranks until none has run for a while, which ends the process; return the program to run in each fork."""
    with selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)
        while ready := selector.select(IDLE_S if len(selector.get_map()) == 1 else None):
            ready.sort(key=lambda event: isinstance(event[0].fileobj, int))  # forks last: their ends close connections
            for key, _ in ready:
                if key.data is None:
                    if program := fork(selector, listener.accept()[0]):
                        return program
                elif key.fileobj is key.data.stub:  # mpirun's process has ended
                    with suppress(ProcessLookupError):
                        os.kill(key.data.pid, signal.SIGKILL)
                    selector.unregister(key.data.stub)
                else:
                    report_end(selector, key)
    sys.exit()


def fork(selector: selectors.BaseSelector, stub: socket.socket) -> str:
    """Fork a process for a connection; return its program there, without the server's descriptors, and "" here."""
    message = b""
    with suppress(ConnectionError):
        message, descriptors, _, _ = socket.recv_fds(stub, 1, 8) if is_own(stub) else (b"", [], 0, None)
    if not message:
        stub.close()
        return ""
    server = os.getpid()
    if pid := os.fork():
        for descriptor in descriptors:
            os.close(descriptor)
        with suppress(OSError):
            stub.sendall(f"{pid}\n".encode())
        selector.register(stub, selectors.EVENT_READ, Rank(pid, stub))
        selector.register(os.pidfd_open(pid), selectors.EVENT_READ, Rank(pid, stub))
        return ""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != server:
        os._exit(1)
    for key in selector.get_map().values():
        if isinstance(key.fileobj, socket.socket):
            key.fileobj.close()
        else:
            os.close(key.fd)
    stub.close()
    return take_over(descriptors)


def end(status: int) -> NoReturn:
    """End a fork as Python would, but do not free what it shares with the server, which takes longer than a run."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()  # of which one ends MPI
    kinds = io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom
    for file in (*(each for each in gc.get_objects() if type(each) in kinds), sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            file.flush()
    os._exit(status & 0xFF)


def report_end(selector: selectors.BaseSelector, key: selectors.SelectorKey) -> None:
    """Send the status of a fork that has ended, negative for a signal, and forget it."""
    _, status = os.waitpid(key.data.pid, 0)
    with suppress(OSError):
        key.data.stub.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())
    selector.unregister(key.fileobj)
    os.close(key.fd)
    with suppress(KeyError):
        selector.unregister(key.data.stub)
    key.data.stub.close()


def take_over(descriptors: list[int]) -> str:
    """Become the process that mpirun has started, as far as a fork can; return the program to run."""
    file, *standard = descriptors[:4]
    state: dict[str, Any] = json.loads(os.pread(file, STATE_BYTES, 0))
    for number, descriptor in enumerate(standard):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.close(file)
    os.environ.clear()
    os.environ.update(state["environment"])
    for descriptor in descriptors[4:]:
        os.environ["PMI_FD"] = str(descriptor)
    os.chdir(state["directory"])
    os.sched_setaffinity(0, state["cores"])
    signal.pthread_sigmask(signal.SIG_SETMASK, state["blocked"])
    sys.argv, sys.orig_argv = state["argv"], state["orig_argv"]
    assert isinstance(sys.stdout, io.TextIOWrapper)
    sys.stdout.reconfigure(line_buffering=True)  # it was opened for /dev/null

    from collectives.job import environment

    environment.PROCESS = str(state["process"])
    environment.before_mpi()
    return str(state["program"])


if __name__ == "__main__":
    main()
