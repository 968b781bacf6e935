"""The choice between the library and us, by facts that all ranks know; a report of it; and our collectives."""

import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from mpi4py import MPI

from collectives.algorithms import Access, find
from collectives.communicator import Communicator
from collectives.job import environment
from collectives.job.backoff import Backoff
from collectives.job.errors import InputError, LoneInputError
from collectives.job.launch import at_exit, refuse_after_fork
from collectives.mpi4py.buffers import NotOurs
from collectives.mpi4py.calls import DESCRIBE, CollectiveCall, Ranks
from collectives.mpi4py.requests import PersistentRequest, Run, StartedRequest
from collectives.runtime.call.call import Call
from collectives.runtime.choose import auto
from collectives.schedule.spec import COLLECTIVES

# Errors of arguments that are invalid, or not for us.  Any other error is of an array's own code: it might not recur,
# and the library would then run the call here that we run on the other ranks.
REFUSALS = NotOurs, TypeError, ValueError, LookupError, AttributeError, BufferError, ImportError, OverflowError
REFUSALS += (MPI.Exception,)  # type: ignore[assignment]

# The bytes of a vector from which a call is worth our Python, where ranks share memory: benchmarks/mpi4py_calls.py.
KIB = 1 << 10
WORTH_BYTES = {
    "all_reduce": 1024 * KIB,
    "reduce_scatter": 1024 * KIB,
    "broadcast": 1024 * KIB,
    "all_gather": 8192 * KIB,
    "all_to_all": 8192 * KIB,
    "scan": 1024 * KIB,
    "scatter": 16384 * KIB,
}
NEVER = 1 << 62
LONGEST_START_S = 30.0  # from MPI's start until a program's on all ranks
NAMES = {mpi: spec.name for spec in COLLECTIVES.values() for mpi in spec.mpi.split()}  # of MPI's methods


class CallPolicy:
    """Policy of COLLECTIVES_MPI4PY on rank 0: a report; "ours", for tests, makes every possible call ours."""

    def __init__(self, mode: str = "", has_threads: bool = False):
        self.mode, self.has_threads = mode, has_threads  # of MPI, on all ranks
        self.calls: Counter[tuple[str, bool]] = Counter()  # by method, and whether they were ours

    def is_worth_it(self, collective: str, nbytes: int) -> bool:
        """Return whether a call may be ours, where ranks share memory."""
        if "ours" in self.mode:
            return nbytes > 0
        return nbytes >= WORTH_BYTES.get(collective, NEVER)

    def small_bytes(self, name: str) -> int:
        """Return the bytes of a vector below which a method's call is the library's, and need not be counted."""
        return 0 if self.mode else WORTH_BYTES.get(NAMES[name], NEVER)

    def note(self, name: str, is_ours: bool) -> None:
        """Count a call of the program's own."""
        if "report" in self.mode and not threading.current_thread().name.startswith("collectives "):
            self.calls[name, is_ours] += 1

    def print_report(self) -> None:
        """Print this rank's calls, the library's and ours."""
        names = sorted({name for name, _ in self.calls})
        lines = [f"{name:27} {self.calls[name, True]:9} {self.calls[name, False]:15}" for name in names]
        print("\n".join(["calls of mpi4py on rank 0        ours   the library's", *lines]), file=sys.stderr, flush=True)


def shares_memory(comm: Communicator, collective: str, nbytes: int) -> bool:
    """Return whether our algorithm for a call does not go by messages alone, as the library's does."""
    chooser = comm.dispatcher.chooser
    access = chooser.farthest(comm.context.has_numba)
    if access > Access.STAGED and not chooser.reads_processes:
        access = Access.STAGED
    name = auto.choose(chooser.question(collective, nbytes, access, "ordinary"))
    return find(collective, name).access > Access.MESSAGES


