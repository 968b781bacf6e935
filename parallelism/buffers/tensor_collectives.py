"""Collectives on torch tensors at changing addresses but of few shapes: one plan is bound per shape and reused.

The time in which a rank is idle, waiting for others, is exposed communication.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor

import collectives
from parallelism.buffers.arena import allocate


class ExposedTime:
    """Accumulates the seconds of waiting for the network in `exposed_s`, the thread's CPU time in `exposed_cpu_s`."""

    exposed_s = exposed_cpu_s = 0.0

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Time a wait for the network; nested waits count once."""
        before, before_cpu = self.exposed_s, self.exposed_cpu_s
        begin, begin_cpu = time.perf_counter(), time.thread_time()
        yield
        self.exposed_s = before + time.perf_counter() - begin
        self.exposed_cpu_s = before_cpu + time.thread_time() - begin_cpu


class BoundCollective(NamedTuple):
    """A plan, and its input and output memory."""

    plan: collectives.Plan
    source: Tensor
    result: Tensor


class CollectiveWork:
    """A collective in progress; `wait()` returns the result as a new tensor."""

    def __init__(self, bound: BoundCollective, free_plans: list[BoundCollective], clock: ExposedTime):
        self.bound, self.free_plans, self.clock = bound, free_plans, clock

    def wait(self) -> Tensor:
        with self.clock.waiting():
            self.bound.plan.wait()
        result = self.bound.result.clone()
        self.free_plans.append(self.bound)
        return result


class TensorCollectives(ExposedTime):
    """Collectives of `comm` on tensors, which are not modified.

    Every rank must call the same collectives with the same shapes in the same order: the first call with a shape binds
    a plan, on symmetric memory, and later calls reuse it.  Calls in progress at the same time need a plan each.

    Shapes: on n ranks, `all_gather` maps (k, ...) to (n k, ...), `reduce_scatter` the reverse; `all_to_all` exchanges
    the n parts of the first dim.
    """

    def __init__(self, comm: collectives.Communicator):
        self.comm, self.rank, self.size = comm, comm.rank, comm.size
        self._free_plans: dict[tuple, list[BoundCollective]] = defaultdict(list)

    def all_reduce(self, x: Tensor, **arguments: Any) -> Tensor:
        return self.run("all_reduce", x, **arguments)

    def all_gather(self, x: Tensor) -> Tensor:
        return self.run("all_gather", x)

    def reduce_scatter(self, x: Tensor) -> Tensor:
        return self.run("reduce_scatter", x)

    def all_to_all(self, x: Tensor) -> Tensor:
        return self.run("all_to_all", x)

    def all_to_all_v(self, x: Tensor, send_counts: tuple[int, ...], recv_counts: tuple[int, ...]) -> Tensor:
        """Exchange chunks of a flat tensor of as many elements as each rank's counts say; return them in a flat one."""
        return self.run("all_to_all", x, send_counts=send_counts, recv_counts=recv_counts)

    def start_shift(self, x: Tensor) -> CollectiveWork:
        """Start a ring shift: send a tensor to the next rank, and receive the previous rank's."""
        counts = [0] * self.size
        counts[(self.rank + 1) % self.size] = x.numel()
        return self.start("all_to_all", x, send_counts=tuple(counts))

    def run(self, collective: str, x: Tensor, **arguments: Any) -> Tensor:
        pending = self._load(collective, x, arguments)
        with self.waiting():
            pending.bound.plan.begin()  # not `start`: this thread waits, so no other has to progress it
            return pending.wait()

    def start(self, collective: str, x: Tensor, **arguments: Any) -> CollectiveWork:
        """Start a collective, which progresses while this process computes."""
        pending = self._load(collective, x, arguments)
        pending.bound.plan.start()
        return pending

    def forget(self) -> None:
        """Free the plans and their memory."""
        self._free_plans.clear()

    def _load(self, collective: str, x: Tensor, arguments: dict[str, Any]) -> CollectiveWork:
        """Return a free plan, with the input copied into it; bind a new plan if all are busy."""
        free = self._free_plans[collective, x.shape, x.dtype, x.device, *arguments.values()]
        bound = free.pop() if free else self._bind(collective, x, arguments)
        bound.source.copy_(x)
        return CollectiveWork(bound, free, self)

    def _bind(self, collective: str, x: Tensor, arguments: dict[str, Any]) -> BoundCollective:
        source = allocate(self.comm, x.shape, x.dtype, str(x.device))
        if collective == "all_reduce":
            return BoundCollective(self.comm.plan(collective, source, **arguments), source, source)
        length, *rest = x.shape
        if collective == "all_gather":
            length *= self.size
        elif "recv_counts" in arguments:
            length = sum(arguments["recv_counts"])
        elif "send_counts" not in arguments and length % self.size:
            raise ValueError(f"{collective}: a first dim of {length} is not divisible by {self.size} ranks")
        elif collective == "reduce_scatter":
            length //= self.size
        out = allocate(self.comm, (length, *rest), x.dtype, str(x.device))
        return BoundCollective(self.comm.plan(collective, source, out=out, **arguments), source, out)
