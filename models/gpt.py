"""GPT-2 as plain single-device torch code, with Hugging Face's names of modules and parameters."""

import math
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from models.config import GPTConfig, ModelConfig
from models.mixture import Mixture


class CausalAttention(nn.Module):
    """Causal attention: a position attends to itself and to earlier ones of the same document.

    Shapes: q (batch, n_head, seq, head_size), k and v (batch, n_kv_head, seq, head_size), documents (batch, seq).
    """

    def __init__(self, dropout: float):
        super().__init__()
        self.dropout = dropout

    def forward(self, q, k, v, documents=None):
        mask = None if documents is None else self.mask(documents)
        dropout, grouped = self.dropout if self.training else 0.0, k.shape[1] < q.shape[1]
        return F.scaled_dot_product_attention(q, k, v, mask, dropout, is_causal=mask is None, enable_gqa=grouped)

    def mask(self, documents):
        same = documents[:, :, None] == documents[:, None, :]  # (batch, seq, seq)
        return same.tril()[:, None]


class CausalSelfAttention(nn.Module):
    def __init__(self, config: GPTConfig):
        super().__init__()
        self.head_size = config.head_size
        self.head_counts = config.n_head, config.num_kv_heads, config.num_kv_heads  # heads of q, k and v in c_attn
        self.c_attn = nn.Linear(config.n_embd, sum(self.head_counts) * self.head_size, bias=config.bias)
        self.attend = CausalAttention(config.dropout)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)
        self.resid_dropout = nn.Dropout(config.dropout)

    def forward(self, x, documents=None):
        qkv = self.c_attn(x)  # (batch, seq, (n_head + 2 n_kv_head) head_size)
        q, k, v = split_heads(qkv, self.head_counts, self.head_size)
        y = self.attend(q, k, v, documents)  # (batch, n_head, seq, head_size)
        y = y.transpose(1, 2).flatten(2)  # (batch, seq, n_embd)
        return self.resid_dropout(self.c_proj(y))


def split_heads(qkv, head_counts, head_size):
    """Return q, k and v, with heads in proportion to `head_counts`; a tp rank has fewer.

    Shapes: qkv (batch, seq, heads head_size), results (batch, heads, seq, head_size).
    """
    heads = qkv.unflatten(-1, (-1, head_size)).transpose(1, 2)  # (batch, heads, seq, head_size)
    return heads.split([heads.shape[1] * count // sum(head_counts) for count in head_counts], dim=1)


class MLP(nn.Module):
    def __init__(self, config: GPTConfig):
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, config.hidden_width, bias=config.bias)
        self.gelu = nn.GELU(approximate="tanh")
        self.c_proj = nn.Linear(config.hidden_width, config.n_embd, bias=config.bias)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x):
        x = self.c_fc(x)  # (batch, seq, hidden_width)
        return self.dropout(self.project(x))  # (batch, seq, n_embd)

    def project(self, x):
        return self.c_proj(self.gelu(x))


class TransformerBlock(nn.Module):
    def __init__(self, config: GPTConfig):
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.attn = CausalSelfAttention(config)
        self.ln_2 = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.mlp = Mixture(config) if config.num_experts else MLP(config)

    def forward(self, x, documents=None):
        x = x + self.attn(self.ln_1(x), documents)
        return x + self.mlp(self.ln_2(x))


class Transformer(nn.Module):
    def __init__(self, config: GPTConfig):
        super().__init__()
        self.block_size = config.block_size
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.wpe = nn.Embedding(config.block_size, config.n_embd)
        self.drop = nn.Dropout(config.dropout)
        self.h = nn.ModuleList(TransformerBlock(config) for _ in range(config.n_layer))
        self.ln_f = nn.LayerNorm(config.n_embd, bias=config.bias)

    def embed(self, tokens, positions=None):
        seq = tokens.shape[1]
        if not 1 <= seq <= self.block_size:
            raise ValueError(f"a sequence of {seq} tokens: pass 1 to block_size={self.block_size}")
        if positions is None:
            positions = torch.arange(seq, device=tokens.device)  # (seq,)
        return self.drop(self.wte(tokens) + self.wpe(positions))  # (batch, seq, n_embd)

    def forward(self, tokens, positions=None, documents=None):
        x = self.embed(tokens, positions)
        for block in self.h:
            x = block(x, documents)
        return self.ln_f(x)


