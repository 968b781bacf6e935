"""Health of a run: the times of every rank's steps, which all ranks exchange and judge, each for itself.

The times of five steps are exchanged at once, while the next step goes on, so that no rank waits for them.
"""

from __future__ import annotations

import math
import platform
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import collectives
from collectives.job import environment
from parallelism.mesh import Mesh
from training.health.finding import HealthChange
from training.health.judge import TOGETHER, WINDOW, Judge, StepSeconds
from training.health.links import Links
from training.health.load import rebalanced
from training.reports.profile import StepProfiler

TICK_S = 1e-9  # of the clock of CPU time
NOT_COUNTED = StepSeconds(*[math.nan] * len(StepSeconds._fields))


class Health:
    """Times this rank's steps, and keeps what all ranks' times say about them.

    Each fifth step costs an all_gather of 25 numbers a rank, and a verdict.  Where dp ranks have different `numbers` of
    micro-batches, times are as if all had the mean.  Construction is collective.
    """

    def __init__(self, mesh: Mesh, profiler: StepProfiler, numbers: Sequence[int]):
        self.comm, self.profiler, self.replica, self.numbers = mesh.comm, profiler, mesh.coords["dp"], [*numbers]
        own = platform.node(), environment.cores(), mesh.coords["pp"], self.replica
        described = self.comm.all_gather_object(own)
        hosts, cores, stages, self.replicas = map(list, zip(*described, strict=True))
        hosts = names_of(self.comm, hosts)
        self.judge = Judge(hosts, stages, cores)
        self.links = Links(mesh.layout, hosts)
        self.own = self.comm.empty((TOGETHER, len(StepSeconds._fields)), "float64")
        self.every = self.comm.empty((self.comm.size, *self.own.shape), "float64")
        self.exchange = self.comm.plan("all_gather", self.own, out=self.every)
        self.num_steps, self.last = 0, 0  # steps in `own`, and the last one that is being exchanged; 0 for none
        self.changes: list[HealthChange] = []  # that nobody has taken
        self.moved = 0  # the step after which micro-batches were moved
        self.judged = 0  # the last step that has been judged

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
        scale = sum(self.numbers) / len(self.numbers) / self.numbers[self.replica]
        computing_s, input_s = whole_s - waiting_s, profiler.input_s
        own = StepSeconds(scale * computing_s, scale * cpu_s, waiting_s, input_s, whole_s + input_s)
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
        self.judged, self.last = self.last, 0

    def better_numbers(self) -> list[int] | None:
        """Return each dp rank's number of micro-batches with which steps take less time, or None.

        All ranks return the same.
        """
        seconds = self.judge.typical_s() if self.judged >= self.moved + WINDOW else None
        if seconds is None:
            return None
        slowest_s = [
            max(s for s, d in zip(seconds.tolist(), self.replicas, strict=True) if d == replica)
            for replica in range(len(self.numbers))
        ]
        better = rebalanced(self.numbers, slowest_s)
        self.moved = self.judged
        if better == self.numbers:
            return None
        self.numbers = better
        return better

    def news(self) -> list[HealthChange]:
        """Return what has changed since the last call."""
        self.changes, changes = [], self.changes
        return changes


def names_of(comm: collectives.Communicator, names: list[str]) -> list[str]:
    """Return the name of each rank's host, or the number of its node where hosts have the same name."""
    nodes = comm.topology.node_of
    if len(set(names)) == len(set(nodes)) == len(set(zip(names, nodes, strict=True))):
        return names
    return [f"node {node}" for node in nodes]
