"""The choice between the library and us, by facts that all ranks know; and a report of it."""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from typing import TYPE_CHECKING

from collectives.algorithms import Access, find
from collectives.runtime.choose import auto
from collectives.schedule.spec import COLLECTIVES

if TYPE_CHECKING:
    from collectives.communicator import Communicator

# The bytes of a vector from which a call is worth our Python, where ranks share memory: benchmarks/mpi4py_face.py.
KIB = 1 << 10
WORTH_BYTES = {
    "all_reduce": 256 * KIB,
    "reduce_scatter": 256 * KIB,
    "broadcast": 1024 * KIB,
    "all_gather": 8192 * KIB,
    "all_to_all": 8192 * KIB,
    "scan": 1024 * KIB,
    "scatter": 16384 * KIB,
}
STARTED_WORTH_BYTES = 512 * KIB  # at least, for a call that a thread advances
NEVER = 1 << 62
NAMES = {mpi: spec.name for spec in COLLECTIVES.values() for mpi in spec.mpi.split()}  # of MPI's methods


class CallPolicy:
    """Policy of COLLECTIVES_MPI4PY on rank 0: a report; "ours", for tests, makes every possible call ours."""

    def __init__(self, mode: str = "", has_threads: bool = False):
        self.mode, self.has_threads = mode, has_threads  # of MPI, on all ranks
        self.calls: Counter[tuple[str, bool]] = Counter()  # by method, and whether they were ours
        self.saved_s: defaultdict[str, float] = defaultdict(float)

    def is_worth_it(self, collective: str, nbytes: int, is_started: bool = False) -> bool:
        """Return whether a call may be ours, where ranks share memory."""
        if "ours" in self.mode:
            return nbytes > 0 or collective == "barrier"
        least = STARTED_WORTH_BYTES if is_started else 0
        return nbytes >= max(WORTH_BYTES.get(collective, NEVER), least)

    def small_bytes(self, name: str) -> int:
        """Return the bytes of a vector below which a method's call is the library's, and need not be counted."""
        return 0 if self.mode else WORTH_BYTES.get(NAMES[name], NEVER)

    def note(self, name: str, saved_s: float | None) -> None:
        """Count a call; None is of the library's."""
        if "report" in self.mode:
            self.calls[name, saved_s is not None] += 1
            self.saved_s[name] += saved_s or 0.0

    def print_report(self) -> None:
        """Print this rank's calls, the library's and ours, and the milliseconds saved by the cost model."""
        lines = ["calls of mpi4py on rank 0        ours   the library's   saved, as estimated"]
        for name in sorted({name for name, _ in self.calls}):
            ours, theirs = self.calls[name, True], self.calls[name, False]
            lines.append(f"{name:27} {ours:9} {theirs:15} {self.saved_s[name] * 1e3:18.3f} ms")
        print("\n".join(lines), file=sys.stderr, flush=True)


def seconds_saved(comm: Communicator, collective: str, nbytes: int, policy: CallPolicy) -> float | None:
    """Return the seconds that a call saves by the cost model, None if it uses only messages, as the library's does.

    The library is taken to choose the best of the algorithms by messages.
    """
    binder = comm._resolver.binder
    access = binder.farthest(comm._context.has_numba)
    if access > Access.STAGED and not binder.reads_processes:
        access = Access.STAGED
    ours, theirs = (binder.question(collective, nbytes, reach, "ordinary") for reach in (access, Access.MESSAGES))
    name = auto.choose(ours)
    if find(collective, name).access == Access.MESSAGES and "ours" not in policy.mode:
        return None
    return theirs.ranking()[0][1] - dict(ours.ranking())[name]
