"""Presets: model shapes by name, and shape, batch and learning rate by depth."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, NamedTuple

from collectives.job.settings import check
from parallelism.planner.shape import ModelShape

HIDDEN_UNIT = 64  # a gated MLP's default width is a multiple of this


class Family(NamedTuple):
    """A family of models: its settings, with those of its smallest preset, and what all its models have in common."""

    name: str
    settings: dict[str, Any]
    common: dict[str, Any]

    def hidden_width(self, n_embd: int) -> int:
        """Return the default width of an MLP: 4 n_embd, or 8/3 of it, rounded up, if it is gated.

        >>> GPT2.hidden_width(768), LLAMA.hidden_width(192), LLAMA.hidden_width(4096)
        (3072, 512, 10944)
        """
        return -(-8 * n_embd // (3 * HIDDEN_UNIT)) * HIDDEN_UNIT if self.common["is_gated"] else 4 * n_embd


TINY: dict[str, Any] = {"vocab_size": 256, "block_size": 128, "n_layer": 4, "n_head": 4, "n_embd": 192}
TINY |= {"n_kv_head": None, "n_hidden": None}
EXPERTS = {"num_experts": 0, "experts_per_token": 2, "expert_capacity": None}
GPT2 = Family(
    "gpt2",
    {**TINY, "dropout": 0.0, "bias": False, **EXPERTS, "balance_loss": 0.0},
    {"tied": True, "is_gated": False, "has_rms_norms": False, "embeds_positions": True},
)
LLAMA = Family(
    "llama",
    {
        **TINY,
        "rope_theta": 10000.0,
        "rope_factor": 1.0,
        "rope_original_length": 8192,
        "norm_eps": 1e-5,
        "tied": False,
    },
    {"dropout": 0.0, "bias": False, **EXPERTS, "is_gated": True, "has_rms_norms": True, "embeds_positions": False},
)
FAMILIES = (GPT2, LLAMA)


class Preset(NamedTuple):
    """A model's settings by name."""

    family: Family
    settings: Mapping[str, Any]


def preset(
    family: Family, vocab_size: int, block_size: int, n_layer: int, n_head: int, n_embd: int, **more: Any
) -> Preset:
    sizes = {"vocab_size": vocab_size, "block_size": block_size, "n_layer": n_layer, "n_head": n_head, "n_embd": n_embd}
    return Preset(family, {**family.settings, **sizes, **more})


LLAMA_32 = {"n_kv_head": 8, "n_hidden": 8192, "rope_theta": 5e5, "rope_factor": 32.0, "tied": True}
PRESETS = {
    "gpt2-tiny": Preset(GPT2, GPT2.settings),
    "gpt2": preset(GPT2, 50257, 1024, 12, 12, 768, bias=True),
    "gpt2-medium": preset(GPT2, 50257, 1024, 24, 16, 1024, bias=True),
    "gpt2-large": preset(GPT2, 50257, 1024, 36, 20, 1280, bias=True),
    "gpt2-xl": preset(GPT2, 50257, 1024, 48, 25, 1600, bias=True),
    "llama-tiny": Preset(LLAMA, LLAMA.settings),
    "llama": preset(LLAMA, 50257, 1024, 12, 12, 768),
    "llama-1b": preset(LLAMA, 128256, 8192, 16, 32, 2048, **LLAMA_32),
    "llama-3b": preset(LLAMA, 128256, 8192, 28, 24, 3072, **LLAMA_32),
    "llama-8b": preset(LLAMA, 128256, 8192, 32, 32, 4096, n_kv_head=8, n_hidden=14336, rope_theta=5e5),
}
DEFAULT = "gpt2-tiny"
LR = 3e-3  # of the tiny models
ROPE = ("rope_theta", "rope_factor", "rope_original_length")
SHAPE = ("n_layer", "n_head", "n_kv_head", "n_embd", "n_hidden", "bias", *ROPE, "norm_eps", "tied")
SET_BY_MODEL = (*SHAPE, "block_size", "lr")
SET_BY_DEPTH = (*SHAPE, "lr", "global_batch_size", "num_micro_batches")
SET_BY_WEIGHTS = ("model", "depth", "vocab_size", "tokenizer", *SHAPE, *EXPERTS)


def fill(settings: Any, weights: Preset | None = None) -> None:
    """Fill settings that are None from the run's `depth`, or else its `model`, or else those of its `weights`.

    Raises: ValueError for an unknown model, and a depth out of range.
    """
    if settings.model is None and settings.depth is None and weights is not None:
        settings.model, chosen = weights.family.name, weights
    else:
        set_missing(settings, {"model": DEFAULT})
        check(settings, "model", "depth")
        chosen = PRESETS[settings.model]
    by_depth = {} if settings.depth is None else settings_of_depth(settings.depth)
    values = {**EXPERTS, **chosen.settings, "lr": LR, **by_depth}
    del values["vocab_size"]  # determined by the data
    if settings.depth is None:
        values["num_micro_batches"] = 1
    set_missing(settings, values)


def set_missing(settings: Any, values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        if hasattr(settings, name) and getattr(settings, name) is None:
            setattr(settings, name, value)


def settings_of_depth(depth: int) -> dict[str, Any]:
    """Return the shape and learning rate for a depth in blocks; 12 gives nanoGPT's GPT-2 124M.

    The head size is 64; the learning rate is inversely proportional to the root of the width.

    >>> settings_of_depth(12)["n_embd"], settings_of_depth(12)["lr"], settings_of_depth(48)["lr"]
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
    family = PRESETS[settings.model].family
    defaults = {field.name: field.default for field in fields(settings)}
    for name in [name for other in FAMILIES for name in other.settings if name not in family.settings]:
        value = getattr(settings, name, None)
        if value is not None and value not in (defaults[name], family.common.get(name)):
            raise ValueError(
                f"{name}={value} is not a setting of model={settings.model}: omit it, or use another model"
            )


def model_settings(settings: Any, vocab_size: int) -> dict[str, Any]:
    """Return the settings of the model in filled settings; those that these lack are the preset's."""
    chosen = PRESETS[settings.model].settings
    return {**{name: getattr(settings, name, value) for name, value in chosen.items()}, "vocab_size": vocab_size}


def shape_of(settings: Any, vocab_size: int) -> ModelShape:
    """Return the shape in filled settings; raise ValueError if its sizes do not fit together."""
    family, own = PRESETS[settings.model].family, model_settings(settings, vocab_size)
    sizes = {**family.common, **own}
    kv_heads, hidden = sizes.pop("n_kv_head"), sizes.pop("n_hidden")
    sizes["num_kv_heads"] = own["n_head"] if kv_heads is None else kv_heads
    sizes["hidden_width"] = hidden or family.hidden_width(own["n_embd"])
    return ModelShape(**{field.name: sizes[field.name] for field in fields(ModelShape)})
