"""The gradients of an optimizer's step: reduced in buckets, during the backward pass.

Buckets start in the same order on all ranks, each once all its gradients are ready, in whichever order these appear.
Before the first one of a step the ranks match calls, so that joined ranks take part.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from collectives.arrays.views import to_torch
from collectives.communicator import Communicator
from collectives.horovod.matching import Description, MatchedCalls

BUCKET_BYTES = 4 << 20
Groups = int | Sequence[Sequence[Tensor]] | None


class GradientBucket:
    """Parameters whose gradients are sent together, in a buffer that every rank of the node reaches."""

    def __init__(self, comm: Communicator, params: Sequence[Tensor], compression: Any, op: str, predivide: float):
        self.params, self.compression, self.predivide = params, compression, predivide
        likes = [compression.compress(torch.zeros_like(param))[0] for param in params]
        lengths, dtype = [x.numel() for x in likes], str(likes[0].dtype).removeprefix("torch.")
        self.buffer = to_torch(comm.empty(sum(lengths), dtype, str(likes[0].device)))
        self.views = [view.view_as(x) for view, x in zip(self.buffer.split(lengths), likes, strict=True)]
        self.contexts: list[Any] = [None] * len(params)
        self.plan = comm.plan("all_reduce", self.buffer, op=op)

    @torch.no_grad()
    def start(self) -> None:
        """Begin to reduce the gradients, 0 if there is none."""
        for i, (param, view) in enumerate(zip(self.params, self.views, strict=True)):
            gradient = torch.zeros_like(param) if param.grad is None else param.grad
            sent, self.contexts[i] = self.compression.compress(gradient.to_dense() if gradient.is_sparse else gradient)
            view.copy_(sent)
        if self.predivide != 1:
            self.buffer.div_(self.predivide)
        self.plan.start()

    @torch.no_grad()
    def finish(self) -> None:
        """Wait for the reduced gradients; sparse ones become sparse again."""
        self.plan.wait()
        if self.predivide != 1:
            self.buffer.mul_(self.predivide)
        for param, view, context in zip(self.params, self.views, self.contexts, strict=True):
            reduced = self.compression.decompress(view, context)
            if param.grad is None:
                param.grad = reduced.clone()
            elif param.grad.is_sparse:
                param.grad = reduced.to_sparse(param.grad.sparse_dim())
            else:
                param.grad.copy_(reduced)


class GradientReducer:
    """Reduces gradients in buckets, each parameter's once it has had `passes` backward passes.

    `description` is the optimizer's, on which the ranks have agreed; `comm` is that of the buckets.
    """

    def __init__(
        self,
        calls: MatchedCalls,
        comm: Communicator,
        description: Description,
        buckets: Sequence[GradientBucket],
        passes: int,
    ):
        self.calls, self.comm, self.buckets, self.passes = calls, comm, buckets, passes
        self.step = description._replace(kind="step")
        calls.reducers[self.step.name] = self
        self.hooks: list[Any] = []
        self.bucket_of = {param: bucket for bucket in buckets for param in bucket.params}
        for param in self.bucket_of:
            self.hooks.append(param.register_post_accumulate_grad_hook(self.ready))
        self.begin()

    def begin(self) -> None:
        self.left = dict.fromkeys(self.bucket_of, self.passes)
        self.missing = {bucket: {*bucket.params} for bucket in self.buckets}
        self.num_started = 0

    @property
    def is_under_way(self) -> bool:
        return any(passes_left < self.passes for passes_left in self.left.values())

    def ready(self, param: Tensor) -> None:
        """Count a backward pass that has reached a parameter, and start the buckets that are full."""
        if self.left[param] == 0:
            raise AssertionError(
                f"a gradient has had more than backward_passes_per_step={self.passes} backward passes before step(): "
                "call step() after each so many, or raise it"
            )
        self.left[param] -= 1
        if self.left[param] == 0:
            self.missing[self.bucket_of[param]].discard(param)
            while self.num_started < len(self.buckets) and not self.missing[self.buckets[self.num_started]]:
                self.start_next()

    def start_next(self) -> None:
        if self.num_started == 0:
            self.calls.wait(self.calls.add(self.step))
        self.buckets[self.num_started].start()
        self.num_started += 1

    def finish(self) -> None:
        """Start the remaining buckets, and wait for all."""
        while self.num_started < len(self.buckets):
            self.start_next()
        for bucket in self.buckets:
            bucket.finish()
        self.begin()

    def free(self) -> None:
        """Remove the hooks of gradients, and free the communicator.  Collective."""
        for hook in self.hooks:
            hook.remove()
        for bucket in self.buckets:
            bucket.plan.free()
        self.comm.free()

    def join_in(self) -> None:
        """Contribute gradients of 0, for a rank that has joined."""
        for bucket in self.buckets:
            bucket.buffer.zero_()
            bucket.plan.start()
        for bucket in self.buckets:
            bucket.plan.wait()


def cut(params: Sequence[Tensor], groups: Groups) -> list[list[Tensor]]:
    """Return the parameters of each bucket, in the order in which the last of their gradients appears.

    Buckets have one dtype, and about `BUCKET_BYTES`, unless `groups` gives their number, or the buckets themselves.
    """
    order = {param: i for i, param in enumerate(reversed(params))}
    if isinstance(groups, int):
        each = -(-len(order) // groups) if groups else 1
        groups = [[*order][i : i + each] for i in range(0, len(order) if groups else 0, each)]
    parts = [[param for param in group if param in order] for group in groups or ()]
    grouped = {param for part in parts for param in part}
    parts += by_size(param for param in order if param not in grouped)
    buckets = [[*same] for part in parts for _, same in groupby(sorted(part, key=kind), key=kind)]
    return sorted(buckets, key=lambda bucket: max(order[param] for param in bucket))


def kind(param: Tensor) -> str:
    return f"{param.dtype} {param.device}"


def by_size(params: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    bucket: list[Tensor] = []
    for param in params:
        bucket.append(param)
        if sum(x.nbytes for x in bucket) >= BUCKET_BYTES:
            yield bucket
            bucket = []
    if bucket:
        yield bucket
