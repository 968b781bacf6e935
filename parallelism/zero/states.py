"""ZeRO, and its stage 1: ranks of data parallelism share the optimizer's states.

Each bucket of gradients is reduced so that a rank gets the sum of its chunk alone.  It updates that chunk of the
parameters, and all gather them.  Optimizers work on `masters`: what of each parameter lies in the rank's chunks.

Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020,
arXiv 1910.02054, sections 5.1 and 7.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from models.optimizer import Optimizer
from parallelism.buffers.arena import Arena
from parallelism.data.data_parallel import Bucket, BucketedReducer, cut_buckets, num_bytes, trained
from parallelism.numerics.master_weights import MasterWeights
from parallelism.zero.units import FlatParam, ShardGroups, masters_of, pieces

if TYPE_CHECKING:
    from collectives import Plan

MakeOptimizer = Callable[[list[nn.Parameter]], Optimizer]


class Zero(BucketedReducer):
    """A module that ranks train together, each the owner of some pieces of its parameters.

    After a backward pass the owners' gradients are the average over the ranks; `masters.take_gradients()` gives them to
    what the optimizer updates, and `update()` updates all parameters.  `make_optimizer` is given the masters' pieces,
    parameters of as many dims as those that they are pieces of; as a rank may own nothing, it must put them in groups.

    Parameters become of `dtype` and gradients of `grad_dtype`, as in an arena; beside 16-bit parameters a rank has
    float32 ones of its pieces, which are what belongs to the optimizer's states.  Making one is collective.
    """

    zero_stage: int
    arrays: tuple[Any, Any]  # of the parameters and of the gradients that a rank holds between steps
    masters: MasterWeights
    optimizer: Optimizer

    def __init__(self, module: nn.Module, ranks: ShardGroups):
        super().__init__(module)
        self.ranks = ranks
        self.params = dict(module.named_parameters())
        self.gathering: list[Plan] = []  # of parameters, after a step
        self.across: list[Plan] = []  # of gradients, over ranks that own the same
        for buffer in module.buffers():
            ranks.every.broadcast(buffer, root=0)

    def update(self) -> None:
        """Update this rank's pieces, and gather all ranks'.  Collective."""
        self.optimizer.step()
        self.gather()

    def gather(self) -> None:
        """Make parameters what their owners' pieces are.  Collective."""
        self.masters.give_parameters()
        with self.waiting():
            run(self.gathering)

    def _end_backward(self) -> None:
        super()._end_backward()
        if self.sync:
            with self.waiting():
                run(self.across)

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Where the module has all its parameters, to be read.  Collective."""
        yield


def run(plans: Sequence[Plan]) -> None:
    """All at once."""
    for plan in plans:
        plan.start()
    for plan in plans:
        plan.wait()


class ShardedStates(Zero):
    """Stage 1: each rank has all parameters and gradients, and the optimizer's states of its pieces.

    Gradients accumulate in `arena`, as in DataParallel, until they are reduced; the rest of what a rank has of them is
    then used up, so that they must be cleared before the next pass.

    Parameters become those of plain data parallelism, bit for bit where gradients are summed up in the same order:
    reproducible=True in `reduction`, the further arguments of reduce-scatter, or in shared memory any algorithm.
    """

    zero_stage = 1

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
        self.arena = Arena(module, ranks.every, device, dtype=dtype, grad_dtype=grad_dtype)
        self.arena.broadcast(ranks.every)
        self.arrays = self.arena.parameters, self.arena.gradients
        units = units_of(self.arena, module, ranks, bucket_mb)
        sharing = OptimizerShard(module, self.arena, units, ranks, make_optimizer, **reduction)
        self.masters, self.optimizer = sharing.masters, sharing.optimizer
        self.gathering, self.across = sharing.gathering, sharing.across
        self.attend([Bucket(plan, set(unit.slices)) for plan, unit in zip(sharing.reducing, units, strict=True)])
        self._reduced = False

    def _begin_backward(self) -> None:
        if self._reduced:
            raise RuntimeError("gradients have been reduced to their owners: zero_grad() before the next backward pass")
        super()._begin_backward()

    def _end_backward(self) -> None:
        super()._end_backward()
        self._reduced = True

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Clear the gradients, in place: the arena has them."""
        self.arena.zero_grad()
        self._reduced = False


class OptimizerShard:
    """Stage 1 of an arena: a rank's masters, and the collectives, `reducing` and `across` to be run in this order.

    Collective.
    """

    def __init__(
        self,
        module: nn.Module,
        arena: Arena,
        units: Sequence[FlatParam],
        ranks: ShardGroups,
        make_optimizer: MakeOptimizer,
        **reduction: Any,
    ):
        self.ranks = ranks
        rank, gradients, asked = ranks.shard.rank, arena.gradients, {"op": "avg", **reduction}
        own = [gradients[unit.chunks[rank]] for unit in units]
        self.reducing = [
            ranks.shard.plan("reduce_scatter", gradients[unit.place], out=chunk, counts=unit.counts, **asked)
            for unit, chunk in zip(units, own, strict=True)
        ]
        self.across = [ranks.replicate.plan("all_reduce", chunk, **asked) for chunk in own] if ranks.replicate else []
        self.gathering = gather_in_place(arena, units, ranks)
        grads = [arena.flat_gradients[unit.chunks[rank]] for unit in units]
        self.masters = masters_in(arena, module, units, rank, grads)
        self.optimizer = make_optimizer(list(self.masters.pieces.values()))

    def update(self) -> None:
        """Update this rank's pieces, and gather all ranks'.  Collective."""
        self.optimizer.step()
        self.gather()

    def gather(self) -> None:
        """Make parameters what their owners' pieces are.  Collective."""
        self.masters.give_parameters()
        run(self.gathering)

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Where the module has all its parameters, as it always has."""
        yield


def units_of(arena: Arena, module: nn.Module, ranks: ShardGroups, bucket_mb: float) -> list[FlatParam]:
    """The buckets of an arena, from its end to its start, of parameters that are trained."""
    buckets = cut_buckets(arena, trained(module), num_bytes(bucket_mb))
    slices = [{name: place for name, place in arena.slices.items() if name in names} for _, names in buckets]
    return [FlatParam.of(part, arena.line, ranks.shard.size) for part in slices]


def gather_in_place(arena: Arena, units: Sequence[FlatParam], ranks: ShardGroups) -> list[Plan]:
    """From the owners' chunks of an arena's parameters, all of them."""
    weights, rank = arena.parameters, ranks.shard.rank
    return [
        ranks.shard.plan("all_gather", weights[unit.chunks[rank]], out=weights[unit.place], counts=unit.counts)
        for unit in units
    ]


def masters_in(
    arena: Arena, module: nn.Module, units: Sequence[FlatParam], rank: int, gradients: Sequence[Tensor]
) -> MasterWeights:
    """Of a rank's chunks of an arena, whose originals go, and of their gradients."""
    params, weights = dict(module.named_parameters()), arena.flat_parameters
    owned = [
        pieces(unit, rank, params, weights[unit.chunks[rank]], own) for unit, own in zip(units, gradients, strict=True)
    ]
    masters = masters_of(owned, arena.originals)
    arena.originals = {}
    return masters
