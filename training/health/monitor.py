"""Health of a run: the times of every rank's steps, which all ranks exchange and judge, each for itself.

The times of five steps are exchanged at once, while the next step goes on, so that no rank waits for them.
"""

from __future__ import annotations

import math
import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager

import collectives
from collectives.job import environment
from parallelism.mesh import Mesh
from training.health.finding import Change
from training.health.judge import TOGETHER, Judge, StepSeconds
from training.health.links import Links
from training.reports.profile import StepProfiler

TICK_S = 1e-9  # of the clock of CPU time
NOT_COUNTED = StepSeconds(*[math.nan] * len(StepSeconds._fields))


class Health:
    """Times this rank's steps, and keeps what all ranks' times say about them.

    Each fifth step costs an all_gather of 25 numbers a rank, and a verdict.  Construction is collective.
    """

    def __init__(self, mesh: Mesh, profiler: StepProfiler):
        self.comm, self.profiler = mesh.comm, profiler
        described = self.comm.all_gather_object((platform.node(), environment.cores(), mesh.coords["pp"]))
        hosts, cores, stages = map(list, zip(*described, strict=True))
        hosts = names_of(self.comm, hosts)
        self.judge = Judge(hosts, stages, cores)
        self.links = Links(mesh.layout, hosts)
        self.own = self.comm.empty((TOGETHER, len(StepSeconds._fields)), "float64")
        self.every = self.comm.empty((self.comm.size, *self.own.shape), "float64")
        self.exchange = self.comm.plan("all_gather", self.own, out=self.every)
        self.num_steps, self.last = 0, 0  # steps in `own`, and the last one that is being exchanged; 0 for none
        self.changes: list[Change] = []  # that nobody has taken

    @contextmanager
    def observing(self, step: int, counts: bool) -> Iterator[None]:
        """Time the step in this context, the one after the last.  Collective.

        It counts if it is like others on all ranks.
        """
        profiler = self.profiler
        begin_s, begin_cpu_s = time.perf_counter(), time.thread_time()
        waited_s, waited_cpu_s = profiler.waited_s, profiler.waited_cpu_s
        yield
        whole_s, cpu_s = time.perf_counter() - begin_s, time.thread_time() - begin_cpu_s
        waiting_s = profiler.waited_s - waited_s
        cpu_s -= profiler.waited_cpu_s - waited_cpu_s
        cpu_s = max(cpu_s, TICK_S)
        own = StepSeconds(whole_s - waiting_s, cpu_s, waiting_s, profiler.input_s, whole_s + profiler.input_s)
        self.add(step, own if counts else NOT_COUNTED)

    def add(self, step: int, own: StepSeconds) -> None:
        """Take what has been exchanged, add a step, and start the next exchange if enough are together.  Collective."""
        self.finish()
        self.own[self.num_steps] = own
        self.num_steps += 1
        if self.num_steps == TOGETHER:
            self.last, self.num_steps = step, 0
            self.exchange.begin()

    def finish(self) -> None:
        """Take what has been exchanged, if anything; measure the links if their judge asks for it.  Collective."""
        if not self.last:
            return
        self.exchange.wait()
        self.changes += self.judge.take(self.last, self.every.swapaxes(0, 1).copy())
        if self.judge.wants_links:
            self.changes += self.judge.take_links(self.last, [*self.links.slow(self.links.measure(self.comm))])
        self.last = 0

    def news(self) -> list[Change]:
        """Return what has changed since the last call."""
        self.changes, changes = [], self.changes
        return changes


def names_of(comm: collectives.Communicator, names: list[str]) -> list[str]:
    """Return the name of each rank's host, or the number of its node where hosts have the same name."""
    nodes = comm.topology.node_of
    if len(set(names)) == len(set(nodes)) == len(set(zip(names, nodes, strict=True))):
        return names
    return [f"node {node}" for node in nodes]
