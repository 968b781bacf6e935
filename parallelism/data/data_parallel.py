"""Data parallelism: every rank has the whole model and a part of the batch; gradients are averaged."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from parallelism.data.exposed_time import ExposedTime

if TYPE_CHECKING:
    from collectives import Communicator, Plan
    from parallelism.buffers.arena import Arena


class Bucket:
    """Gradients that are reduced together, once the last of them has appeared."""

    def __init__(self, plan: Plan, names: set[str]):
        self.plan, self.names = plan, names
        self.missing = set(names)

    def start(self) -> None:
        self.plan.start()

    def advance(self) -> None:
        self.plan.advance()

    def wait(self) -> None:
        self.plan.wait()


class BucketedReducer(ExposedTime, nn.Module):
    """A module whose gradients are reduced in buckets while the backward pass goes on.

    Buckets start in their order, each once all its gradients have appeared; those under way move on each time one
    appears, and the pass ends when all are reduced.  Under `no_sync()` gradients only accumulate, and the next
    backward pass outside reduces the sum.

    Every rank's backward passes must come in the same order; parameters that a pass does not reach count as zero.
    `exposed_s` is the time that passes waited for the network, in seconds, added up.
    """

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module
        self.sync = True
        self._in_backward = False
        self.buckets: list[Bucket] = []

    def attend(self, buckets: Sequence[Bucket]) -> None:
        """Reduce gradients in these buckets from now on."""
        self.buckets = list(buckets)
        self._home = {name: bucket for bucket in buckets for name in bucket.names}
        for name, param in self.module.named_parameters():
            if param.requires_grad:
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

    @property
    def reduces(self) -> bool:
        """Whether the gradients of a pass are reduced in it."""
        return self.sync

    def _gradient_hook(self, name: str):
        def gradient_appeared(_: nn.Parameter) -> None:
            if self.reduces:
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
            bucket.advance()
        while self._waiting and not self._waiting[0].missing:
            self._waiting.pop(0).start()

    def _end_backward(self) -> None:
        with self.waiting():
            for bucket in self._waiting:  # some of their parameters had no part in this pass
                bucket.start()
            for bucket in self.buckets:
                bucket.wait()
                bucket.missing = set(bucket.names)
        self._in_backward = False


class DataParallel(BucketedReducer):
    """A module whose gradients, after each backward pass, are the average over the ranks of `comm`.

    Parameters and gradients live in `arena`; rank 0's initial parameters and buffers are broadcast.  Gradients are
    reduced in buckets of about `bucket_mb` MiB, in the order they appear; `reduction` are further arguments of that.

    Source: Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", 2020 (buckets, order).
    """

    def __init__(self, module: nn.Module, comm: Communicator, arena: Arena, bucket_mb: float = 4.0, **reduction: Any):
        super().__init__(module)
        self.comm, self.arena = comm, arena
        bucket_bytes = num_bytes(bucket_mb)
        arena.broadcast(comm)
        for buffer in module.buffers():
            comm.broadcast(buffer, root=0)
        self.attend(
            [
                Bucket(comm.plan("all_reduce", arena.gradients[place], **{"op": "avg", **reduction}), names)
                for place, names in cut_buckets(arena, trained(module), bucket_bytes)
            ]
        )

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Clear the gradients, in place: the arena has them."""
        self.arena.zero_grad()


def num_bytes(bucket_mb: float) -> int:
    if not 0 < bucket_mb < math.inf:
        raise ValueError(f"bucket_mb={bucket_mb} must be above 0")
    return int(bucket_mb * 2**20)


def trained(module: nn.Module) -> list[str]:
    """The names of the parameters that get gradients."""
    return [name for name, p in module.named_parameters() if p.requires_grad]


def cut_buckets(arena: Arena, names: list[str], bucket_bytes: int) -> list[tuple[slice, set[str]]]:
    """Slices of the arena of about `bucket_bytes`, from its end to its start: gradients appear in that order."""
    buckets: list[tuple[slice, set[str]]] = []
    inside: set[str] = set()
    end = None
    for name in reversed(names):
        place = arena.slices[name]
        end = place.stop if end is None else end
        inside.add(name)
        if (end - place.start) * arena.parameters.dtype.itemsize >= bucket_bytes or name == names[0]:
            buckets.append((slice(place.start, end), inside))
            inside, end = set(), None
    return buckets
