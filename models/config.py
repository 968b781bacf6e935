"""Model shapes, by family."""

from dataclasses import dataclass
from typing import ClassVar

HIDDEN_UNIT = 64  # a gated MLP's default width is a multiple of this


@dataclass(frozen=True)
class TransformerConfig:
    """Settings common to all model families."""

    vocab_size: int = 256
    block_size: int = 128
    n_layer: int = 4
    n_head: int = 4
    n_embd: int = 192  # a multiple of n_head
    n_kv_head: int | None = None  # key and value heads, each used by several query heads; None: n_head
    n_hidden: int | None = None  # hidden width of the MLP; None: 4 n_embd, or 8/3 of it, rounded up

    @property
    def num_kv_heads(self) -> int:
        return self.n_head if self.n_kv_head is None else self.n_kv_head

    @property
    def head_size(self) -> int:
        return self.n_embd // self.n_head


@dataclass(frozen=True)
class GPTConfig(TransformerConfig):
    dropout: float = 0.0
    bias: bool = False
    num_experts: int = 0  # experts of a mixture in place of each MLP; 0: none
    experts_per_token: int = 2
    expert_capacity: float | None = None  # relative to an expert's mean load; None: no limit
    balance_loss: float = 0.0

    tied: ClassVar[bool] = True
    is_gated: ClassVar[bool] = False
    has_rms_norms: ClassVar[bool] = False
    embeds_positions: ClassVar[bool] = True

    @property
    def hidden_width(self) -> int:
        """The width of the MLP."""
        return self.n_hidden or 4 * self.n_embd


@dataclass(frozen=True)
class LlamaConfig(TransformerConfig):
    rope_theta: float = 10000.0  # the slowest rotation's period is about 2 pi times this
    rope_factor: float = 1.0  # by which slow rotations are slowed further, for longer contexts
    rope_original_length: int = 8192  # before scaling: rotations with longer periods are slow
    norm_eps: float = 1e-5  # added to a norm's mean square
    tied: bool = False  # head and embedding have the same weights

    is_gated: ClassVar[bool] = True
    has_rms_norms: ClassVar[bool] = True
    embeds_positions: ClassVar[bool] = False
    dropout: ClassVar[float] = 0.0
    bias: ClassVar[bool] = False
    num_experts: ClassVar[int] = 0
    experts_per_token: ClassVar[int] = GPTConfig.experts_per_token
    expert_capacity: ClassVar[None] = None

    @property
    def hidden_width(self) -> int:
        """The width of the MLP.

        >>> LlamaConfig(n_embd=192, n_head=4).hidden_width, LlamaConfig(n_embd=4096, n_head=32).hidden_width
        (512, 10944)
        """
        return self.n_hidden or -(-8 * self.n_embd // (3 * HIDDEN_UNIT)) * HIDDEN_UNIT


ModelConfig = GPTConfig | LlamaConfig
