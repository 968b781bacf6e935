"""ZeRO stage 2: shard gradients, too; no rank ever holds all of them.

Gradients are reduced to their owners in each micro-batch's backward pass, or in its part for weights, and accumulate
there.  With Psi bytes of parameters and m micro-batches, a rank sends m Psi of gradients in a step; with stage 1, Psi.

Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020,
arXiv 1910.02054, sections 5.2 and 7.2.1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import groupby
from operator import itemgetter

import torch
from torch import Tensor, nn

import collectives
from parallelism.buffers import gradients
from parallelism.buffers.arena import Arena, ReleasableBuffer, allocate, one_dtype
from parallelism.data.buckets import Bucket, BucketQueue, cut_buckets
from parallelism.data.replica import Replica
from parallelism.pipeline.events import SHARED
from parallelism.pipeline.schedule.actions import BACKWARD, FORWARD, WEIGHTS, Action
from parallelism.zero.states import gather_in_place, masters_in
from parallelism.zero.units import FlatParam, ShardGroups, offsets

WaitTimer = Callable[[], AbstractContextManager]


class ReducedGradients(Replica):
    """Replica whose gradients are reduced to their owners in each backward pass.

    A stage's buckets start in order, each once all its gradients of the micro-batch are ready; gradients of a later
    bucket wait.  Parameters of several layers are in the last buckets, reduced once per stage that uses them.
    """

    every_micro_batch = True
    gradients: GradientShard

    def reduce_units(self, units: Sequence[FlatParam], dtype: torch.dtype) -> None:
        """Reduce the gradients of units, in their order, in `dtype`.  Collective."""
        own, rank = self.own, self.ranks.shard.rank
        self.gradients = GradientShard(self, units, dtype)
        places = offsets(unit.counts[rank] for unit in units)
        self.across = [
            groups.replicate.plan("all_reduce", self.gradients.array[place], **self.reduction)
            for groups, place in joined(map(self.groups, units), places)
            if groups.replicate
        ]
        chunks = {name: place for unit, place in zip(units, places, strict=True) for name in unit.slices}
        own.tied.bind(self.gradients.array, chunks)
        ordered = sorted(self.gradients.buckets, key=lambda bucket: own.home(bucket.params[0]) == SHARED)
        users = {bucket: own.users(set().union(*map(own.layers, bucket.params))) for bucket in ordered}
        self._buckets = {stage: [bucket for bucket in ordered if stage in users[bucket]] for stage in own.stages}
        self._queues: dict[tuple[int, int], BucketQueue] = {}  # by stage and micro-batch

    def before(self, action: Action, following: Action | None) -> None:
        stage, kind, micro_batch = action
        if kind != FORWARD and (stage, micro_batch) not in self._queues:
            number = self.own.first_micro_batch + micro_batch
            self._queues[stage, micro_batch] = BucketQueue(self._buckets[stage], number)
        self._queue = self._queues.get((stage, micro_batch))

    def gradient_ready(self, parameter: Tensor, micro_batch: int) -> None:
        for bucket in self.gradients.under_way:
            bucket.advance()
        assert self._queue
        self._queue.ready(parameter)

    def after(self, action: Action) -> None:
        if action.kind in (BACKWARD, WEIGHTS):
            self._queues.pop((action.stage, action.micro_batch)).flush()

    def finish_reducing(self) -> None:
        for bucket in self.gradients.under_way:
            bucket.wait()

    def zero_grad(self) -> None:
        """Clear the pieces' gradients in place."""
        self.gradients.clear()


class ShardedGradients(ReducedGradients):
    """Stage 2: parameters are replicated; gradients and optimizer states are sharded.

    In a pipeline, there is a bucket per layer.
    """

    zero_stage = 2

    def build(self) -> None:
        own, ranks = self.own, self.ranks
        self.arena = Arena(own.model, ranks.every, self.device, gradients=False, dtype=self.dtype)
        self.arena.broadcast(ranks.every)
        units = self._units()
        self.reduce_units(units, self.grad_dtype or one_dtype(self.params.values()))
        self.gathering = gather_in_place(self.arena, units, ranks)
        self.arrays = self.arena.parameters, self.gradients.array
        self.masters = masters_in(self.arena, own, units, ranks.shard.rank, self.gradients.own)

    def _units(self) -> list[FlatParam]:
        """Return the units from the arena's end to its start, the order of the backward pass."""
        own, slices = self.own, self.arena.slices
        names = own.trained(slices)

        def averaging(name: str) -> ShardGroups:
            return self.ranks.averaging(own.params[name])

        if own.is_cut:
            trained = {name: slices[name] for name in names}
            parts = own.runs(trained, lambda name: (own.home(own.params[name]), averaging(name)))[::-1]
        else:
            buckets = cut_buckets(self.arena, names, self.bucket_bytes, averaging)
            parts = [{name: slices[name] for name in inside} for _, inside in buckets]
        return [FlatParam.of(part, self.arena.line, self.ranks.shard.size) for part in parts]


