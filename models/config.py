"""The shape of a GPT."""

from dataclasses import dataclass, field
from typing import Any

from collectives.job.settings import Range, check
from models.ranges import (
    CAPACITY,
    DROPOUT,
    EXPERTS,
    EXPERTS_PER_TOKEN,
    HEADS,
    LAYERS,
    LENGTH,
    LOSS_WEIGHT,
    VOCABULARY,
    WIDTH,
)


def number(default: Any, values: Range) -> Any:
    return field(default=default, metadata={"range": values})


@dataclass(frozen=True)
class GPTConfig:
    vocab_size: int = number(256, VOCABULARY)
    block_size: int = number(128, LENGTH)
    n_layer: int = number(4, LAYERS)
    n_head: int = number(4, HEADS)
    n_embd: int = number(192, WIDTH)
    dropout: float = number(0.0, DROPOUT)
    bias: bool = False
    n_kv_head: int | None = number(None, HEADS)  # of keys and values, each shared by as many of queries; None: n_head
    num_experts: int = number(0, EXPERTS)  # of a mixture in place of each MLP; 0: none
    experts_per_token: int = number(2, EXPERTS_PER_TOKEN)
    expert_capacity: float | None = number(None, CAPACITY)  # times the mean of an expert's tokens; None: no limit
    balance_loss: float = number(0.0, LOSS_WEIGHT)

    def __post_init__(self):
        check(self)
        if rest := self.n_embd % self.n_head:
            below, above = self.n_embd - rest, self.n_embd - rest + self.n_head
            sizes = f"{below} or {above}" if below else f"{above}"
            raise ValueError(f"n_embd={self.n_embd} can't be split over n_head={self.n_head}: use {sizes}")
        if self.n_head % self.num_kv_heads:
            sizes = ", ".join(str(n) for n in range(1, self.n_head + 1) if self.n_head % n == 0)
            raise ValueError(f"n_head={self.n_head} can't share n_kv_head={self.n_kv_head} evenly: use one of {sizes}")
        if 0 < self.num_experts < self.experts_per_token:
            raise ValueError(
                f"experts_per_token={self.experts_per_token} is more than num_experts={self.num_experts}: use from 1 "
                f"to {self.num_experts}"
            )

    @property
    def num_kv_heads(self) -> int:
        return self.n_head if self.n_kv_head is None else self.n_kv_head
