"""ZeRO stage 2: shard gradients, too; no rank ever holds all of them.

Gradients are reduced to their owners in each micro-batch's backward pass, or in its part for weights, and accumulate
there.  A replica with fewer micro-batches than another takes part with zeros.  With Psi bytes of parameters and m
micro-batches, a rank sends m Psi of gradients in a step; with stage 1, Psi.

Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020,
arXiv 1910.02054, sections 5.2 and 7.2.1.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import cycle, groupby

import torch
from torch import Tensor, nn

from parallelism.buffers import gradients
from parallelism.buffers.arena import Arena, ReleasableBuffer
from parallelism.buffers.gradients import rounding_of
from parallelism.data.buckets import Bucket, BucketQueue
from parallelism.data.replica import Replica
from parallelism.data.units import FlatParam, WorkingBuffer, offsets
from parallelism.step.actions import BACKWARD, FORWARD, WEIGHTS, Action
from parallelism.step.events import SHARED


class ReducedGradients(Replica):
    """Replica whose gradients are reduced to their owners in each backward pass.

    Once all gradients of a bucket are ready, they are copied to one of two working buffers and reduced from there.  A
    stage's buckets start in order, each once all its gradients of the micro-batch are ready; gradients of a later
    bucket wait.  Parameters of several layers are in the last buckets, reduced once per stage that uses them.
    """

    uses: Mapping[nn.Parameter, Iterable[Tensor]]  # aliases by parameter

    def separate(self) -> dict[nn.Parameter, dict[Tensor, int]]:
        """Return the aliases of tied parameters, if gradients are added as integers: autograd would add them before."""
        return self.own.separate() if any(map(rounding_of, self.params.values())) else {}

    def reduce_units(self, units: Sequence[FlatParam]) -> list[Tensor]:
        """Reduce the gradients of units, in their order; return this rank's chunks of them.  Collective."""
        own, ranks, rank, dtype = self.own, self.ranks, self.ranks.shard.rank, self.grad_dtype
        spans = offsets(unit.counts[rank] for unit in units)
        self.gradients = ReleasableBuffer(sum(unit.counts[rank] for unit in units), dtype, self.device)
        chunks = [self.gradients.tensor[span] for span in spans]
        lengths = [max((sum(unit.counts) for unit in units[turn::2]), default=0) for turn in (0, 1)]
        self.working = [WorkingBuffer(ranks.every, length, dtype, self.device) for length in lengths]
        buffers = cycle(self.working)
        self.buckets = [ReduceBucket(self, *each) for each in zip(units, chunks, buffers, strict=False)]
        for groups, pairs in groupby(zip(units, spans, strict=True), lambda pair: self.groups(pair[0])):
            neighbours = [span for _, span in pairs]
            if groups.replicate:
                ours = self.gradients.tensor[neighbours[0].start : neighbours[-1].stop]
                self.across.append(groups.replicate.plan("all_reduce", ours, **self.reduction))
        chunk_of = {name: span for unit, span in zip(units, spans, strict=True) for name in unit.slices}
        own.tied.bind(self.gradients.tensor, chunk_of)
        ordered = sorted(self.buckets, key=lambda bucket: own.home(bucket.params[0]) == SHARED)
        users = {bucket: own.users(set().union(*(own.layers[param] for param in bucket.params))) for bucket in ordered}
        self._of_stage = {stage: [bucket for bucket in ordered if stage in users[bucket]] for stage in own.stages}
        self._queues: dict[tuple[int, int], BucketQueue] = {}  # by stage and micro-batch
        return chunks

    def before(self, action: Action, following: Action | None) -> None:
        stage, kind, micro_batch = action
        if kind != FORWARD and (stage, micro_batch) not in self._queues:
            number = self.own.first_micro_batch + micro_batch
            self._queues[stage, micro_batch] = BucketQueue(self._of_stage[stage], number)
        self._queue = self._queues.get((stage, micro_batch))

    def gradient_ready(self, parameter: Tensor, micro_batch: int) -> None:
        for buffer in self.working:
            if buffer.user:
                buffer.user.plan.advance()
        assert self._queue
        self._queue.ready(parameter)

    def after(self, action: Action) -> None:
        if action.kind in (BACKWARD, WEIGHTS):
            self._queues.pop((action.stage, action.micro_batch)).flush()

    def finish_reducing(self) -> None:
        for _ in range(self.own.num_fewer):  # zeros, while other replicas reduce gradients of further micro-batches
            for buckets in self._of_stage.values():
                BucketQueue(buckets).flush()
        for buffer in self.working:
            finish(buffer)

    def zero_grad(self) -> None:
        self.gradients.zero()


class ShardedGradients(ReducedGradients):
    """Stage 2: gradients, in a pipeline a bucket per layer, and optimizer states are sharded; parameters replicated."""

    zero_stage = 2

    def build(self) -> None:
        own, every = self.own, self.ranks.every
        self.arena = Arena(own.model, every, self.device, gradients=False, dtype=self.dtype)
        self.arena.broadcast(every)
        self.uses = self.separate()  # once the arena has their memory
        slices = {name: self.arena.slices[name] for name in own.trained()}
        if own.is_cut:
            units = self.cut(slices, lambda name: own.home(own.params[name]))
        else:
            units = self.cut(slices, max_bytes=self.bucket_bytes)
        self.shard_weights(self.arena, units, self.reduce_units(units))
        self.arrays = self.arena.parameters, self.gradients.tensor


class ReduceBucket(Bucket):
    """Bucket of a replica's unit: its gradients are reduced in a working buffer, then its chunk is added to `own`."""

    def __init__(self, replica: ReducedGradients, unit: FlatParam, own: Tensor, buffer: WorkingBuffer):
        shard, memory = replica.ranks.shard, buffer.tensor
        chunk = unit.relative(unit.chunks[shard.rank])
        whole = memory[: sum(unit.counts)]
        plan = shard.plan("reduce_scatter", whole, out=memory[chunk], counts=unit.counts, **replica.reduction)
        self.homes = {replica.params[name]: memory[unit.relative(at)] for name, at in unit.slices.items()}
        aliases = [use for param in self.homes for use in replica.uses.get(param, ())]
        super().__init__([*self.homes, *aliases], plan)
        self.own, self.chunk, self.buffer, self.waiting = own, memory[chunk], buffer, replica.waiting

    @torch.no_grad()
    def start(self, micro_batch: int | None = None) -> None:
        with self.waiting():
            finish(self.buffer)
        self.buffer.user, self.micro_batch = self, micro_batch
        for param, home in self.homes.items():
            gradient, param.grad = param.grad, None
            if rounding := rounding_of(param):
                rounding.move(home)
            elif gradient is None:
                home.zero_()
            else:
                home.copy_(gradient.reshape(-1))
        self.plan.start()


def finish(buffer: WorkingBuffer) -> None:
    """Finish the bucket that is being reduced in a buffer, if there is one."""
    if bucket := buffer.user:
        bucket.plan.wait()
        gradients.add(bucket.own, bucket.chunk, bucket.micro_batch)
        buffer.user = None
