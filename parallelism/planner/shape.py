"""Shape of a transformer: the numbers on which the memory and the time of its training depend."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, NamedTuple


@dataclass(frozen=True)
class ModelShape:
    """A transformer's sizes and kind; `of` reads them from a model's configuration of any class.

    A dense MLP has `num_experts` 0.  `tied` models have one matrix for embedding and head; gated MLPs have two matrices
    for their first layer.

    Raises: ValueError if the sizes do not fit together.
    """

    vocab_size: int
    block_size: int  # tokens of a sequence
    n_layer: int
    n_head: int
    n_embd: int  # width of the residual stream
    num_kv_heads: int  # each used by n_head / num_kv_heads query heads
    head_size: int
    hidden_width: int  # of an MLP, or of an expert
    dropout: float
    bias: bool  # of all layers and norms; or else of some:
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    tied: bool
    num_experts: int
    experts_per_token: int
    expert_capacity: float | None  # relative to an expert's mean load; None: no limit
    is_gated: bool
    activation: str
    has_rms_norms: bool
    has_qk_norms: bool
    norms: str  # "before" attention and MLP, "after" them, or "around"
    embeds_positions: bool
    layers: str  # kinds of layers, repeated
    window: int | None  # tokens to which one attends in layers of the kind "window"

    def __post_init__(self):
        width, heads = self.n_embd, self.n_head
        if (rest := width % heads) and self.head_size == width // heads:
            sizes = " or ".join(str(size) for size in (width - rest, width - rest + heads) if size)
            raise ValueError(f"n_embd={width} is not divisible by n_head={heads}: use {sizes}")
        if heads % self.num_kv_heads:
            sizes = ", ".join(str(n) for n in range(1, heads + 1) if heads % n == 0)
            raise ValueError(f"n_head={heads} is not divisible by n_kv_head={self.num_kv_heads}: use one of {sizes}")
        if not self.embeds_positions and self.head_size % 2:
            size = self.head_size
            use = f"n_embd={heads * (size + 1)}" if size == width // heads else f"head_dim={size + 1}"
            raise ValueError(
                f"n_embd={width} and n_head={heads} make heads of {size}, odd, which can't be rotated: use {use}"
            )
        if 0 < self.num_experts < self.experts_per_token:
            raise ValueError(
                f"experts_per_token={self.experts_per_token} is more than num_experts={self.num_experts}: use from 1 "
                f"to {self.num_experts}"
            )

    @classmethod
    def of(cls, config: Any) -> ModelShape:
        """Return the shape of a configuration that has these attributes."""
        return cls(**{field.name: getattr(config, field.name) for field in fields(cls)})


def q_width(model: ModelShape) -> int:
    """Return the width of all heads of queries together."""
    return model.n_head * model.head_size


def kv_width(model: ModelShape) -> int:
    """Return the width of all heads of keys, or of values."""
    return model.num_kv_heads * model.head_size


def attention_span(model: ModelShape, layer: int) -> int:
    """Return the tokens to which one attends at most in a layer."""
    kinds = model.layers.split()
    has_window = model.window is not None and kinds[layer % len(kinds)] == "window"
    return min(model.block_size, model.window or 1) if has_window else model.block_size


class KernelKinds(NamedTuple):
    """The kernels of a model: whether attention keeps no scores, element-wise ones are joined, and the loss is one.

    A fused loss keeps logits in the activations' dtype, and puts their gradients in their place.
    """

    fused_attention: bool = True
    compiled: bool = False
    fused_loss: bool = False
