"""ZeRO, stage 1: ranks of data parallelism share the optimizer's states.

Each bucket of gradients is reduced so that a rank gets the sum of its chunk alone.  It updates that chunk of the
parameters, and all gather them.  Optimizers work on `masters`: what of each parameter lies in the rank's chunks.

Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020,
arXiv 1910.02054, sections 5.1 and 7.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from parallelism.buffers.arena import Arena
from parallelism.data.averaging import Averaging
from parallelism.numerics.master_weights import MasterWeights
from parallelism.pipeline.schedule.actions import FORWARD, Action
from parallelism.zero.units import FlatParam, ShardGroups, masters_of, pieces

if TYPE_CHECKING:
    from collectives import Plan
    from parallelism.pipeline.local_parameters import LocalParameters


class ShardedStates(Averaging):
    """Stage 1: each rank has all parameters and gradients, and the optimizer's states of its pieces.

    Gradients accumulate in `arena`, as without ZeRO, until they are reduced; the rest of what a rank has of them is
    then used up, so that they must be cleared before the next backward pass.

    Parameters become those of plain data parallelism, bit for bit where gradients are summed up in the same order:
    reproducible=True in `reduction`, the further arguments of reduce-scatter, or in shared memory any algorithm.
    """

    zero_stage = 1

    def build(self) -> None:
        super().build()
        own, ranks, asked = self.own, self.ranks, self.reduction
        rank, gradients = ranks.shard.rank, self.arena.gradients
        chunks = [gradients[unit.chunks[rank]] for unit in self.units]
        self.reduce_by(
            [
                ranks.shard.plan("reduce_scatter", gradients[unit.place], out=chunk, counts=unit.counts, **asked)
                for unit, chunk in zip(self.units, chunks, strict=True)
            ]
        )
        self.across = [
            replicate.plan("all_reduce", chunk, **asked)
            for unit, chunk in zip(self.units, chunks, strict=True)
            if (replicate := self.groups(unit).replicate)
        ]
        own.tied.bind(gradients, {name: unit.chunks[rank] for unit in self.units for name in unit.slices})
        self.gathering = gather_in_place(self.arena, self.units, ranks)
        own_gradients = [self.arena.flat_gradients[unit.chunks[rank]] for unit in self.units]
        self.masters = masters_in(self.arena, own, self.units, rank, own_gradients)
        self._is_reduced = False

    def before(self, action: Action, following: Action | None) -> None:
        if self._is_reduced and action.kind != FORWARD:
            raise RuntimeError("gradients have been reduced to their owners: zero_grad() before the next backward pass")

    def finish_reducing(self) -> None:
        super().finish_reducing()
        self._is_reduced = True

    def zero_grad(self) -> None:
        super().zero_grad()
        self._is_reduced = False


def gather_in_place(arena: Arena, units: Sequence[FlatParam], ranks: ShardGroups) -> list[Plan]:
    """From the owners' chunks of an arena's parameters, all of them."""
    weights, rank = arena.parameters, ranks.shard.rank
    return [
        ranks.shard.plan("all_gather", weights[unit.chunks[rank]], out=weights[unit.place], counts=unit.counts)
        for unit in units
    ]


def masters_in(
    arena: Arena, own: LocalParameters, units: Sequence[FlatParam], rank: int, gradients: Sequence[Tensor]
) -> MasterWeights:
    """Of a rank's chunks of an arena, whose originals go, and of their gradients."""
    weights = arena.flat_parameters
    owned = [
        pieces(unit, rank, own.params, weights[unit.chunks[rank]], gradient)
        for unit, gradient in zip(units, gradients, strict=True)
    ]
    masters = masters_of(owned, arena.originals)
    arena.originals = {}
    return masters
