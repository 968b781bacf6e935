"""ZeRO stage 1: shard optimizer states over data-parallel ranks.

Each bucket of gradients is reduce-scattered: a rank gets the sum of its chunk.  It updates that chunk of the
parameters, and all ranks gather them.  Optimizers update `masters`, the pieces of parameters in the rank's chunks.

Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020,
arXiv 1910.02054, sections 5.1 and 7.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

import collectives
from parallelism.buffers.arena import Arena
from parallelism.data.averaging import Averaging
from parallelism.data.replica import Replica
from parallelism.numerics.master_weights import MasterWeights
from parallelism.pipeline.schedule.actions import FORWARD, Action
from parallelism.zero.units import FlatParam, masters_of


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
        own_gradients = [self.arena.flat_gradients[unit.chunks[self.ranks.shard.rank]] for unit in self.units]
        self.gathering, self.masters = shard_weights(self, self.arena, self.units, own_gradients)
        self._is_reduced = False

    def plans(self, unit: FlatParam, chunk: slice) -> tuple[collectives.Plan, collectives.Plan | None]:
        gradients, replicate = self.arena.gradients, self.groups(unit).replicate
        out, options = gradients[chunk], self.reduction
        plan = self.ranks.shard.plan("reduce_scatter", gradients[unit.place], out=out, counts=unit.counts, **options)
        return plan, replicate.plan("all_reduce", out, **options) if replicate else None

    def before(self, action: Action, following: Action | None) -> None:
        if self._is_reduced and action.kind != FORWARD:
            raise RuntimeError("gradients have been reduced to their owners: zero_grad() before the next backward pass")

    def finish_reducing(self) -> None:
        super().finish_reducing()
        self._is_reduced = True

    def zero_grad(self) -> None:
        super().zero_grad()
        self._is_reduced = False


def shard_weights(
    replica: Replica, arena: Arena, units: Sequence[FlatParam], gradients: Sequence[Tensor]
) -> tuple[list[collectives.Plan], MasterWeights]:
    """Return the plans that gather an arena's parameters from their owners' chunks, and this rank's master weights.

    `gradients` are those of its chunks.  The arena's originals are dropped.  Collective.
    """
    shard, weights = replica.ranks.shard, arena.parameters
    chunks = [unit.chunks[shard.rank] for unit in units]
    gathering = [
        shard.plan("all_gather", weights[chunk], out=weights[unit.place], counts=unit.counts)
        for unit, chunk in zip(units, chunks, strict=True)
    ]
    own = [arena.flat_parameters[chunk] for chunk in chunks]
    masters = masters_of(units, shard.rank, replica.params, own, gradients, arena.originals)
    arena.originals = {}
    return gathering, masters
