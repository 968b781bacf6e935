"""Health of a run: the times of every rank's steps, which all ranks exchange and judge, each for itself.

The times of five steps are exchanged at once, while the next step goes on, so that no rank waits for them.
"""

from __future__ import annotations

import math
import os
import platform
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch

import collectives
from collectives.job import environment
from parallelism.data.load import ReplicaSeconds, rebalanced
from parallelism.mesh import Mesh
from parallelism.step.events import Listener
from training.health.judge import TOGETHER, WINDOW, Judge, StepSeconds
from training.health.links import Links
from training.reports.finding import HealthChange, named_ranks
from training.reports.profile import StepProfiler

TICK_S = 1e-9  # of the clock of CPU time
NOT_COUNTED = StepSeconds(*[math.nan] * len(StepSeconds._fields))


class Clocks(NamedTuple):
    """Seconds of the clock and of this thread's CPU time, without waits for other ranks."""

    clock: float
    cpu: float

    def since(self, earlier: Clocks) -> Clocks:
        return Clocks(self.clock - earlier.clock, self.cpu - earlier.cpu)


class Health(Listener):
    """Times this rank's steps, and keeps what all ranks' times say about them.

    Each fifth step costs an all_gather of 30 numbers a rank, and a verdict.  Where dp ranks have different `numbers` of
    micro-batches, their times are as if all had the mean.  It listens to the pipeline ahead of all others, whose waits
    it subtracts.  Construction is collective.
    """

    def __init__(self, mesh: Mesh, profiler: StepProfiler, numbers: Sequence[int]):
        self.comm, self.profiler, self.replica, self.numbers = mesh.comm, profiler, mesh.coords["dp"], [*numbers]
        software = f"Python {platform.python_version()} and torch {torch.__version__}"
        own = platform.node(), usable_cores(), environment.cores(), mesh.coords["pp"], self.replica, software
        described = self.comm.all_gather_object(own)
        names, usable, stated, stages, self.replicas, of_ranks = map(list, zip(*described, strict=True))
        if len(set(of_ranks)) > 1:
            print(different_software(of_ranks), flush=True)
        hosts = names_of(self.comm, names)
        cores = [min(most, number) for most, number in zip(stated, cores_of(hosts, usable), strict=True)]
        self.judge = Judge(hosts, stages, cores)
        self.links = Links(mesh.layout, hosts)
        self.own = self.comm.empty((TOGETHER, len(StepSeconds._fields)), "float64")
        self.every = self.comm.empty((self.comm.size, *self.own.shape), "float64")
        self.exchange = self.comm.plan("all_gather", self.own, out=self.every)
        self.num_steps, self.last = 0, 0  # steps in `own`, and the last one that is being exchanged; 0 for none
        self.changes: list[HealthChange] = []  # that nobody has taken
        self.decided = 0  # the last step after which it was decided whether micro-batches move
        self.judged = 0  # the last step that has been judged
        self.in_passes = self.began = Clocks(0, 0)

    def now(self) -> Clocks:
        profiler = self.profiler
        return Clocks(time.perf_counter() - profiler.waited_s, time.thread_time() - profiler.waited_cpu_s)

    def before_passes(self) -> None:
        self.began = self.now()

    def after_passes(self) -> None:
        passes = self.now().since(self.began)
        self.in_passes = Clocks(self.in_passes.clock + passes.clock, self.in_passes.cpu + passes.cpu)

    @contextmanager
    def observing(self, step: int, counts: bool) -> Iterator[None]:
        """Time the step in this context, the one after the last.  Collective.

        It counts if it is like others on all ranks.
        """
        begin_s, waited_s, begin, self.in_passes = time.perf_counter(), self.profiler.waited_s, self.now(), Clocks(0, 0)
        yield
        computing, waiting_s = self.now().since(begin), self.profiler.waited_s - waited_s
        more = sum(self.numbers) / len(self.numbers) / self.numbers[self.replica] - 1
        passes_s, input_s = (1 + more) * self.in_passes.clock, self.profiler.input_s
        own = StepSeconds(
            computing=computing.clock + more * self.in_passes.clock,
            cpu=max(computing.cpu + more * self.in_passes.cpu, TICK_S),
            waiting=waiting_s,
            input=input_s,
            whole=time.perf_counter() - begin_s + input_s,
            passes=passes_s,
        )
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
        times = self.judge.typical() if self.judged >= self.decided + WINDOW else []
        if not times:
            return None
        mean, replicas = sum(self.numbers) / len(self.numbers), []
        for replica in range(len(self.numbers)):
            own = [each for each, its in zip(times, self.replicas, strict=True) if its == replica]
            slowest = max(own, key=lambda each: each.computing)
            replicas.append(ReplicaSeconds(slowest.passes / mean, slowest.computing - slowest.passes))
        better = rebalanced(self.numbers, replicas)
        self.decided = self.judged
        if better == self.numbers:
            return None
        self.numbers = better
        return better

    def close(self) -> None:
        """Wait for the exchange that is under way.  Collective."""
        if self.last:
            self.exchange.wait()

    def news(self) -> list[HealthChange]:
        """Return what has changed since the last call."""
        self.changes, changes = [], self.changes
        return changes


def different_software(of_ranks: Sequence[str]) -> str:
    """Return a line that tells which ranks run which software.

    >>> different_software(["torch 2.13", "torch 2.12", "torch 2.13"])
    'ranks run different software, and may compute different numbers: torch 2.13 on ranks 0 and 2; torch 2.12 on rank 1'
    """
    ranks = {each: [rank for rank, other in enumerate(of_ranks) if other == each] for each in dict.fromkeys(of_ranks)}
    which = "; ".join(f"{software} on {named_ranks(its)}" for software, its in ranks.items())
    return f"ranks run different software, and may compute different numbers: {which}"


def usable_cores() -> list[int]:
    """Return the cores that this process may use, where the system tells."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [*range(environment.cores())]


def cores_of(hosts: Sequence[str], cores: Sequence[Sequence[int]]) -> list[int]:
    """Return the number of cores that the ranks of each rank's host may use together.

    >>> cores_of(["a", "a", "b"], [[0], [1], [0, 1, 2, 3]])
    [2, 2, 4]
    """
    together = {
        host: {core for name, own in zip(hosts, cores, strict=True) if name == host for core in own} for host in hosts
    }
    return [len(together[host]) for host in hosts]


def names_of(comm: collectives.Communicator, names: list[str]) -> list[str]:
    """Return the name of each rank's host, or the number of its node where hosts have the same name."""
    nodes = comm.topology.node_of
    if len(set(names)) == len(set(nodes)) == len(set(zip(names, nodes, strict=True))):
        return names
    return [f"node {node}" for node in nodes]
