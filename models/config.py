"""The shape of a GPT."""

from dataclasses import dataclass


@dataclass(frozen=True)
class GPTConfig:
    vocab_size: int = 256
    block_size: int = 128
    n_layer: int = 4
    n_head: int = 4
    n_embd: int = 192
    dropout: float = 0.0
    bias: bool = False
    n_kv_head: int | None = None  # heads of keys and values, each shared by as many of queries; None: n_head

    def __post_init__(self):
        for name in ("vocab_size", "block_size", "n_layer", "n_head", "n_embd", "n_kv_head"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}={value} must be at least 1")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout={self.dropout} must be at least 0 and below 1")
        if rest := self.n_embd % self.n_head:
            below, above = self.n_embd - rest, self.n_embd - rest + self.n_head
            sizes = f"{below} or {above}" if below else f"{above}"
            raise ValueError(f"n_embd={self.n_embd} can't be split over n_head={self.n_head}: use {sizes}")
        if self.n_head % self.num_kv_heads:
            sizes = ", ".join(str(n) for n in range(1, self.n_head + 1) if self.n_head % n == 0)
            raise ValueError(f"n_head={self.n_head} can't share n_kv_head={self.n_kv_head} evenly: use one of {sizes}")

    @property
    def num_kv_heads(self) -> int:
        return self.n_head if self.n_kv_head is None else self.n_kv_head
