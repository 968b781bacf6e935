"""ZeRO stage 1: shard optimizer states over data-parallel ranks.

Each bucket of gradients is reduce-scattered: a rank gets the sum of its chunk.  It updates that chunk of the
parameters, and all ranks gather them.  Optimizers update `masters`, the pieces of parameters in the rank's chunks.

Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020,
arXiv 1910.02054, sections 5.1 and 7.
"""

from __future__ import annotations

import collectives
from parallelism.data.averaging import Averaging
from parallelism.data.units import FlatParam
from parallelism.step.actions import FORWARD, Action


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
        own_gradients = [self.arena.gradients[unit.chunks[self.ranks.shard.rank]] for unit in self.units]
        self.shard_weights(self.arena, self.units, own_gradients)
        self._is_reduced = False

    def plans(self, unit: FlatParam, chunk: slice) -> tuple[collectives.Plan, collectives.Plan | None]:
        gradients, replicate = self.arena.gradients, self.groups(unit).replicate
        out, options = gradients[chunk], self.reduction
        plan = self.ranks.shard.plan("reduce_scatter", gradients[unit.span], out=out, counts=unit.counts, **options)
        return plan, replicate.plan("all_reduce", out, **options) if replicate else None

    def before(self, action: Action, following: Action | None) -> None:
        super().before(action, following)
        if self._is_reduced and action.kind != FORWARD:
            raise RuntimeError("gradients have been reduced to their owners: zero_grad() before the next backward pass")

    def finish_reducing(self) -> None:
        super().finish_reducing()
        self._is_reduced = True

    def zero_grad(self) -> None:
        super().zero_grad()
        self._is_reduced = False
