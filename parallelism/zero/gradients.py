"""ZeRO, stage 2: ranks share the gradients, too, which none of them ever has as a whole.

Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020,
arXiv 1910.02054, sections 5.2 and 7.2.1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from parallelism.buffers.arena import Arena, allocate, one_dtype
from parallelism.buffers.releasable import ReleasableBuffer
from parallelism.data.data_parallel import Bucket
from parallelism.zero.states import MakeOptimizer, Zero, gather_in_place, masters_in, units_of
from parallelism.zero.units import FlatParam, ShardGroups, offsets

if TYPE_CHECKING:
    from collectives import Plan


WaitTimer = Callable[[], AbstractContextManager]


class ShardedGradients(Zero):
    """Stage 2: each rank has all parameters, and gradients and the optimizer's states of its pieces.

    A parameter's gradient goes to a working buffer, of which there are two, once those of its bucket are there; from
    there the sums go to their owners.  As whole gradients are never kept, those of each micro-batch are reduced, under
    `no_sync()` too; ranks that own the same add up theirs in the end.

    Buckets go in their order: gradients that come before those of an earlier bucket wait.
    """

    zero_stage = 2

    def __init__(
        self,
        module: nn.Module,
        ranks: ShardGroups,
        make_optimizer: MakeOptimizer,
        device: str = "cpu",
        bucket_mb: float = 4.0,
        dtype: torch.dtype | None = None,
        grad_dtype: torch.dtype | None = None,
        **reduction: Any,
    ):
        super().__init__(module, ranks)
        self.arena = Arena(module, ranks.every, device, gradients=False, dtype=dtype)
        self.arena.broadcast(ranks.every)
        grad_dtype = grad_dtype or one_dtype(module.parameters())
        units = units_of(self.arena, module, ranks, bucket_mb)
        self.gathering = gather_in_place(self.arena, units, ranks)
        self.gradients = GradientShard(self.params, units, ranks, device, grad_dtype, self.waiting, **reduction)
        self.arrays = self.arena.parameters, self.gradients.array
        self.across = self.gradients.across
        self.masters = masters_in(self.arena, module, units, ranks.shard.rank, self.gradients.own)
        self.optimizer = make_optimizer(list(self.masters.pieces.values()))
        self.attend(self.gradients.buckets)

    @property
    def reduces(self) -> bool:
        return True

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Clear the pieces' gradients, in place."""
        self.gradients.clear()


class GradientShard:
    """A rank's gradients, as long as its chunks of `units`, and the buckets through which they come.

    They are reduced and kept in `dtype`.  Collective.
    """

    def __init__(
        self,
        params: Mapping[str, nn.Parameter],
        units: Sequence[FlatParam],
        ranks: ShardGroups,
        device: str,
        dtype: torch.dtype,
        waiting: WaitTimer,
        **reduction: Any,
    ):
        rank = ranks.shard.rank
        places = offsets(unit.counts[rank] for unit in units)
        kept = ReleasableBuffer(sum(unit.counts[rank] for unit in units), dtype, device)
        self.array, self.own = kept.array, [kept.tensor[place] for place in places]
        self.clear = kept.zero
        asked = {"op": "avg", **reduction}
        self.across = [ranks.replicate.plan("all_reduce", self.array, **asked)] if ranks.replicate else []
        room = [max((sum(unit.counts) for unit in units[turn::2]), default=0) for turn in (0, 1)]
        self.working = [allocate(ranks.every, count, dtype, device) for count in room]
        self.buckets: list[ReduceBucket] = []
        users: tuple[list[ReduceBucket], list[ReduceBucket]] = [], []
        for index, (unit, own) in enumerate(zip(units, self.own, strict=True)):
            array, tensor = self.working[index % 2]
            out = array[unit.relative(unit.chunks[rank])]
            plan = ranks.shard.plan("reduce_scatter", array[: sum(unit.counts)], out=out, counts=unit.counts, **asked)
            homes = {params[name]: tensor[unit.relative(place)] for name, place in unit.slices.items()}
            mine = tensor[unit.relative(unit.chunks[rank])], own
            self.buckets.append(ReduceBucket(plan, set(unit.slices), homes, mine, users[index % 2], waiting))


class ReduceBucket(Bucket):
    """Gradients that go to `homes` in a working buffer, once the last of its `users` is through there, to be reduced.

    What becomes of this rank's chunk of the buffer is added to its own gradients: the two tensors of `mine`.  For the
    buffer it waits within `waiting()`.
    """

    def __init__(
        self,
        plan: Plan,
        names: set[str],
        homes: Mapping[nn.Parameter, Tensor],
        mine: tuple[Tensor, Tensor],
        users: list[ReduceBucket],
        waiting: WaitTimer,
    ):
        super().__init__(plan, names)
        self.homes, self.mine, self.users, self.waiting = homes, mine, users, waiting
        self.under_way = False

    @torch.no_grad()
    def start(self) -> None:
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
        self.under_way = True

    @torch.no_grad()
    def wait(self) -> None:
        if self.under_way:
            self.plan.wait()
            chunk, own = self.mine
            own.add_(chunk)
            self.under_way = False
