"""Floating-point operations of a model, per token of a forward pass.

Source: that of `models.gpt.flops_per_token`; the forward pass is a third of it.
"""

from __future__ import annotations

from models.config import ModelConfig

NEWTON_SCHULZ_STEPS = 5


def block_flops(config: ModelConfig) -> int:
    return matrix_flops(config) + attention_flops(config)


def matrix_flops(config: ModelConfig) -> int:
    """Return a block's matrix FLOPs per token: twice the number of elements that a token is multiplied with."""
    width, kv_width = config.n_embd, config.head_size * config.num_kv_heads
    mlps = config.experts_per_token if config.num_experts else 1
    attention = width * (width + 2 * kv_width) + width * width
    return 2 * (attention + mlps * mlp_params(config) + config.num_experts * width)


def mlp_params(config: ModelConfig) -> int:
    """Count the elements of an MLP's matrices."""
    return (3 if config.is_gated else 2) * config.hidden_width * config.n_embd


def attention_flops(config: ModelConfig) -> int:
    """Return attention's FLOPs per token: 4 d T for scores and values of T tokens."""
    return 4 * config.n_embd * config.block_size


def head_flops(config: ModelConfig) -> int:
    return 2 * config.n_embd * config.vocab_size


def layer_flops(config: ModelConfig) -> list[int]:
    """Return the FLOPs of each block and of the head."""
    return [block_flops(config)] * config.n_layer + [head_flops(config)]


def muon_flops(config: ModelConfig, ep: int = 1) -> int:
    """Return Muon's FLOPs per step for a block's matrices, with the experts of one of `ep` ranks."""
    width, kv_width, hidden = config.n_embd, config.head_size * config.num_kv_heads, config.hidden_width
    mlp = (3 if config.is_gated else 2) * orthogonal_flops(width, hidden)
    attention = 2 * orthogonal_flops(width, width) + 2 * orthogonal_flops(width, kv_width)
    router = orthogonal_flops(width, config.num_experts)
    return attention + (config.num_experts // ep or 1) * mlp + router


def orthogonal_flops(rows: int, columns: int) -> int:
    """Return the FLOPs of `models.muon.orthogonal`: per iteration, two products with the matrix and one of squares."""
    short, long = sorted((rows, columns))
    return NEWTON_SCHULZ_STEPS * (4 * short**2 * long + 2 * short**3)
