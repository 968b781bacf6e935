"""What a GPT computes: floating-point operations of one token's forward pass.

Source: as of `models.gpt.flops_per_token`, of which these are the third that is not backward.
"""

from __future__ import annotations

from models.config import GPTConfig


def block_flops(config: GPTConfig) -> int:
    return matrix_flops(config) + attention_flops(config)


def matrix_flops(config: GPTConfig) -> int:
    """Twice the elements of a block's matrices that a token meets."""
    width, kv_width = config.n_embd, config.n_embd // config.n_head * config.num_kv_heads
    mlps = config.experts_per_token if config.num_experts else 1
    return 2 * (width * (width + 2 * kv_width) + width * width + 8 * mlps * width * width + config.num_experts * width)


def attention_flops(config: GPTConfig) -> int:
    """4 d T for scores and values of T tokens."""
    return 4 * config.n_embd * config.block_size


def head_flops(config: GPTConfig) -> int:
    return 2 * config.n_embd * config.vocab_size


def layer_flops(config: GPTConfig) -> list[int]:
    """Of each block, and of the head."""
    return [block_flops(config)] * config.n_layer + [head_flops(config)]
