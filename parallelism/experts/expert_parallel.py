"""Expert parallelism: shard a mixture's experts over the ranks of an axis, and replicate its router."""

import math
from functools import partial

import torch
from torch import Tensor, nn

from models.mixture import ExpertLinear, Mixture
from parallelism.buffers import autograd
from parallelism.experts.exchange import ExpertExchange
from parallelism.mesh import listed_divisors
from parallelism.placement import Shard
from parallelism.tensor.layers import SEQ, Axis


class ParallelMixture(Mixture):
    """A mixture whose experts are divided over the ranks of an exchange, and their hidden width over tp.

    Shapes: those of the mixture; (batch, seq/tp, n_embd) if tp splits the sequence.
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


def shard_experts(layer: ExpertLinear, hidden: int, exchange: ExpertExchange | None, tp: Axis) -> None:
    """Keep this rank's shard of a layer's weights; tp divides the dim `hidden`.

    An expert's gradient is the sum over the losses of all ranks of the exchange; scale it to the mean, to match other
    parameters, which are averaged over replicas.
    """
    whole = layer.weight
    if tp.ranks.size > 1:
        layer.weight = tp.local(whole, Shard(hidden, whole.shape[hidden]))
    if exchange:
        layer.weight = Axis(exchange.ranks).local(layer.weight, Shard(0, len(whole)), "ep")
        if layer.weight.requires_grad:
            layer.weight.register_hook(partial(torch.mul, other=1 / exchange.ranks.size))


def check_experts(num_experts: int, ep: int, dp: int) -> None:
    """Raise ValueError, with valid values, if experts cannot be divided over `ep` ranks, which are nested in dp."""
    if ep == 1:
        return
    if not num_experts:
        raise ValueError(f"ep={ep} divides the experts of a mixture: set num_experts to a multiple of {ep}, or ep=1")
    able = listed_divisors(math.gcd(num_experts, dp))
    if num_experts % ep:
        raise ValueError(f"num_experts={num_experts} is not divisible by ep={ep}: use an ep of {able}")
    if dp % ep:
        raise ValueError(f"ep={ep} must divide dp={dp}, within which it lies: use an ep of {able}")
