"""Expert parallelism: shard a mixture's experts over the ranks of an axis, and replicate its router."""

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from parallelism.buffers import autograd
from parallelism.experts.exchange import ExpertExchange
from parallelism.mesh import listed_divisors
from parallelism.placement import SEQ, Axis, Shard


class MixtureLayer(Protocol):
    """A mixture of experts that can be divided, of any class.

    Its forward pass is `dropout(mix(x, *router(x)))`.  `router` returns each token's experts and their weights, and
    `mix` the sum of the experts' results.  `mix` calls `route(experts, num_experts)`, which returns an object with the
    attributes and methods of `ExchangeRouting`.

    Shapes: x and results (batch, seq, width); experts, -1 for none, and weights (batch, seq, choices); in `route`,
    experts (tokens, choices).
    """

    router: Callable[[Tensor], tuple[Tensor, Tensor]]
    dropout: Callable[[Tensor], Tensor]
    route: Callable[[Tensor, int], Any]
    forward: Callable[..., Tensor]

    def mix(self, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor: ...


def shard_mixture(
    mixture: MixtureLayer,
    columns: Iterable[Any],
    rows: Iterable[Any],
    exchange: ExpertExchange | None,
    tp: Axis,
    pieces: Sequence[int] = (1,),
) -> None:
    """Divide a mixture's experts over the ranks of an exchange, and their hidden width over tp, in place.

    Each of the layers `columns` and `rows` has a `weight` (num_experts, in, out).  tp divides the outputs of `columns`
    and the inputs of `rows`; the router is replicated.  Outputs have pieces of relative lengths `pieces`, each divided.

    Shapes: those of the mixture, or (batch, seq/tp, width) if tp splits sequences.
    """
    for dim, layers, lengths in ((2, columns, pieces), (1, rows, (1,))):
        for layer in layers:
            shard_experts(layer, dim, exchange, tp, lengths)
    if exchange:
        mixture.route = exchange.route
    if tp.ranks.size > 1:
        mixture.forward = partial(forward_over_tp, mixture, tp)  # a wrapper module would change parameter names


def forward_over_tp(mixture: MixtureLayer, tp: Axis, x: Tensor) -> Tensor:
    ranks = tp.ranks
    x = autograd.gather(x, ranks, SEQ) if tp.sequence else x  # (batch, seq, width)
    experts, weights = mixture.router(x)  # (batch, seq, choices)
    # (batch, seq, width)
    y = autograd.reduce(mixture.mix(autograd.copy(x, ranks), experts, autograd.copy(weights, ranks)), ranks)
    return mixture.dropout(autograd.split(y, ranks, SEQ) if tp.sequence else y)  # (batch, seq[/tp], width)


def shard_experts(
    layer: Any, hidden: int, exchange: ExpertExchange | None, tp: Axis, pieces: Sequence[int] = (1,)
) -> None:
    """Keep this rank's shard of a layer's weights; tp divides the dim `hidden`, of which each piece is divided.

    An expert's gradient is the sum over the losses of all ranks of the exchange; scale it to the mean, to match other
    parameters, which are averaged over replicas.
    """
    whole = layer.weight
    if tp.ranks.size > 1:
        layer.weight = tp.local(whole, Shard(hidden, whole.shape[hidden], pieces))
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
