"""One decoder, described by its config: GPT-2, Llama and their kin as plain single-device torch code.

Modules and parameters have Hugging Face's names of a GPT-2; training/weights/families.py has those of other families.
"""

import math

import torch
from torch import nn
from torch.nn import functional as F

from models.attention import SelfAttention, make_norm
from models.config import ModelConfig
from models.mixture import Mixture
from models.mlp import MLP


class TransformerBlock(nn.Module):
    """Attention and an MLP, which add to the residual stream; norms are before them, after them, or both."""

    def __init__(self, config: ModelConfig, kind: str = "full"):
        super().__init__()
        before, after = config.norms != "after", config.norms != "before"
        self.ln_1 = make_norm(config, config.n_embd) if before else None
        self.attn = SelfAttention(config, kind)
        self.ln_2 = make_norm(config, config.n_embd) if before else None
        self.mlp = Mixture(config) if config.num_experts else MLP(config)
        self.ln_1_after = make_norm(config, config.n_embd) if after else None
        self.ln_2_after = make_norm(config, config.n_embd) if after else None

    def forward(self, x, positions=None, documents=None):
        x = x + apply_norm(self.attn(apply_norm(x, self.ln_1), positions, documents), self.ln_1_after)
        return x + apply_norm(self.mlp(apply_norm(x, self.ln_2)), self.ln_2_after)


def apply_norm(x, norm):
    return x if norm is None else norm(x)


class Transformer(nn.Module):
    """Embeddings, blocks and the last norm."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.block_size, self.scale = config.block_size, math.sqrt(config.n_embd) if config.scales_embedding else 1
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.wpe = nn.Embedding(config.block_size, config.n_embd) if config.embeds_positions else None
        self.drop = nn.Dropout(config.dropout)
        self.h = nn.ModuleList(TransformerBlock(config, kind) for kind in config.layer_kinds)
        self.ln_f = make_norm(config, config.n_embd)

    def embed(self, tokens, positions=None):
        seq = tokens.shape[1]
        if not 1 <= seq <= self.block_size:
            raise ValueError(f"a sequence of {seq} tokens: pass 1 to block_size={self.block_size}")
        x = self.wte(tokens)  # (batch, seq, n_embd)
        if self.scale != 1:
            x = x * self.scale
        if self.wpe is not None:
            x = x + self.wpe(torch.arange(seq, device=tokens.device) if positions is None else positions)
        return self.drop(x)

    def forward(self, tokens, positions=None, documents=None):
        x = self.embed(tokens, positions)
        for block in self.h:
            x = block(x, positions, documents)
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


class Decoder(nn.Module):
    """A transformer and its head, whose initial weights depend only on the config and the seed.

    Source: Karpathy 2022, nanoGPT, model.py; Touvron et al., "LLaMA: Open and Efficient Foundation Language Models",
    2023, arXiv 2302.13971, section 2.2; grouped heads: Touvron et al., "Llama 2", 2023, arXiv 2307.09288, section 2.2.
    """

    def __init__(self, config: ModelConfig, seed: int = 1337):
        super().__init__()
        self.config = config
        with torch.random.fork_rng(devices=[]):  # layers draw weights from the global generator
            self.transformer = Transformer(config)
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


def flops_per_token(config: ModelConfig, num_params: int, is_frozen: bool = False) -> int:
    """Count the FLOPs of one token, forward and backward: 6 N + 12 L d T, with N parameters in matrix products.

    Those that are frozen, beside which adapters are trained, have no gradients: 4 N.

    N is `num_params` without the experts not chosen, and without an untied embedding; d is the width of all heads, and
    T the tokens to which one attends at most.

    Source: nanoGPT, `GPT.estimate_mfu` in model.py, after Chowdhery et al. 2022 (PaLM), appendix B.
    """
    expert = (3 if config.is_gated else 2) * config.n_embd * config.hidden_width
    idle = max(0, config.num_experts - config.experts_per_token) * expert * config.n_layer
    idle += 0 if config.tied else config.vocab_size * config.n_embd
    windows = [config.window_of(number) or config.block_size for number in range(config.n_layer)]
    attended = sum(min(config.block_size, window) for window in windows)
    return (4 if is_frozen else 6) * (num_params - idle) + 12 * config.n_head * config.head_size * attended
