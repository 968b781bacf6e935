"""Floating-point operations of a model, per token of a forward pass.

Source: Chowdhery et al., "PaLM", 2022, appendix B; the forward pass is a third of a step.
"""

from __future__ import annotations

from functools import lru_cache

from parallelism.planner.shape import ModelShape, attention_span, kv_width, q_width

NEWTON_SCHULZ_STEPS = 5  # of Muon, as of the source in training/optim/muon.py


def block_flops(model: ModelShape, layer: int | None = None) -> int:
    """Return a block's FLOPs per token in a layer, or the mean of all."""
    return matrix_flops(model) + attention_flops(model, layer)


def matrix_flops(model: ModelShape) -> int:
    """Return a block's matrix FLOPs per token: twice the number of elements that a token is multiplied with."""
    mlps = model.experts_per_token if model.num_experts else 1
    return 2 * (attention_params(model) + mlps * mlp_params(model) + model.num_experts * model.n_embd)


def attention_params(model: ModelShape) -> int:
    """Count the elements of attention's matrices."""
    return 2 * model.n_embd * (q_width(model) + kv_width(model))


def mlp_params(model: ModelShape) -> int:
    """Count the elements of an MLP's matrices."""
    return (3 if model.is_gated else 2) * model.hidden_width * model.n_embd


@lru_cache(maxsize=4096)
def attention_flops(model: ModelShape, layer: int | None = None) -> int:
    """Return attention's FLOPs per token in a layer, or the mean of all: 4 d T for scores and values of T tokens."""
    layers = range(model.n_layer) if layer is None else [layer]
    return 4 * q_width(model) * sum(attention_span(model, each) for each in layers) // len(layers)


def head_flops(model: ModelShape) -> int:
    return 2 * model.n_embd * model.vocab_size


def layer_flops(model: ModelShape) -> list[int]:
    """Return the FLOPs of each block and of the head."""
    return [*(block_flops(model, layer) for layer in range(model.n_layer)), head_flops(model)]


def muon_flops(model: ModelShape, ep: int = 1) -> int:
    """Return Muon's FLOPs per step for a block's matrices, with the experts of one of `ep` ranks."""
    width, hidden = model.n_embd, model.hidden_width
    mlp = (3 if model.is_gated else 2) * orthogonal_flops(width, hidden)
    attention = 2 * orthogonal_flops(width, q_width(model)) + 2 * orthogonal_flops(width, kv_width(model))
    router = orthogonal_flops(width, model.num_experts)
    return attention + (model.num_experts // ep or 1) * mlp + router


def orthogonal_flops(rows: int, columns: int) -> int:
    """Return the FLOPs of Muon's orthogonalization: per iteration, two products with the matrix and one of squares."""
    short, long = sorted((rows, columns))
    return NEWTON_SCHULZ_STEPS * (4 * short**2 * long + 2 * short**3)
