"""Presets: model shapes by name, and shape, batch and learning rate by depth."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from typing import Any

from collectives.job.settings import check
from models.config import GPTConfig, LlamaConfig, ModelConfig

PRESETS: dict[str, ModelConfig] = {
    "gpt2-tiny": GPTConfig(),
    "gpt2": GPTConfig(50257, 1024, n_layer=12, n_head=12, n_embd=768, bias=True),
    "gpt2-medium": GPTConfig(50257, 1024, n_layer=24, n_head=16, n_embd=1024, bias=True),
    "gpt2-large": GPTConfig(50257, 1024, n_layer=36, n_head=20, n_embd=1280, bias=True),
    "gpt2-xl": GPTConfig(50257, 1024, n_layer=48, n_head=25, n_embd=1600, bias=True),
    "llama-tiny": LlamaConfig(),
    "llama": LlamaConfig(50257, 1024, n_layer=12, n_head=12, n_embd=768),
    "llama-1b": LlamaConfig(
        128256, 8192, 16, 32, 2048, n_kv_head=8, n_hidden=8192, rope_theta=5e5, rope_factor=32.0, tied=True
    ),
    "llama-3b": LlamaConfig(
        128256, 8192, 28, 24, 3072, n_kv_head=8, n_hidden=8192, rope_theta=5e5, rope_factor=32.0, tied=True
    ),
    "llama-8b": LlamaConfig(128256, 8192, 32, 32, 4096, n_kv_head=8, n_hidden=14336, rope_theta=5e5),
}
DEFAULT = "gpt2-tiny"
LR = 3e-3  # of the tiny models
ROPE = ("rope_theta", "rope_factor", "rope_original_length")
MIXTURE = ("num_experts", "experts_per_token", "expert_capacity")
SHAPE = ("n_layer", "n_head", "n_kv_head", "n_embd", "n_hidden", "bias", *ROPE, "norm_eps", "tied")
SET_BY_MODEL = (*SHAPE, "block_size", "lr")
SET_BY_DEPTH = (*SHAPE, "lr", "global_batch_size", "num_micro_batches")
SET_BY_WEIGHTS = ("model", "depth", "vocab_size", "tokenizer", *SHAPE, *MIXTURE)


def fill(settings: Any, shape: ModelConfig | None = None) -> None:
    """Fill settings that are None from the run's `depth`, or else its `model`, or else the `shape` of its weights.

    Raises: ValueError for an unknown model, and a depth out of range.
    """
    if settings.model is None and settings.depth is None and shape is not None:
        settings.model, preset = family_name(shape), shape
    else:
        set_missing(settings, {"model": DEFAULT})
        check(settings, "model", "depth")
        preset = PRESETS[settings.model]
    values = {**vars(preset), "lr": LR, **({} if settings.depth is None else of_depth(settings.depth))}
    values |= {name: getattr(preset, name) for name in MIXTURE}
    del values["vocab_size"]  # determined by the data
    if settings.depth is None:
        values["num_micro_batches"] = 1
    set_missing(settings, values)


def family_name(shape: ModelConfig) -> str:
    """Return the name of a preset of the same family."""
    return "llama" if isinstance(shape, LlamaConfig) else "gpt2"


def set_missing(settings: Any, values: dict[str, Any]) -> None:
    for name, value in values.items():
        if hasattr(settings, name) and getattr(settings, name) is None:
            setattr(settings, name, value)


def of_depth(depth: int) -> dict[str, Any]:
    """Return the shape and learning rate for a depth in blocks; 12 gives nanoGPT's GPT-2 124M.

    The head size is 64; the learning rate is inversely proportional to the root of the width.

    >>> of_depth(12)["n_embd"], of_depth(12)["lr"], of_depth(48)["lr"]
    (768, 0.0006, 0.0003)

    Source: Karpathy 2025, nanochat, scripts/base_train.py (`depth`).
    """
    shape = {"n_layer": depth, "n_head": depth, "n_embd": 64 * depth, "n_kv_head": None, "n_hidden": None}
    return {**shape, "lr": 6e-4 / math.sqrt(depth / 12)}


def samples_of_depth(depth: int, block_size: int) -> int:
    """Return the samples per step, a power of two: about 2^19 tokens at a depth of 12, and in proportion to it.

    >>> samples_of_depth(12, 1024), samples_of_depth(24, 1024)
    (512, 1024)

    Source: Bergsma et al., "Power Lines", 2025, arXiv 2505.13738: the best batch grows with the tokens trained on to
    the power of 0.38; these are in proportion to the parameters, and so to the cube of the depth.
    """
    return 2 ** max(0, round(math.log2(2**19 * depth / 12 / block_size)))


def refuse_other_family(settings: Any) -> None:
    """Raise ValueError for a non-default setting that the model's family lacks."""
    kind = type(PRESETS[settings.model])
    own = {field.name for field in fields(kind)}
    defaults = {field.name: field.default for field in fields(settings)}
    for name in [field.name for other in (GPTConfig, LlamaConfig) for field in fields(other) if field.name not in own]:
        value = getattr(settings, name, None)
        if value is not None and value not in (defaults[name], getattr(kind, name, None)):
            raise ValueError(
                f"{name}={value} is not a setting of model={settings.model}: omit it, or use another model"
            )


def shape_of(settings: Any, vocab_size: int) -> ModelConfig:
    """Return the shape in filled settings; fields that these lack are the model's."""
    preset = PRESETS[settings.model]
    own = {field.name: getattr(settings, field.name) for field in fields(preset) if hasattr(settings, field.name)}
    return replace(preset, **{**own, "vocab_size": vocab_size})
