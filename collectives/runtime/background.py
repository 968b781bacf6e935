"""A thread that moves started plans on while their process computes."""

import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from mpi4py import MPI

from collectives.job.launch import at_exit

if TYPE_CHECKING:
    from collectives.runtime.plan import Plan

SHORTEST_SLEEP_S, LONGEST_SLEEP_S = 2e-5, 1e-3


class Background:
    """A thread that advances the plans of a list, and sleeps while nothing moves, and while there are none.

    What it runs gives up Python's lock: messages, NumPy's loops over long arrays, compiled programs.  A plan that the
    process itself waits for is left to it.  MPI must allow calls from several threads; else there is no thread, and
    plans move on only when their process waits or asks `done()`.
    """

    def __init__(self, plans: "Sequence[Plan]"):
        self.plans = plans
        self.allowed = MPI.Query_thread() == MPI.THREAD_MULTIPLE
        self.thread: threading.Thread | None = None
        self.work = threading.Event()
        self.ended = False

    def attend(self) -> None:
        """Wake the thread: there is something to do."""
        if self.allowed and self.thread is None:
            self.thread = threading.Thread(target=self._run, name="collectives", daemon=True)
            self.thread.start()
            at_exit(self.end)  # before mpi4py ends MPI
        self.work.set()

    def end(self) -> None:
        self.ended = True
        self.work.set()
        if self.thread is not None:
            self.thread.join()

    def _run(self) -> None:
        sleep_s = SHORTEST_SLEEP_S
        while True:
            self.work.wait()
            if self.ended:
                return
            plans = [plan for plan in self.plans if plan.in_background]
            if not plans:
                self.work.clear()
                if not any(plan.in_background for plan in self.plans):
                    continue
                self.work.set()  # one came in between
            moved = [plan.advance() for plan in plans]
            sleep_s = SHORTEST_SLEEP_S if any(moved) else min(2 * sleep_s, LONGEST_SLEEP_S)
            time.sleep(sleep_s)
