"""Mixture of experts in place of a block's MLP: router, dispatch, experts, combine.

Source: DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024, arXiv 2412.19437, section 2.1.2 (scores, bias, balance loss
of a sequence); Wang et al., "Auxiliary-Loss-Free Load Balancing Strategy for Mixture-of-Experts", 2024, arXiv
2408.15664 (the bias, and its update by the sign of the load's error); Jiang et al., "Mixtral of Experts", 2024, arXiv
2401.04088, section 2.1 (scores by softmax).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from models.config import ModelConfig
from models.mlp import make_activation

BIAS_STEP = 1e-3  # change of an expert's bias per step
DROPPED = -1  # expert number of a choice that exceeds the capacity


class LocalRouting:
    """Routes of rows to experts, all on this rank, and back; others have the same attributes and methods.

    `counts` is the number of rows of each local expert, and `choices` each row's index among its token's choices.

    >>> routing = LocalRouting(torch.tensor([[1, 0], [1, DROPPED]]), num_experts=2)
    >>> rows = routing.dispatch(torch.tensor([[1.0], [2.0]]))
    >>> rows.tolist(), routing.counts, routing.combine(rows).tolist()
    ([[1.0], [1.0], [2.0]], [1, 2], [[2.0], [2.0]])
    """

    def __init__(self, experts: Tensor, num_experts: int):
        self.num_tokens, num_choices = experts.shape
        choices = experts.flatten()
        order = choices.argsort(stable=True)[(choices == DROPPED).sum() :]
        self.tokens, self.choices = order // num_choices, order % num_choices
        self.counts = choices[order].bincount(minlength=num_experts).tolist()

    def dispatch(self, x: Tensor) -> Tensor:
        """Return the rows of tokens for the local experts, grouped by expert.

        Shapes: x (tokens, width), result (rows, width).
        """
        return x.index_select(0, self.tokens)

    def combine(self, rows: Tensor) -> Tensor:
        """Return the sum of each token's rows, computed in at least float32: the inverse of `dispatch`."""
        wide = torch.promote_types(rows.dtype, torch.float32)
        sums = rows.new_zeros((self.num_tokens, rows.shape[1]), dtype=wide)
        return sums.index_add(0, self.tokens, rows.to(wide)).to(rows.dtype)


class WithLoss(torch.autograd.Function):
    """Identity, whose backward pass also runs that of `loss`, times `scale`."""

    @staticmethod
    def forward(ctx, x: Tensor, loss: Tensor, scale: Any) -> Tensor:  # type: ignore[override]
        ctx.gradient = torch.as_tensor(scale, dtype=loss.dtype, device=loss.device)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient: Tensor):  # type: ignore[override]
        return gradient, ctx.gradient, None


