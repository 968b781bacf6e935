"""Model shapes, by family."""

from dataclasses import dataclass, field
from typing import Any, ClassVar

from collectives.job.settings import Range, check

HEADS, WIDTH, LENGTH = Range(1, 2**16), Range(1, 2**20), Range(1, 2**24, unit="tokens")
HIDDEN_UNIT = 64  # a gated MLP's default width is a multiple of this


def number(default: Any, values: Range) -> Any:
    return field(default=default, metadata={"range": values})


@dataclass(frozen=True)
class TransformerConfig:
    """Settings common to all model families."""

    vocab_size: int = number(256, Range(1, 2**20, unit="tokens"))
    block_size: int = number(128, LENGTH)
    n_layer: int = number(4, Range(1, 1000))
    n_head: int = number(4, HEADS)
    n_embd: int = number(192, WIDTH)
    n_kv_head: int | None = number(None, HEADS)  # key and value heads, each used by several query heads; None: n_head
    n_hidden: int | None = number(None, WIDTH)  # hidden width of the MLP; None: 4 n_embd, or 8/3 of it, rounded up

    def __post_init__(self):
        check(self)
        if rest := self.n_embd % self.n_head:
            below, above = self.n_embd - rest, self.n_embd - rest + self.n_head
            sizes = f"{below} or {above}" if below else f"{above}"
            raise ValueError(f"n_embd={self.n_embd} is not divisible by n_head={self.n_head}: use {sizes}")
        if self.n_head % self.num_kv_heads:
            sizes = ", ".join(str(n) for n in range(1, self.n_head + 1) if self.n_head % n == 0)
            raise ValueError(f"n_head={self.n_head} is not divisible by n_kv_head={self.n_kv_head}: use one of {sizes}")

    @property
    def num_kv_heads(self) -> int:
        return self.n_head if self.n_kv_head is None else self.n_kv_head

    @property
    def head_size(self) -> int:
        return self.n_embd // self.n_head


@dataclass(frozen=True)
class GPTConfig(TransformerConfig):
    dropout: float = number(0.0, Range(0, 1, open="below"))
    bias: bool = False
    num_experts: int = number(0, Range(0, 2**14))  # experts of a mixture in place of each MLP; 0: none
    experts_per_token: int = number(2, Range(1, 2**14))
    # Relative to an expert's mean load; None: no limit.
    expert_capacity: float | None = number(None, Range(0, 10**6, open="above"))
    balance_loss: float = number(0.0, Range(0, 100))

    tied: ClassVar[bool] = True
    is_gated: ClassVar[bool] = False
    has_rms_norms: ClassVar[bool] = False
    embeds_positions: ClassVar[bool] = True

    def __post_init__(self):
        super().__post_init__()
        if 0 < self.num_experts < self.experts_per_token:
            raise ValueError(
                f"experts_per_token={self.experts_per_token} is more than num_experts={self.num_experts}: use from 1 "
                f"to {self.num_experts}"
            )

    @property
    def hidden_width(self) -> int:
        """The width of the MLP."""
        return self.n_hidden or 4 * self.n_embd


@dataclass(frozen=True)
class LlamaConfig(TransformerConfig):
    rope_theta: float = number(10000.0, Range(1, 10**12))  # the slowest rotation's period is about 2 pi times this
    rope_factor: float = number(1.0, Range(1, 10**6))  # by which slow rotations are slowed further, for longer contexts
    rope_original_length: int = number(8192, LENGTH)  # before scaling: rotations with longer periods are slow
    norm_eps: float = number(1e-5, Range(0, 1, open="above below"))  # added to a norm's mean square
    tied: bool = False  # head and embedding have the same weights

    is_gated: ClassVar[bool] = True
    has_rms_norms: ClassVar[bool] = True
    embeds_positions: ClassVar[bool] = False
    dropout: ClassVar[float] = 0.0
    bias: ClassVar[bool] = False
    num_experts: ClassVar[int] = 0
    experts_per_token: ClassVar[int] = GPTConfig.experts_per_token
    expert_capacity: ClassVar[None] = None

    def __post_init__(self):
        super().__post_init__()
        if self.head_size % 2:
            raise ValueError(
                f"n_embd={self.n_embd} and n_head={self.n_head} make heads of {self.head_size}, odd, which can't be "
                f"rotated: use n_embd={self.n_head * (self.head_size + 1)}"
            )
        if self.rope_factor == 1 and self.rope_original_length != type(self).rope_original_length:
            raise ValueError(
                f"rope_original_length={self.rope_original_length} has no effect with rope_factor=1: set both, or none"
            )

    @property
    def hidden_width(self) -> int:
        """The width of the MLP.

        >>> LlamaConfig(n_embd=192, n_head=4).hidden_width, LlamaConfig(n_embd=4096, n_head=32).hidden_width
        (512, 10944)
        """
        return self.n_hidden or -(-8 * self.n_embd // (3 * HIDDEN_UNIT)) * HIDDEN_UNIT


ModelConfig = GPTConfig | LlamaConfig
