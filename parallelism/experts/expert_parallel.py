"""Expert parallelism: the experts of a mixture divided over the ranks of an axis, the router on each of them."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from models.mixture import ExpertLinear, Mixture
from parallelism.buffers import autograd
from parallelism.experts.exchange import ExpertExchange
from parallelism.placement import Shard, place, placement_of
from parallelism.tensor.layers import SEQ, Axis


class ParallelMixture(Mixture):
    """A mixture of which each rank of an exchange has some experts, and each rank of tp a shard of their hidden width.

    Shapes: as of the mixture; where tp ranks share the sequence, (batch, seq/tp, n_embd).
    """

    def __init__(self, mixture: Mixture, exchange: ExpertExchange | None, tp: Axis):
        nn.Module.__init__(self)
        self.tp = tp
        self.router, self.dropout = mixture.router, mixture.dropout
        self.c_fc, self.gelu, self.c_proj = mixture.c_fc, mixture.gelu, mixture.c_proj
        self.route = exchange.route if exchange else mixture.route
        shard_experts(self.c_fc, 2, exchange, tp)
        shard_experts(self.c_proj, 1, exchange, tp)

    def forward(self, x: Tensor) -> Tensor:
        ranks, is_split = self.tp.ranks, self.tp.sequence
        if ranks.size == 1:
            return super().forward(x)
        x = autograd.gather(x, ranks, SEQ) if is_split else x
        experts, weights = self.router(x)
        y = autograd.reduce(self.mix(autograd.copy(x, ranks), experts, autograd.copy(weights, ranks)), ranks)
        return self.dropout(autograd.split(y, ranks, SEQ) if is_split else y)


@torch.no_grad()
def shard_experts(layer: ExpertLinear, hidden: int, exchange: ExpertExchange | None, tp: Axis) -> None:
    """Keep this rank's shard of a layer's weights, of which `hidden` is the dim that tp divides.

    The ranks of the exchange compute losses of their own, whose gradients reach the experts as a sum: it becomes the
    mean, as the mean over replicas makes it of other parameters.
    """
    whole = layer.weight
    if tp.ranks.size > 1:
        layer.weight = tp.local(whole, Shard(hidden, whole.shape[hidden]))
    if exchange:
        shard, ranks = Shard(0, len(whole)), exchange.ranks
        own = nn.Parameter(shard.local(layer.weight, ranks.rank, ranks.size).clone(), whole.requires_grad)
        place(own, **{**placement_of(layer.weight), "ep": shard})
        own.register_hook(partial(torch.mul, other=1 / ranks.size))
        layer.weight = own


def check_experts(num_experts: int, ep: int, dp: int) -> None:
    """Refuse experts that cannot be divided over `ep` ranks, which lie in dp.

    Raises: ValueError with what would do.
    """
    if ep == 1:
        return
    if not num_experts:
        raise ValueError(f"ep={ep} divides the experts of a mixture: set num_experts to a multiple of {ep}, or ep=1")
    if num_experts % ep:
        able = ", ".join(str(n) for n in range(1, num_experts + 1) if num_experts % n == 0 == dp % n)
        raise ValueError(f"num_experts={num_experts} is not divisible by ep={ep}: use an ep of {able}")
    if dp % ep:
        able = ", ".join(str(n) for n in range(1, dp + 1) if dp % n == 0 == num_experts % n)
        raise ValueError(f"ep={ep} must divide dp={dp}, within which it lies: use an ep of {able}")
