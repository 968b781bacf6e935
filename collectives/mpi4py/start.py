"""Setup of the wrapper on all ranks: they verify that all use it, and take rank 0's settings."""

import time
from functools import cache
from typing import Any

import numpy as np
from mpi4py import MPI

from collectives.job import environment
from collectives.job.errors import InputError, LoneInputError
from collectives.job.launch import at_exit
from collectives.mpi4py.methods import Communicators
from collectives.mpi4py.policy import CallPolicy

LONGEST_START_S = 30.0  # from MPI's start until a program's on all ranks
NAP_S = 1e-3


def install() -> None:
    """Make all of mpi4py's communicators use our collectives.  Collective.

    Raises: LoneInputError on the ranks that have called it if another has not.
    """
    communicators().add_all(agree(MPI.COMM_WORLD))


@cache
def communicators() -> Communicators:
    """Return the state of this process's communicators, initially of none."""
    return Communicators()


def agree(comm: MPI.Comm) -> CallPolicy:
    """Return the policy of all ranks, once each of them has requested it.  Collective.

    By messages on the communicator itself: on a rank that has no part in it, nothing is called that would wait.

    Raises: LoneInputError on the ranks that have called it where another has not in time; InputError on all where
    rank 0's setting can't be.
    """
    tag, deadline_s = int(comm.Get_attr(MPI.TAG_UB) or 32767), time.monotonic()
    deadline_s += min(environment.number_or(environment.timeout_s, LONGEST_START_S), LONGEST_START_S)
    has_threads = np.array([MPI.Query_thread() == MPI.THREAD_MULTIPLE], np.uint8)
    answer = bytearray(1024)
    if comm.Get_rank():
        comm.Isend([has_threads, MPI.BYTE], 0, tag)
        receive(comm, answer, 0, tag, deadline_s)
    else:
        answer = answer_of_first(comm, tag, has_threads, deadline_s)
    threads, mode, refusal = bytes(answer).rstrip(b"\0").decode().split("\n")
    if refusal:
        raise InputError(refusal)
    policy = CallPolicy(mode, threads == "True")
    if "report" in mode and comm.Get_rank() == 0:
        at_exit(policy.print_report)
    return policy


def answer_of_first(comm: MPI.Comm, tag: int, has_threads: Any, deadline_s: float) -> bytearray:
    """Collect the answers of all other ranks, and send them the result."""
    for source in range(1, comm.Get_size()):
        theirs = bytearray(1)
        receive(comm, theirs, source, tag, deadline_s)
        has_threads &= theirs[0]
    mode = refusal = ""
    try:
        mode = environment.mpi4py_mode()
    except ValueError as error:
        refusal = str(error)
    answer = bytearray(f"{bool(has_threads[0])}\n{mode}\n{refusal}".encode())
    MPI.Request.Waitall([comm.Isend([answer, MPI.BYTE], dest, tag) for dest in range(1, comm.Get_size())])
    return answer


def receive(comm: MPI.Comm, buffer: bytearray, source: int, tag: int, deadline_s: float) -> None:
    """Receive a message of another rank that uses the wrapper.

    Raises: LoneInputError if nothing arrives in time.
    """
    while not comm.Iprobe(source, tag):
        if time.monotonic() > deadline_s:
            raise LoneInputError(
                f"rank {source} does not use the wrapper as rank {comm.Get_rank()} does: start every rank by "
                "python -m collectives.mpi4py, and call collectives.mpi4py.wrap on all ranks of a communicator"
            )
        time.sleep(NAP_S)
    comm.Recv([buffer, MPI.BYTE], source, tag)
