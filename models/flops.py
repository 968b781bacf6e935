"""What a model computes: floating-point operations of one token's forward pass.

Source: as of `models.gpt.flops_per_token`, of which these are the third that is not backward.
"""

from __future__ import annotations

from models.config import ModelConfig


def block_flops(config: ModelConfig) -> int:
    return matrix_flops(config) + attention_flops(config)


def matrix_flops(config: ModelConfig) -> int:
    """Twice the elements of a block's matrices that a token meets."""
    width, kv_width = config.n_embd, config.head_size * config.num_kv_heads
    mlps = config.experts_per_token if config.num_experts else 1
    attention = width * (width + 2 * kv_width) + width * width
    return 2 * (attention + mlps * mlp_params(config) + config.num_experts * width)


def mlp_params(config: ModelConfig) -> int:
    """Return the elements of an MLP's matrices."""
    return (3 if config.is_gated else 2) * config.hidden_width * config.n_embd


def attention_flops(config: ModelConfig) -> int:
    """4 d T for scores and values of T tokens."""
    return 4 * config.n_embd * config.block_size


def head_flops(config: ModelConfig) -> int:
    return 2 * config.n_embd * config.vocab_size


def layer_flops(config: ModelConfig) -> list[int]:
    """Of each block, and of the head."""
    return [block_flops(config)] * config.n_layer + [head_flops(config)]
