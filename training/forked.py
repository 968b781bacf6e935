"""Start training on ranks that are ready in half a second: forks of a server that has imported everything.

mpirun -n 4 python -m training.forked --checkpoint_dir saved

It is `python -m training` otherwise.  The first rank of a host starts the host's server, which ends a while after its
last rank; the next job with the same Python, code and libraries' variables finds it ready.  mpirun's process hands its
environment, directory, cores and descriptors over to its fork, passes signals on, and ends as the fork does; each of
the two dies with the other.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

SERVER = "training.fork_server"
ROOT = Path(__file__).resolve().parent.parent  # of the packages, and not of a folder with links to them
START_S = 20.0  # for a server to listen
PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
PACKAGES = ("collectives", "parallelism", "models", "training")
# Variables that libraries read when they are loaded, and those of one job, which a server must not have.
OF_LIBRARIES = ("CUDA", "CUPY", "KMP_", "LD_", "MKL_", "NUMBA_", "OMP_", "OPENBLAS_", "PYTHON", "TORCH")
OF_JOB = ("COLLECTIVES_", "HYDRA_", "MPI_", "OMPI_", "PALS_", "PMI", "PRTE_", "SLURM_")


def main() -> None:
    start("training")


def start(program: str) -> NoReturn:
    """Run a module, or the script at a path, with `sys.argv` in a fork of the host's server; end as it does."""
    if not sys.platform.startswith("linux"):
        run(program)
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)  # until there is a process to pass them on to
    with connect(name_of_server()) as server, server.makefile("rb") as replies:
        pid = fork_of(server, replies, program, blocked)
        if pid:
            for number in PASSED_ON:
                signal.signal(number, lambda number, frame: pass_on(number, pid))
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        if pid:
            end_as(replies.readline())
    run(program)  # which says what the server could not import


def fork_of(server: socket.socket, replies: BinaryIO, program: str, blocked: Iterable[int]) -> int:
    """Return the process that the server has forked, or 0 if the server has ended."""
    try:
        hand_over(server, program, blocked)
        return int(replies.readline() or 0)
    except ConnectionError:
        return 0


def run(program: str) -> NoReturn:
    """Run a module, or the script at a path, in this process."""
    if program.endswith(".py"):
        sys.path[0] = str(Path(program).parent.resolve())
        runpy.run_path(program, run_name="__main__")
    else:
        sys.path[0] = os.getcwd()
        runpy.run_module(program, run_name="__main__", alter_sys=True)
    sys.exit()


def name_of_server() -> str:
    """Return the address of this host's server: it depends on all that a fork could not change any more."""
    newest = max(path.stat().st_mtime_ns for name in PACKAGES for path in (ROOT / name).rglob("*.py"))
    variables = sorted(item for item in os.environ.items() if item[0].startswith(OF_LIBRARIES))
    facts = json.dumps([os.getuid(), sys.executable, str(ROOT), newest, variables])
    return f"\0training-{blake2b(facts.encode(), digest_size=12).hexdigest()}"  # of no file, so that nothing is left


def connect(name: str) -> socket.socket:
    """Connect to the server, which this process starts if none listens.

    Raises: TimeoutError if it does not listen either, PermissionError if another user's process does.
    """
    server = socket.socket(socket.AF_UNIX)
    if server.connect_ex(name) == 0:
        if not is_own(server):
            raise PermissionError("the server is another user's: use python -m training in place of training.forked")
        return server
    environment = {key: value for key, value in os.environ.items() if not key.startswith(OF_JOB)}
    words = [sys.executable, "-m", SERVER, name[1:]]
    subprocess.Popen(
        words,
        cwd=ROOT,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    deadline_s = time.monotonic() + START_S
    while time.monotonic() < deadline_s:
        if server.connect_ex(name) == 0:
            return server
        time.sleep(0.01)
    raise TimeoutError(f"{' '.join(words)} does not listen: use python -m training in place of training.forked")


def is_own(connection: socket.socket) -> bool:
    """Return whether the process at the other end is of the same user."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return struct.unpack("3i", credentials)[1] == os.getuid()


def hand_over(server: socket.socket, program: str, blocked: Iterable[int]) -> None:
    """Send what a fork needs, in a file without a name, and the descriptors that it takes over."""
    state = {
        "argv": sys.argv,
        "blocked": sorted(map(int, blocked)),
        "cores": sorted(os.sched_getaffinity(0)),
        "directory": os.getcwd(),
        "environment": dict(os.environ),
        "orig_argv": sys.orig_argv,
        "process": os.getpid(),
        "program": program,
    }
    file = os.memfd_create("state")
    os.write(file, json.dumps(state).encode())
    manager = [int(os.environ["PMI_FD"])] if "PMI_FD" in os.environ else []  # of MPICH's process manager
    socket.send_fds(server, [b"."], [file, 0, 1, 2, *manager])


def pass_on(number: int, pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def end_as(status: Any) -> NoReturn:
    """End with a fork's status, or by its signal; by SIGKILL if the server has died, and so the fork."""
    number = int(status or -signal.SIGKILL)
    if number < 0:
        if -number != signal.SIGKILL:
            signal.signal(-number, signal.SIG_DFL)
        os.kill(os.getpid(), -number)
    os._exit(number)


if __name__ == "__main__":
    main()