def joined(groups: Iterable[ShardGroups], places: Iterable[slice]) -> Iterator[tuple[ShardGroups, slice]]:
    """Merge neighbouring slices of the same groups."""
    for same, pairs in groupby(zip(groups, places, strict=True), itemgetter(0)):
        neighbours = [place for _, place in pairs]
        yield same, slice(neighbours[0].start, neighbours[-1].stop)


class GradientShard:
    """A rank's gradients, of its chunks of `units`, and the buckets that reduce them.

    They are reduced and kept in `dtype`.  Once all gradients of a bucket are ready, they are copied to one of two
    working buffers, from which they are reduced to their owners.  Collective.
    """

    def __init__(self, replica: Replica, units: Sequence[FlatParam], dtype: torch.dtype):
        params, ranks, device, waiting = replica.params, replica.ranks, replica.device, replica.waiting
        rank = ranks.shard.rank
        places = offsets(unit.counts[rank] for unit in units)
        buffer = ReleasableBuffer(sum(unit.counts[rank] for unit in units), dtype, device)
        self.array, self.own = buffer.array, [buffer.tensor[place] for place in places]
        self.clear = buffer.zero
        room = [max((sum(unit.counts) for unit in units[turn::2]), default=0) for turn in (0, 1)]
        self.working = [allocate(ranks.every, count, dtype, device) for count in room]
        self.buckets: list[ReduceBucket] = []
        self._users: tuple[list[ReduceBucket], list[ReduceBucket]] = [], []
        for index, (unit, own) in enumerate(zip(units, self.own, strict=True)):
            array, tensor = self.working[index % 2]
            out = array[unit.relative(unit.chunks[rank])]
            plan = ranks.shard.plan(
                "reduce_scatter", array[: sum(unit.counts)], out=out, counts=unit.counts, **replica.reduction
            )
            homes = {params[name]: tensor[unit.relative(place)] for name, place in unit.slices.items()}
            mine = tensor[unit.relative(unit.chunks[rank])], own
            self.buckets.append(ReduceBucket(plan, homes, mine, self._users[index % 2], waiting))

    @property
    def under_way(self) -> list[ReduceBucket]:
        """Last users of the working buffers; all other buckets are done."""
        return [bucket for users in self._users for bucket in users]


class ReduceBucket(Bucket):
    """Bucket that copies gradients to `homes` in a working buffer, once its last `users` are done, and reduces them.

    `mine` are two tensors: this rank's chunk of the buffer, and its gradients, to which the reduced chunk is added.
    Waiting for the buffer is timed by `waiting()`.
    """

    def __init__(
        self,
        plan: collectives.Plan,
        homes: Mapping[nn.Parameter, Tensor],
        mine: tuple[Tensor, Tensor],
        users: list[ReduceBucket],
        waiting: WaitTimer,
    ):
        super().__init__(plan, homes)
        self.homes, self.mine, self.users, self.waiting = homes, mine, users, waiting
        self.is_under_way = False
        self.micro_batch: int | None = None

    @torch.no_grad()
    def start(self, micro_batch: int | None = None) -> None:
        with self.waiting():
            for user in self.users:
                user.wait()
        self.users[:] = [self]
        for param, home in self.homes.items():
            if param.grad is None:
                home.zero_()
            else:
                home.copy_(param.grad.reshape(-1))
                param.grad = None
        self.plan.start()
        self.is_under_way, self.micro_batch = True, micro_batch

    def advance(self) -> None:
        if self.is_under_way:
            self.plan.advance()

    def wait(self) -> None:
        if self.is_under_way:
            self.plan.wait()
            chunk, own = self.mine
            gradients.add(own, chunk, self.micro_batch)
            self.is_under_way = False
