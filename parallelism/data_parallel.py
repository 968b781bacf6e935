"""Data parallelism: every rank has the whole model and a part of the batch; gradients are averaged."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from collectives import Communicator, Plan
    from parallelism.arena import Arena


class Bucket:
    """A slice of the gradients, reduced together once the last of them has appeared."""

    def __init__(self, plan: Plan, names: set[str]):
        self.plan, self.names = plan, names
        self.missing = set(names)


class DataParallel(nn.Module):
    """A module whose gradients, after each backward pass, are the average over the ranks of `comm`.

    Parameters and gradients live in `arena`; rank 0's initial parameters and buffers are broadcast.  Gradients are
    reduced in buckets of about `bucket_mb` MiB, in the order they appear, while the backward pass goes on: the
    buckets under way move on each time a gradient appears, and the pass ends when all are reduced.  Under
    `no_sync()` gradients only accumulate, and the next backward pass outside reduces the sum.

    Every rank's backward passes must come in the same order; parameters that a pass does not reach count as zero.
    `exposed_s` is the time that backward passes waited for the network at their end, in seconds, added up.

    Source: Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", 2020 (buckets, order).
    """

    def __init__(self, module: nn.Module, comm: Communicator, arena: Arena, bucket_mb: float = 4.0):
        super().__init__()
        if bucket_mb <= 0:
            raise ValueError(f"bucket_mb={bucket_mb} must be above 0")
        self.module, self.comm, self.arena = module, comm, arena
        self.exposed_s = 0.0
        self.sync = True
        self._in_backward = False
        comm.broadcast(arena.parameters, root=0)
        for buffer in module.buffers():
            comm.broadcast(buffer, root=0)
        params = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self.buckets = [
            Bucket(comm.plan("all_reduce", arena.gradients[place], op="avg"), names)
            for place, names in cut_buckets(arena, list(params), int(bucket_mb * 2**20))
        ]
        self._home = {name: bucket for bucket in self.buckets for name in bucket.names}
        for name, param in params.items():
            param.register_post_accumulate_grad_hook(self._gradient_hook(name))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients without reducing them."""
        before, self.sync = self.sync, False
        try:
            yield
        finally:
            self.sync = before

    def _gradient_hook(self, name: str):
        def gradient_appeared(_: nn.Parameter) -> None:
            if self.sync:
                self._begin_backward()
                self._home[name].missing.discard(name)
                self._launch_full_buckets()

        return gradient_appeared

    def _begin_backward(self) -> None:
        if not self._in_backward:
            self._in_backward = True
            self._waiting = list(self.buckets)
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)

    def _launch_full_buckets(self) -> None:
        """Start the next buckets, in their fixed order; move on those under way."""
        for bucket in self.buckets[: len(self.buckets) - len(self._waiting)]:
            bucket.plan.advance()
        while self._waiting and not self._waiting[0].missing:
            self._waiting.pop(0).plan.start()

    def _end_backward(self) -> None:
        begin = time.perf_counter()
        for bucket in self._waiting:  # some of their parameters had no part in this pass
            bucket.plan.start()
        for bucket in self.buckets:
            bucket.plan.wait()
            bucket.missing = set(bucket.names)
        self.exposed_s += time.perf_counter() - begin
        self._in_backward = False


def cut_buckets(arena: Arena, names: list[str], bucket_bytes: int) -> list[tuple[slice, set[str]]]:
    """Slices of the arena of about `bucket_bytes`, from its end to its start: gradients appear in that order."""
    buckets: list[tuple[slice, set[str]]] = []
    inside: set[str] = set()
    end = None
    for name in reversed(names):
        place = arena.slices[name]
        end = place.stop if end is None else end
        inside.add(name)
        if (end - place.start) * arena.gradients.dtype.itemsize >= bucket_bytes or name == names[0]:
            buckets.append((slice(place.start, end), inside))
            inside, end = set(), None
    return buckets
