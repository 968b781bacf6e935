"""Gradient buckets: gradients that are reduced together, while the backward pass continues."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from torch import Tensor

import collectives
from parallelism.buffers.gradients import rounding_of


class Bucket:
    """Parameters whose gradients are reduced together, then `across` the ranks that own the same chunks, if any."""

    def __init__(self, params: Iterable[Tensor], plan: collectives.Plan, across: collectives.Plan | None = None):
        self.params, self.plan, self.across = tuple(params), plan, across

    def start(self, micro_batch: int | None = None) -> None:
        """Reduce the gradients of a micro-batch, numbered in the global batch, or the accumulated gradients of all."""
        for rounding in filter(None, map(rounding_of, self.params)):
            rounding.settle()
        self.plan.start()


class BucketQueue:
    """Starts buckets in an order common to all ranks, each once all its gradients are ready."""

    def __init__(self, buckets: Sequence[Bucket], micro_batch: int | None = None):
        self.micro_batch = micro_batch
        self._waiting, self._started = deque(buckets), deque[Bucket]()
        self._across: list[collectives.Plan] = []
        self._missing = {bucket: set(bucket.params) for bucket in buckets}
        self._bucket = {param: bucket for bucket in buckets for param in bucket.params}

    def advance(self) -> None:
        """Progress the started buckets; start the reduction `across` of those that are reduced, in the same order."""
        for bucket in self._started:
            bucket.plan.advance()
        while self._started and self._started[0].plan.done():
            self._start_across()
        for plan in self._across:
            plan.advance()

    def _start_across(self) -> None:
        if across := self._started.popleft().across:
            self._across.append(across.start())

    def ready(self, param: Tensor) -> None:
        """Record that a gradient is ready, and start the next buckets that are complete."""
        if bucket := self._bucket.get(param):
            self._missing[bucket].discard(param)
        while self._waiting and not self._missing[self._waiting[0]]:
            self._start()

    def _start(self) -> None:
        bucket = self._waiting.popleft()
        bucket.start(self.micro_batch)
        self._started.append(bucket)

    def flush(self) -> None:
        """Start the remaining buckets, some of whose parameters the backward pass did not reach."""
        while self._waiting:
            self._start()

    def wait(self) -> None:
        """Wait until all started buckets are reduced, also `across`."""
        while self._started:
            self._started[0].plan.wait()
            self._start_across()
        for plan in self._across:
            plan.wait()


def num_bytes(bucket_mb: float) -> int:
    if not 0 < bucket_mb < math.inf:
        raise ValueError(f"bucket_mb={bucket_mb} must be above 0")
    return int(bucket_mb * 2**20)


def cut_buckets(
    slices: dict[str, slice], key: Callable[[str], object], max_length: float = math.inf
) -> list[dict[str, slice]]:
    """Cut slices into buckets of about `max_length` elements, from the last to the first, as in the backward pass.

    Return each bucket's slices, in their order; their names have the same `key`.
    """
    buckets: list[list[str]] = []
    for name in reversed(slices):
        inside = buckets[-1] if buckets else []
        is_open = inside and slices[inside[-1]].stop - slices[inside[0]].start < max_length
        if is_open and key(name) == key(inside[0]):
            inside.insert(0, name)
        else:
            buckets.append([name])
    return [{name: slices[name] for name in names} for names in buckets]