class CrossEntropy(nn.Module):
    """Mean cross entropy per token in nats, in at least float32, except where targets are `ignored`; 0 if all are."""

    ignored = -100

    def forward(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return self.total(logits, targets) / (targets != self.ignored).sum().clamp(min=1)

    def total(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        logits = logits.flatten(0, 1)  # (batch x seq, vocab_size)
        return F.cross_entropy(logits, targets.flatten(), ignore_index=self.ignored, reduction="sum")


def init_weights(model: nn.Module, n_layer: int, seed: int) -> None:
    """Draw weights with std 0.02, or 0.02 / sqrt(2 n_layer) for projections that add to the residual stream."""
    generator = torch.Generator().manual_seed(seed)
    for name, p in model.named_parameters():
        if p.dim() >= 2:
            num_residuals = 2 * n_layer if name.endswith("c_proj.weight") else 1
            nn.init.normal_(p, std=0.02 / math.sqrt(num_residuals), generator=generator)
        elif name.endswith("bias"):
            nn.init.zeros_(p)


class LanguageModel(nn.Module):
    """A transformer and its head, whose initial weights depend only on the config and the seed.

    `kind` is the class of the transformer; its embeddings, blocks and last norm are `wte`, `h` and `ln_f`.
    """

    kind: Any

    def __init__(self, config: ModelConfig, seed: int = 1337):
        super().__init__()
        self.config = config
        with torch.random.fork_rng(devices=[]):  # layers draw weights from the global generator
            self.transformer = self.kind(config)
            self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        if config.tied:
            self.lm_head.weight = self.transformer.wte.weight
        self.loss = CrossEntropy()
        init_weights(self, config.n_layer, seed)

    def forward(
        self,
        tokens: torch.Tensor,
        targets: torch.Tensor | None = None,
        positions: torch.Tensor | None = None,
        documents: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the logits and, given targets, the mean cross entropy in nats.

        `positions` are 0, 1, ... by default.  `documents` are the tokens' document numbers in packed sequences;
        documents do not attend to each other.

        Shapes: tokens, targets and documents (batch, seq), positions (seq) or (batch, seq), logits (batch, seq,
        vocab_size).
        """
        logits = self.lm_head(self.transformer(tokens, positions, documents))
        return logits, None if targets is None else self.loss(logits, targets)

    def num_params(self) -> int:
        """Count parameters as nanoGPT does: tied embeddings once, and position embeddings not at all."""
        return sum(p.numel() for name, p in self.named_parameters() if name != "transformer.wpe.weight")


class GPT(LanguageModel):
    """A GPT-2.

    Source: Karpathy 2022, nanoGPT, model.py.
    """

    config: GPTConfig
    kind = Transformer


def flops_per_token(config: ModelConfig, num_params: int) -> int:
    """Count the FLOPs of one token, forward and backward: 6 N + 12 L d T, with N parameters in matrix products.

    N is `num_params` without the experts not chosen, and without an untied embedding.

    Source: nanoGPT, `GPT.estimate_mfu` in model.py, after Chowdhery et al. 2022 (PaLM), appendix B.
    """
    expert = 2 * config.n_embd * config.hidden_width
    idle = max(0, config.num_experts - config.experts_per_token) * expert * config.n_layer
    idle += 0 if config.tied else config.vocab_size * config.n_embd
    return 6 * (num_params - idle) + 12 * config.n_layer * config.n_embd * config.block_size
