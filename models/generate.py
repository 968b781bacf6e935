"""Text generation, token by token, with a cache of keys and values."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from models.decoder import Decoder


class CachedAttention(nn.Module):
    """Attention with a cache of keys and values; its input is only the new tokens.

    Shapes: q (batch, n_head, seq, head_size), k and v (batch, n_kv_head, seq, head_size).
    """

    def __init__(self, attend: nn.Module, block_size: int):
        super().__init__()
        self.attend, self.block_size = attend, block_size
        self.length = 0  # cached tokens

    def forward(self, q, k, v, documents=None):
        start, self.length = self.length, self.length + k.shape[2]
        if start == 0:
            self.keys, self.values = (x.new_empty((*x.shape[:2], self.block_size, x.shape[3])) for x in (k, v))
        self.keys[:, :, start : self.length], self.values[:, :, start : self.length] = k, v
        if start == 0:
            return self.attend(q, k, v, documents)
        window = getattr(self.attend, "window", None) or self.length
        seen = slice(max(0, self.length - window), self.length)
        cache = self.keys[:, :, seen], self.values[:, :, seen]
        return F.scaled_dot_product_attention(q, *cache, enable_gqa=k.shape[1] < q.shape[1])


@contextmanager
def caching(model: Decoder) -> Iterator[list[CachedAttention]]:
    """Let a model's attention cache keys and values in this context."""
    attentions: list[Any] = [block.get_submodule("attn") for block in model.transformer.h]
    caches = [CachedAttention(attention.attend, model.config.block_size) for attention in attentions]
    for attention, cache in zip(attentions, caches, strict=True):
        attention.attend = cache
    try:
        yield caches
    finally:
        for attention, cache in zip(attentions, caches, strict=True):
            attention.attend = cache.attend


@torch.no_grad()
def generate(
    model: Decoder,
    tokens: Tensor,
    num_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    generator: torch.Generator | None = None,
    agree: Callable[[Tensor], Tensor] = lambda token: token,
) -> Tensor:
    """Append `num_tokens` sampled tokens, one by one.  Call in eval mode, as dropout is active otherwise.

    Beyond the model's block_size, each token shifts the positions, and the whole window is recomputed.  If several
    ranks compute the model, `agree` broadcasts the drawn token.

    Shapes: tokens (batch, seq), result (batch, seq + num_tokens).
    """
    check(temperature, top_k, top_p)
    with caching(model) as caches:
        for _ in range(num_tokens):
            start, length = caches[0].length, tokens.shape[1]
            if start == 0 or length > model.config.block_size:
                for cache in caches:
                    cache.length = 0
                start = max(0, length - model.config.block_size)
                logits, _ = model.forward(tokens[:, start:])  # not compiled, as the length changes
            else:
                logits, _ = model.forward(
                    tokens[:, start:], positions=torch.arange(start, length, device=tokens.device)
                )
            token = agree(draw(logits[:, -1].float(), temperature, top_k, top_p, generator))
            tokens = torch.cat((tokens, token), dim=1)
    return tokens


def check(temperature: float, top_k: int | None, top_p: float | None) -> None:
    if not 0 < temperature < math.inf:
        raise ValueError(f"temperature={temperature} must be positive: for the likeliest token, top_k=1")
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k={top_k} must be at least 1: to sample from all tokens, top_k=None")
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"top_p={top_p} must be above 0 and at most 1: to sample from all tokens, top_p=None")


def draw(
    logits: Tensor, temperature: float, top_k: int | None, top_p: float | None, generator: torch.Generator | None
) -> Tensor:
    """Draw a token among the `top_k` likeliest, and of these among the fewest with `top_p` of the probability.

    Source of the latter: Holtzman et al., "The Curious Case of Neural Text Degeneration", 2020, section 3.1.
    Shapes: logits (batch, vocab_size), result (batch, 1).

    Raises: ValueError for logits that are not finite.
    """
    if not bool(logits.isfinite().all()):
        raise ValueError(
            "the model's logits are not finite, so no token can be drawn: the training has diverged, use other weights"
        )
    logits = logits / temperature
    if top_k is not None:
        least = logits.topk(min(top_k, logits.shape[-1])).values[:, -1:]  # (batch, 1)
        logits = logits.masked_fill(logits < least, -math.inf)
    if top_p is not None:
        ordered, indices = logits.softmax(-1).sort(descending=True, stable=True)
        unlikely = ordered.cumsum(-1) - ordered >= top_p
        logits = logits.masked_fill(torch.zeros_like(unlikely).scatter(-1, indices, unlikely), -math.inf)
    return torch.multinomial(logits.softmax(-1), 1, generator=generator)
