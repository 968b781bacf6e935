"""Causal attention with grouped heads, of which queries and keys may be normed and rotated."""

import torch
from torch import nn
from torch.nn import functional as F

from models.config import ModelConfig
from models.rotary import rotate, rotation_speeds, rotations, score_factor


class OffsetRMSNorm(nn.RMSNorm):
    """An RMSNorm by `offset` + weight, which makes small weights of large ones.  Source: Gemma's reference code."""

    def __init__(self, width: int, eps: float, offset: float):
        super().__init__(width, eps)
        self.offset = offset
        nn.init.constant_(self.weight, 1 - offset)

    def forward(self, x):
        return F.rms_norm(x, self.normalized_shape, self.weight + self.offset, self.eps)


def make_norm(config: ModelConfig, width: int) -> nn.Module:
    if not config.has_rms_norms:
        return nn.LayerNorm(width, config.norm_eps, bias=config.bias)
    if config.norm_offset:
        return OffsetRMSNorm(width, config.norm_eps, config.norm_offset)
    return nn.RMSNorm(width, config.norm_eps)


class CausalAttention(nn.Module):
    """Causal attention: a position attends to itself and to earlier ones of the same document, or of a `window`.

    Shapes: q (batch, n_head, seq, head_size), k and v (batch, n_kv_head, seq, head_size), documents (batch, seq).
    """

    def __init__(self, dropout: float, window: int | None = None):
        super().__init__()
        self.dropout, self.window = dropout, window

    def forward(self, q, k, v, documents=None):
        mask = self.mask(q.shape[2], q.device, documents)
        dropout, grouped = self.dropout if self.training else 0.0, k.shape[1] < q.shape[1]
        return F.scaled_dot_product_attention(q, k, v, mask, dropout, is_causal=mask is None, enable_gqa=grouped)

    def mask(self, seq, device, documents):
        """Return which keys a query attends to, ([batch, 1,] seq, seq), or None for all up to its own."""
        mask = None
        if documents is not None:
            mask = (documents[:, :, None] == documents[:, None, :]).tril()[:, None]  # (batch, 1, seq, seq)
        if self.window is not None and self.window < seq:
            near = torch.ones(seq, seq, dtype=torch.bool, device=device).tril().triu(1 - self.window)
            mask = near if mask is None else mask & near
        return mask


class Heads(nn.Module):
    """Splits the output of `c_attn` into heads; norms q and k, and rotates them by the tokens' positions.

    Shapes: qkv (batch, seq, (n_head + 2 n_kv_head) head_size), results (batch, heads, seq, head_size).
    """

    def __init__(self, config: ModelConfig, kind: str):
        super().__init__()
        self.head_size, self.head_counts, self.factor = config.head_size, config.head_counts, score_factor(config, kind)
        is_rotated = not config.embeds_positions and kind != "unrotated"
        self.speeds = rotation_speeds(config, kind == "window") if is_rotated else None
        self.has_norms = config.has_qk_norms
        if self.has_norms:
            self.q_norm, self.k_norm = make_norm(config, config.head_size), make_norm(config, config.head_size)

    def forward(self, qkv, positions=None):
        q, k, v = split_heads(qkv, self.head_counts, self.head_size)
        if self.has_norms:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.speeds is not None:
            turns = rotations(q, positions, self.speeds)
            q, k = rotate(q, *turns), rotate(k, *turns)
        return self.scale(q), k, v.clone()  # a view would keep all of qkv alive

    def scale(self, q):
        return q if self.factor == 1 else q * self.factor


def split_heads(qkv, head_counts, head_size):
    """Return q, k and v, with heads in proportion to `head_counts`; a tp rank has fewer.

    Shapes: qkv (batch, seq, heads head_size), results (batch, heads, seq, head_size).
    """
    heads = qkv.unflatten(-1, (-1, head_size)).transpose(1, 2)  # (batch, heads, seq, head_size)
    return heads.split([heads.shape[1] * count // sum(head_counts) for count in head_counts], dim=1)


class SelfAttention(nn.Module):
    """Attention of a block, of one of the kinds of layers."""

    def __init__(self, config: ModelConfig, kind: str = "full"):
        super().__init__()
        self.head_size, self.head_counts = config.head_size, config.head_counts
        if not config.embeds_positions or config.has_qk_norms or score_factor(config, kind) != 1:
            self.heads = Heads(config, kind)
        width, qkv_width = config.n_head * self.head_size, sum(self.head_counts) * self.head_size
        self.c_attn = nn.Linear(config.n_embd, qkv_width, bias=config.bias or config.qkv_bias)
        self.attend = CausalAttention(config.dropout, config.window if kind == "window" else None)
        self.c_proj = nn.Linear(width, config.n_embd, bias=config.bias or config.out_bias)
        self.resid_dropout = nn.Dropout(config.dropout)

    def forward(self, x, positions=None, documents=None):
        qkv = self.c_attn(x)  # (batch, seq, (n_head + 2 n_kv_head) head_size)
        if hasattr(self, "heads"):
            q, k, v = self.heads(qkv, positions)
        else:
            q, k, v = split_heads(qkv, self.head_counts, self.head_size)
        y = self.attend(q, k, v, documents)  # (batch, n_head, seq, head_size)
        return self.resid_dropout(self.c_proj(y.transpose(1, 2).flatten(2)))  # (batch, seq, n_embd)
