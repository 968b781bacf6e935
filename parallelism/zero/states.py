"""ZeRO stage 1: shard optimizer states over data-parallel ranks.

Each bucket of gradients is reduce-scattered: a rank gets the sum of its chunk.  It updates that chunk of the
parameters, and all ranks gather them.  Optimizers update `masters`, the pieces of parameters in the rank's chunks.

Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020,
arXiv 1910.02054, sections 5.1 and 7.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

import collectives
from parallelism.buffers.arena import Arena
from parallelism.data.averaging import Averaging
from parallelism.numerics.master_weights import MasterWeights
from parallelism.pipeline.local_parameters import LocalParameters
from parallelism.pipeline.schedule.actions import FORWARD, Action
from parallelism.zero.units import FlatParam, ShardGroups, masters_of


class ShardedStates(Averaging):
    """Stage 1: parameters and gradients are replicated; optimizer states are sharded.

    Gradients accumulate in `arena`, as without ZeRO, until they are reduced, which invalidates all but the rank's
    chunks; they must therefore be cleared before the next backward pass.

    Parameters are bitwise those of plain data parallelism if gradients are summed in the same order: with
    reproducible=True in `reduction`, the further arguments of reduce-scatter, or in shared memory with any algorithm.
    """

    zero_stage = 1

    def build(self) -> None:
        super().build()
        own, rank, gradients = self.own, self.ranks.shard.rank, self.arena.gradients
        self.reduce_by([self._plans(unit, gradients[unit.chunks[rank]]) for unit in self.units])
        own.tied.bind(gradients, {name: unit.chunks[rank] for unit in self.units for name in unit.slices})
        self.gathering = gather_in_place(self.arena, self.units, self.ranks)
        own_gradients = [self.arena.flat_gradients[unit.chunks[rank]] for unit in self.units]
        self.masters = masters_in(self.arena, own, self.units, rank, own_gradients)
        self._is_reduced = False

    def _plans(self, unit: FlatParam, chunk: Any) -> tuple[collectives.Plan, collectives.Plan | None]:
        """Bind the reduction of a unit to its owners' chunks, and that of a chunk over its replicas."""
        gradients, replicate = self.arena.gradients[unit.place], self.groups(unit).replicate
        plan = self.ranks.shard.plan("reduce_scatter", gradients, out=chunk, counts=unit.counts, **self.reduction)
        return plan, replicate.plan("all_reduce", chunk, **self.reduction) if replicate else None

    def before(self, action: Action, following: Action | None) -> None:
        if self._is_reduced and action.kind != FORWARD:
            raise RuntimeError("gradients have been reduced to their owners: zero_grad() before the next backward pass")

    def finish_reducing(self) -> None:
        super().finish_reducing()
        self._is_reduced = True

    def zero_grad(self) -> None:
        super().zero_grad()
        self._is_reduced = False


def gather_in_place(arena: Arena, units: Sequence[FlatParam], ranks: ShardGroups) -> list[collectives.Plan]:
    """Bind the plans that gather an arena's parameters from their owners' chunks."""
    weights, rank = arena.parameters, ranks.shard.rank
    return [
        ranks.shard.plan("all_gather", weights[unit.chunks[rank]], out=weights[unit.place], counts=unit.counts)
        for unit in units
    ]


def masters_in(
    arena: Arena, own: LocalParameters, units: Sequence[FlatParam], rank: int, gradients: Sequence[Tensor]
) -> MasterWeights:
    """Return the master weights of a rank's chunks of an arena, and drop the arena's originals."""
    weights = [arena.flat_parameters[unit.chunks[rank]] for unit in units]
    masters = masters_of(units, rank, own.params, weights, gradients, arena.originals)
    arena.originals = {}
    return masters