class Ours:
    """Our collectives on one of mpi4py's communicators, set up by the first call of ours, and the choice for each."""

    def __init__(self, mpi: MPI.Comm, policy: CallPolicy):
        self.mpi, self.policy = mpi, policy
        self.ranks = Ranks(0, 1) if mpi.Is_inter() else Ranks(mpi.Get_rank(), mpi.Get_size())
        self.comm: Any = None  # our communicator
        self.by_memory: dict[tuple[str, int], bool] = {}  # whether calls share memory, by collective and bytes

    def described(self, name: str, run: Callable, args: tuple, kwargs: dict[str, Any]) -> CollectiveCall | None:
        """Describe a call that will be ours, by `run`; None for one that is the library's.

        The first one sets up our communicator, which waits for the other ranks.  A started call must not wait: before
        any other it is the library's.
        """
        call = None
        if run == Ours.bind:
            kwargs = {key: value for key, value in kwargs.items() if key != "info"}
        if self.ranks.size > 1 and (run == Ours.run or self.policy.has_threads):
            with suppress(*REFUSALS):  # the library reports any fault of the arguments
                call = DESCRIBE[name](self.ranks, *args, **kwargs)
        if call and self.policy.is_worth_it(call.collective, call.nbytes):
            if self.comm is None and run != Ours.start:  # with the parts that its calls would else make on first use
                self.comm = Communicator(self.mpi)
                self.comm.dispatcher.comparator.gate()
                self.comm.dispatcher.chooser.reads_processes  # noqa: B018
            return call if self.takes(call) else None
        return None

    def takes(self, call: CollectiveCall) -> bool:
        """Return whether a call that is worth it is ours, which needs our communicator to be set up."""
        if self.comm is None:
            return False
        key = call.collective, call.nbytes
        if key not in self.by_memory:
            self.by_memory[key] = shares_memory(self.comm, *key)
        return self.by_memory[key] or "ours" in self.policy.mode

    def run(self, call: CollectiveCall) -> None:
        call.load()
        self.comm.dispatcher.run(*call[:4])
        call.store()

    def start(self, call: CollectiveCall) -> MPI.Request:
        return StartedRequest(Run(call, self.comm.starter.started_plan(Call.of(*call[:4]))))

    def bind(self, call: CollectiveCall) -> MPI.Prequest:
        return PersistentRequest(call, self.comm.plan(call.collective, call.x, **call.arguments))

    def free(self) -> None:
        if self.comm is not None:
            self.comm.free()
            self.comm = None


refuse_after_fork(Ours)


def agree(comm: MPI.Comm) -> CallPolicy:
    """Return the policy of all ranks, once each of them has requested it.  Collective.

    By messages on the communicator itself: on a rank that has no part in it, nothing is called that would wait.

    Raises: LoneInputError on the ranks that have called it where another has not in time; InputError on all where
    rank 0's setting can't be.
    """
    tag, deadline_s = int(comm.Get_attr(MPI.TAG_UB) or 32767), time.monotonic()
    deadline_s += min(environment.number_or(environment.timeout_s, LONGEST_START_S), LONGEST_START_S)
    has_threads, mode, refusal = MPI.Query_thread() == MPI.THREAD_MULTIPLE, "", ""
    if comm.Get_rank():
        sent = comm.isend(has_threads, 0, tag)
        has_threads, mode, refusal = receive(comm, 0, tag, deadline_s)
        sent.wait()
    else:
        others = range(1, comm.Get_size())
        for source in others:
            has_threads &= receive(comm, source, tag, deadline_s)
        try:
            mode = environment.mpi4py_mode()
        except ValueError as error:
            refusal = str(error)
        MPI.Request.waitall([comm.isend((has_threads, mode, refusal), dest, tag) for dest in others])
    if refusal:
        raise InputError(refusal)
    policy = CallPolicy(mode, has_threads)
    if "report" in mode and comm.Get_rank() == 0:
        at_exit(policy.print_report)
    return policy


def receive(comm: MPI.Comm, source: int, tag: int, deadline_s: float) -> Any:
    """Receive an object of another rank that uses the wrapper.

    Raises: LoneInputError if nothing arrives in time.
    """
    backoff = Backoff()
    while not comm.Iprobe(source, tag):
        if time.monotonic() > deadline_s:
            raise LoneInputError(
                f"rank {source} does not use the wrapper as rank {comm.Get_rank()} does: start every rank by "
                "python -m collectives.mpi4py, and call collectives.mpi4py.wrap on all ranks of a communicator"
            )
        backoff.sleep()
    return comm.recv(source=source, tag=tag)
