"""Llama as plain single-device torch code: a GPT with RMSNorm, rotary positions and a gated MLP, without biases.

Modules and parameters are named as those of `models.gpt`; training/weights/hf_llama.py has Hugging Face's names.
"""

import math

import torch
from torch import nn
from torch.nn import functional as F

from models.config import LlamaConfig
from models.gpt import CausalAttention, LanguageModel, split_heads

FAST_TURNS = 4  # Rotations with at least so many turns in rope_original_length tokens are fast; with at most one, slow.


def rotation_speeds(config: LlamaConfig) -> torch.Tensor:
    """Return each pair's rotation in radians per position, float64: theta^(-2i / head_size).

    Slow rotations are divided by rope_factor, fast ones unchanged, and those between interpolated.

    Source: Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021, arXiv 2104.09864, section
    3.2.2; the factor: Llama 3.1's reference code (meta-llama/llama-models, `apply_scaling`).

    Shape: (head_size / 2).
    """
    half = config.head_size // 2
    speeds = config.rope_theta ** (torch.arange(half, device="cpu", dtype=torch.float64) / -half)
    turns = config.rope_original_length * speeds / (2 * math.pi)
    fast = ((turns - 1) / (FAST_TURNS - 1)).clamp(0, 1)
    return speeds * (fast + (1 - fast) / config.rope_factor)


def rotations(
    x: torch.Tensor, positions: torch.Tensor | None, speeds: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the cosines and sines of position x speed; positions are 0, 1, ... by default.

    Shapes: x (batch, heads, seq, head_size), positions (seq) or (batch, seq), speeds (head_size/2), results ([batch,]
    seq, 1, head_size/2).
    """
    if positions is None:
        positions = torch.arange(x.shape[2], device=x.device)
    angles = positions[..., None, None] * speeds.to(x.device, torch.promote_types(x.dtype, torch.float32))
    return angles.cos(), angles.sin()


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate elements i and i + head_size/2 of each head as one point, the pairing of Hugging Face's Llama.

    Products of queries and keys then depend on the distance of their positions.

    Shapes: x and result (batch, heads, seq, head_size), with a token's heads contiguous in memory.
    """
    first, second = x.transpose(1, 2).chunk(2, dim=-1)  # (batch, seq, heads, head_size/2)
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return rotated.to(x.dtype).transpose(1, 2)


class RotaryHeads(nn.Module):
    """Splits the output of `c_attn` into heads, and rotates q and k by the tokens' positions.

    Shapes: qkv (batch, seq, (n_head + 2 n_kv_head) head_size), results (batch, heads, seq, head_size).
    """

    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.head_size, self.speeds = config.head_size, rotation_speeds(config)
        self.head_counts = config.n_head, config.num_kv_heads, config.num_kv_heads  # heads of q, k and v

    def forward(self, qkv, positions=None):
        q, k, v = split_heads(qkv, self.head_counts, self.head_size)
        turns = rotations(q, positions, self.speeds)
        return rotate(q, *turns), rotate(k, *turns), v.clone()  # a view would keep all of qkv alive


class RotaryAttention(nn.Module):
    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.heads = RotaryHeads(config)
        self.c_attn = nn.Linear(config.n_embd, sum(self.heads.head_counts) * config.head_size, bias=False)
        self.attend = CausalAttention(dropout=0.0)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=False)

    def forward(self, x, positions=None, documents=None):
        q, k, v = self.heads(self.c_attn(x), positions)
        y = self.attend(q, k, v, documents)  # (batch, n_head, seq, head_size)
        return self.c_proj(y.transpose(1, 2).flatten(2))  # (batch, seq, n_embd)


class Gate(nn.Module):
    """Multiplies one half of x by the SiLU of the other.  Shapes: x (..., 2 width), result (..., width)."""

    def forward(self, x):
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate) * up


class SwiGLU(nn.Module):
    """A gated MLP.

    Source: Shazeer, "GLU Variants Improve Transformer", 2020, arXiv 2002.05202.
    """

    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, 2 * config.hidden_width, bias=False)  # gates and values
        self.gate = Gate()
        self.c_proj = nn.Linear(config.hidden_width, config.n_embd, bias=False)

    def forward(self, x):
        return self.project(self.c_fc(x))  # (batch, seq, n_embd)

    def project(self, x):
        return self.c_proj(self.gate(x))


class LlamaBlock(nn.Module):
    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.ln_1 = nn.RMSNorm(config.n_embd, config.norm_eps)
        self.attn = RotaryAttention(config)
        self.ln_2 = nn.RMSNorm(config.n_embd, config.norm_eps)
        self.mlp = SwiGLU(config)

    def forward(self, x, positions=None, documents=None):
        x = x + self.attn(self.ln_1(x), positions, documents)
        return x + self.mlp(self.ln_2(x))


class LlamaTransformer(nn.Module):
    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.block_size = config.block_size
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.h = nn.ModuleList(LlamaBlock(config) for _ in range(config.n_layer))
        self.ln_f = nn.RMSNorm(config.n_embd, config.norm_eps)

    def embed(self, tokens, positions=None):
        if not 1 <= tokens.shape[1] <= self.block_size:
            raise ValueError(f"a sequence of {tokens.shape[1]} tokens: pass 1 to block_size={self.block_size}")
        return self.wte(tokens)  # (batch, seq, n_embd)

    def forward(self, tokens, positions=None, documents=None):
        x = self.embed(tokens)
        for block in self.h:
            x = block(x, positions, documents)
        return self.ln_f(x)


class Llama(LanguageModel):
    """A Llama.

    Source: Touvron et al., "LLaMA: Open and Efficient Foundation Language Models", 2023, arXiv 2302.13971, section 2.2;
    grouped heads: Touvron et al., "Llama 2", 2023, arXiv 2307.09288, section 2.2.
    """

    config: LlamaConfig
    kind = LlamaTransformer