class Router(nn.Module):
    """Chooses each token's experts by scores and a bias, and weighs them by the scores only.

    Scores are sigmoids, or, as in Mixtral, a softmax, whose bias stays 0.

    The backward pass adds each expert's number of tokens to `loads`, from which `update_bias` favours experts with too
    few.  With a capacity, in training an expert takes at most `expert_capacity` x seq x experts_per_token / num_experts
    tokens of a sequence, the first ones.  `balance_loss` is the weight of a loss that penalizes sequences whose tokens
    prefer few experts; it is not part of the model's loss, but adds to the gradients, times `loss_scale`, the factor of
    the model's loss in the backward pass.

    Shapes: x (batch, seq, n_embd); experts and weights (batch, seq, experts_per_token), expert -1 for no expert.
    """

    bias: Tensor
    loads: Tensor

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.num_experts, self.num_choices = config.num_experts, config.experts_per_token
        self.capacity, self.balance_loss = config.expert_capacity, config.balance_loss
        self.has_softmax, self.normalizes = config.router == "softmax", config.normalizes_choices
        self.loss_scale: Any = 1.0
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.n_embd))
        self.register_buffer("bias", torch.zeros(config.num_experts))
        self.register_buffer("loads", torch.zeros(config.num_experts, dtype=torch.float64), persistent=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logits = F.linear(x, self.weight)
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        scores = wide.softmax(-1) if self.has_softmax else wide.sigmoid()  # (batch, seq, num_experts)
        experts = (scores.detach() + self.bias).topk(self.num_choices).indices
        weights = scores.gather(-1, experts)
        if self.normalizes and (self.num_choices > 1 or self.has_softmax):  # of one sigmoid, it would be constant
            weights = weights / weights.sum(-1, keepdim=True)
        if weights.requires_grad:
            if self.balance_loss:
                weights = WithLoss.apply(weights, self.sequence_loss(scores, experts), self.loss_scale)
            weights.register_hook(lambda _: self.count(experts))
        limited = self.capacity is not None and self.training
        return self.within_capacity(experts) if limited else experts, weights

    def sequence_loss(self, scores: Tensor, experts: Tensor) -> Tensor:
        """Return the balance loss: chosen times preferred fractions, summed over experts, averaged over sequences."""
        num_tokens, num_choices = experts.shape[1:]
        load = self.per_expert(experts).sum((1, 2)) * (self.num_experts / (num_choices * num_tokens))
        preference = (scores / scores.sum(-1, keepdim=True)).mean(1)  # (batch, num_experts)
        return self.balance_loss * (load * preference).sum(-1).mean()

    def within_capacity(self, experts: Tensor) -> Tensor:
        """Drop the choices that exceed their expert's capacity, in the order of the sequence."""
        assert self.capacity is not None
        most = math.ceil(self.capacity * experts[0].numel() / self.num_experts)
        counts = self.per_expert(experts).flatten(1, 2).cumsum(1).view(*experts.shape, self.num_experts)
        position = counts.gather(-1, experts[..., None])[..., 0]  # among its expert's choices, from 1
        return experts.masked_fill(position > most, DROPPED)

    def per_expert(self, experts: Tensor) -> Tensor:
        """Return a one-hot encoding of choices.  Shapes: (batch, seq, experts_per_token, num_experts)."""
        return F.one_hot(experts, self.num_experts)

    def count(self, experts: Tensor) -> None:
        self.loads += experts.flatten().bincount(minlength=self.num_experts)

    @torch.no_grad()
    def update_bias(self) -> None:
        """Raise the bias of experts chosen less often than the mean, and lower that of the others; none by softmax."""
        if not self.has_softmax:
            self.bias += BIAS_STEP * (self.loads.mean() - self.loads).sign()
        self.loads.zero_()


class ExpertLinear(nn.Module):
    """A linear layer per expert, without bias; rows are grouped by expert.

    Shapes: weight (num_experts, in, out), rows (rows, in).
    """

    def __init__(self, num_experts: int, num_in: int, num_out: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_experts, num_in, num_out))

    def forward(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        parts = zip(rows.split(list(counts)), self.weight.unbind(), strict=True)
        return torch.cat([part @ weight for part, weight in parts])


class Mixture(nn.Module):
    """Sends each token to the experts chosen by its router, and sums their results by weight."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.router = Router(config)
        columns = config.hidden_width * (2 if config.is_gated else 1)  # of gates and values, if gated
        self.c_fc = ExpertLinear(config.num_experts, config.n_embd, columns)
        self.activation = make_activation(config)
        self.c_proj = ExpertLinear(config.num_experts, config.hidden_width, config.n_embd)
        self.dropout = nn.Dropout(config.dropout)
        self.route: Callable[[Tensor, int], Any] = LocalRouting  # by the choices (tokens, experts_per_token)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.mix(x, *self.router(x)))

    def mix(self, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        routing = self.route(experts.flatten(0, 1), self.router.num_experts)
        rows = routing.dispatch(x.flatten(0, 1))  # (rows, n_embd)
        weighed = routing.dispatch(weights.flatten(0, 1)).gather(1, routing.choices[:, None])  # (rows, 1)
        rows = self.project(self.c_fc(rows, routing.counts), routing.counts)
        return routing.combine((rows * weighed).to(rows.dtype)).view(x.shape)

    def project(self, hidden: Tensor, counts: Sequence[int]) -> Tensor:
        return self.c_proj(self.activation(hidden), counts)


def routers(model: nn.Module) -> Iterator[tuple[str, Router]]:
    """Yield a model's routers and their names."""
    return ((name, module) for name, module in model.named_modules() if isinstance(module, Router))


def scale_losses(routers: Sequence[Router], scale: Any) -> None:
    """Set the factor by which the model's loss is scaled in later backward passes."""
    for router in routers:
        router.loss_scale = scale


def balance(routers: Sequence[Router], sum_up: Callable[[Tensor], Any] = lambda loads: None) -> None:
    """Update each router's bias after a step; `sum_up` sums loads over ranks in place, if there are several."""
    if routers:
        loads = torch.stack([router.loads for router in routers])
        sum_up(loads)
        for router, load in zip(routers, loads, strict=True):
            router.loads.copy_(load)
            router.update_bias()
