"""Rotary positions: heads of queries and keys are rotated by the positions of their tokens."""

import math

import torch

from models.config import ModelConfig

FAST_TURNS = {"llama3": 4, "yarn": 32}  # Rotations with at least so many turns in rope_original_length are fast.


def rotation_speeds(config: ModelConfig, is_local: bool = False) -> torch.Tensor:
    """Return each pair's rotation in radians per position, float64: theta^(-2i / head_size).

    `rope_factor` divides all of them (linear), or slow ones, with at most one turn in `rope_original_length` tokens;
    fast ones are unchanged, and those between interpolated: by turns (llama3), or by their number (yarn).  Local layers
    have a base of their own, and no factor.

    Source: Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021, arXiv 2104.09864, section
    3.2.2; llama3: Llama 3.1's reference code (meta-llama/llama-models, `apply_scaling`); linear: Chen et al., 2023,
    arXiv 2306.15595; yarn: Peng et al., 2023, arXiv 2309.00071, section 3.2, with bounds at whole numbers.

    Shape: (head_size / 2).
    """
    half = config.head_size // 2
    local = config.local_rope_theta if is_local else None
    numbers = torch.arange(half, device="cpu", dtype=torch.float64)
    speeds = (local or config.rope_theta) ** (numbers / -half)
    if local or config.rope_factor == 1:
        return speeds
    if config.rope_scaling == "linear":
        return speeds / config.rope_factor
    most = FAST_TURNS[config.rope_scaling]
    if config.rope_scaling == "yarn":
        # numbers of the last fast and of the first slow rotation
        first, last = (
            half * math.log(config.rope_original_length / (turns * 2 * math.pi)) / math.log(config.rope_theta)
            for turns in (most, 1)
        )
        first, last = max(math.floor(first), 0), min(math.ceil(last), 2 * half - 1)
        fast = 1 - ((numbers - first) / max(last - first, 1e-3)).clamp(0, 1)
    else:
        turns = config.rope_original_length * speeds / (2 * math.pi)
        fast = ((turns - 1) / (most - 1)).clamp(0, 1)
    return speeds * (fast + (1 - fast) / config.rope_factor)


def score_factor(config: ModelConfig, kind: str) -> float:
    """Return the factor of queries for the scale of a layer's scores; those of yarn grow with the logarithm.

    Source: Peng et al., 2023, arXiv 2309.00071, section 3.4.
    """
    factor = 1.0 if config.attention_scale is None else config.attention_scale * math.sqrt(config.head_size)
    is_scaled = kind == "full" or (kind == "window" and config.local_rope_theta is None)
    if config.rope_scaling == "yarn" and config.rope_factor > 1 and is_scaled and not config.embeds_positions:
        factor *= (0.1 * math.log(config.rope_factor) + 1) ** 2
    return factor


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
