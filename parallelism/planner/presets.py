"""Presets: model shapes by name, and shape, batch and learning rate by depth."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import fields
from types import MappingProxyType
from typing import Any, NamedTuple

from collectives.job.settings import check
from parallelism.planner.architecture import ARCHITECTURE, Architecture, read_architecture
from parallelism.planner.shape import ModelShape

HIDDEN_UNIT = 64  # a gated MLP's default width is a multiple of this


class Family(NamedTuple):
    """A family of models: its settings, with those of its smallest preset, and the rest of their description.

    `label` is its name in words; `common` has what all its models have in common, as `models.config` names it.
    """

    name: str
    label: str
    settings: dict[str, Any]
    common: dict[str, Any]


def hidden_width(n_embd: int, is_gated: bool) -> int:
    """Return the default width of an MLP: 4 n_embd, or 8/3 of it, rounded up, if it is gated.

    >>> hidden_width(768, is_gated=False), hidden_width(192, is_gated=True), hidden_width(4096, is_gated=True)
    (3072, 512, 10944)
    """
    return -(-8 * n_embd // (3 * HIDDEN_UNIT)) * HIDDEN_UNIT if is_gated else 4 * n_embd


TINY: dict[str, Any] = {"vocab_size": 256, "block_size": 128, "n_layer": 4, "n_head": 4, "n_embd": 192}
TINY |= {"n_kv_head": None, "n_hidden": None}
EXPERTS = {"num_experts": 0, "experts_per_token": 2, "expert_capacity": None}
DENSE: dict[str, Any] = {**EXPERTS, "balance_loss": 0.0}
ROTARY: dict[str, Any] = {"rope_theta": 10000.0, "rope_factor": 1.0, "rope_original_length": 8192, "norm_eps": 1e-5}


def family(name: str, label: str, settings: Mapping[str, Any], like: Family | None = None, **common: Any) -> Family:
    """Return a family whose models have these settings, of which those `like` another have the defaults."""
    base = like.common if like else {**DENSE, **ROTARY, **ARCHITECTURE, "dropout": 0.0, "bias": False, "tied": True}
    own = {**(like.settings if like else TINY), **settings}
    return Family(name, label, own, {**{k: v for k, v in base.items() if k not in own}, "family": name, **common})


GPT2 = family("gpt2", "GPT-2", {"dropout": 0.0, "bias": False, **DENSE})
LLAMA = family(
    "llama", "Llama", {**ROTARY, "tied": False}, has_rms_norms=True, embeds_positions=False, is_gated=True,
    activation="silu",
)  # fmt: skip
MISTRAL = family("mistral", "Mistral", {}, LLAMA)
MIXTRAL = family("mixtral", "Mixtral", {**DENSE, "num_experts": 8, "rope_theta": 1e6}, MISTRAL, router="softmax")
QWEN2 = family("qwen2", "Qwen 2", {"rope_theta": 1e6, "norm_eps": 1e-6}, LLAMA, qkv_bias=True)
QWEN3 = family("qwen3", "Qwen 3", {}, QWEN2, qkv_bias=False, has_qk_norms=True)
QWEN3_MOE = family("qwen3_moe", "Qwen 3 MoE", {**DENSE, "num_experts": 8}, QWEN3, router="softmax")
GEMMA3 = family(
    "gemma3_text", "Gemma 3", {"rope_theta": 1e6, "norm_eps": 1e-6, "tied": True}, LLAMA, scales_embedding=True,
    norm_offset=1.0, norms="around", has_qk_norms=True, layers="window window window window window full",
    local_rope_theta=10000.0, activation="gelu_tanh",
)  # fmt: skip
SMOLLM3 = family(
    "smollm3", "SmolLM 3", {"rope_theta": 5e6, "norm_eps": 1e-6, "tied": True}, LLAMA, layers="full full full unrotated"
)
FAMILIES = {each.name: each for each in (GPT2, LLAMA, MISTRAL, MIXTRAL, QWEN2, QWEN3, QWEN3_MOE, GEMMA3, SMOLLM3)}


class Preset(NamedTuple):
    """A model's settings by name, and what describes it beside them and its family."""

    family: Family
    settings: Mapping[str, Any]
    rest: Mapping[str, Any] = MappingProxyType({})

    @property
    def description(self) -> dict[str, Any]:
        return {**self.family.common, **self.rest, **self.settings}


def preset(
    family: Family, vocab_size: int, block_size: int, n_layer: int, n_head: int, n_embd: int, **more: Any
) -> Preset:
    sizes = {"vocab_size": vocab_size, "block_size": block_size, "n_layer": n_layer, "n_head": n_head, "n_embd": n_embd}
    rest = {name: value for name, value in more.items() if name in ARCHITECTURE}
    own = {name: value for name, value in more.items() if name not in rest}
    return Preset(family, {**family.settings, **sizes, **own}, rest)


LLAMA_32 = {"n_kv_head": 8, "n_hidden": 8192, "rope_theta": 5e5, "rope_factor": 32.0, "tied": True}
OF_7B = {"n_kv_head": 8, "n_hidden": 14336}
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
    "mistral-tiny": Preset(MISTRAL, MISTRAL.settings, {"layers": "window", "window": 64}),
    "mistral": preset(MISTRAL, 32000, 32768, 32, 32, 4096, **OF_7B, layers="window", window=4096),
    "mixtral-tiny": Preset(MIXTRAL, MIXTRAL.settings),
    "mixtral": preset(MIXTRAL, 32000, 32768, 32, 32, 4096, **OF_7B),
    "qwen2-tiny": Preset(QWEN2, QWEN2.settings),
    "qwen2": preset(QWEN2, 151936, 32768, 24, 14, 896, n_kv_head=2, n_hidden=4864, tied=True),
    "qwen3-tiny": Preset(QWEN3, QWEN3.settings),
    "qwen3": preset(QWEN3, 151936, 32768, 28, 16, 1024, n_kv_head=8, n_hidden=3072, tied=True, head_dim=128),
    "qwen3_moe-tiny": Preset(QWEN3_MOE, QWEN3_MOE.settings),
    "qwen3_moe": preset(
        QWEN3_MOE, 151936, 32768, 48, 32, 2048, n_kv_head=4, n_hidden=768, head_dim=128, num_experts=128,
        experts_per_token=8,
    ),
    "gemma3_text-tiny": Preset(GEMMA3, GEMMA3.settings, {"window": 64}),
    "gemma3_text": preset(
        GEMMA3, 262144, 32768, 26, 4, 1152, n_kv_head=1, n_hidden=6912, head_dim=256, attention_scale=1 / 16, window=512
    ),
    "smollm3-tiny": Preset(SMOLLM3, SMOLLM3.settings),
    "smollm3": preset(SMOLLM3, 128256, 65536, 36, 16, 2048, n_kv_head=4, n_hidden=11008),
}  # fmt: skip
DEFAULT = "gpt2-tiny"
LR = 3e-3  # of the tiny models
ROPE = ("rope_theta", "rope_factor", "rope_original_length")
SHAPE = ("n_layer", "n_head", "n_kv_head", "n_embd", "n_hidden", "bias", *ROPE, "norm_eps", "tied", "architecture")
SET_BY_MODEL = (*SHAPE, "block_size", "lr")
SET_BY_DEPTH = (*SHAPE, "lr", "global_batch_size", "num_micro_batches")
SET_BY_WEIGHTS = ("model", "depth", "vocab_size", "tokenizer", *SHAPE, *EXPERTS)


def fill(settings: Any, weights: Preset | None = None) -> None:
    """Fill settings that are None from the run's `depth`, or else its `model`, or else those of its `weights`.

    Raises: ValueError for an unknown model, and a depth out of range.
    """
    if settings.model is None and settings.depth is None and weights is not None:
        settings.model, chosen = weights.family.name, weights
        set_missing(settings, {"architecture": json.dumps(weights.rest) if weights.rest else None})
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
    every = dict.fromkeys(name for other in FAMILIES.values() for name in other.settings)
    for name in [name for name in every if name not in family.settings]:
        value = getattr(settings, name, None)
        if value is not None and value not in (defaults[name], family.common.get(name)):
            raise ValueError(
                f"{name}={value} is not a setting of model={settings.model}: omit it, or use another model"
            )


def weights_preset(description: Mapping[str, Any]) -> Preset:
    """Return the settings of a model of weights; the rest is what differs from the preset named as its family."""
    family = FAMILIES[description["family"]]
    base = PRESETS[family.name].description
    rest = {name: description[name] for name in ARCHITECTURE if description[name] != base[name]}
    return Preset(family, {name: description[name] for name in family.settings}, rest)


def describe(settings: Any, vocab_size: int) -> dict[str, Any]:
    """Return the description of the model in filled settings; what these lack is the preset's.

    Raises: ValueError for an invalid architecture.
    """
    chosen, rest = PRESETS[settings.model], read_architecture(getattr(settings, "architecture", None))
    own = {name: getattr(settings, name, value) for name, value in chosen.settings.items()}
    whole = {**chosen.description, **rest, **own, "vocab_size": vocab_size}
    Architecture(**{name: whole[name] for name in ARCHITECTURE})  # raises for values out of range
    return whole


def shape_of(settings: Any, vocab_size: int) -> ModelShape:
    """Return the shape in filled settings; raise ValueError if its sizes do not fit together."""
    sizes = describe(settings, vocab_size)
    kv_heads, hidden, head_size = (sizes.pop(name) for name in ("n_kv_head", "n_hidden", "head_dim"))
    sizes["num_kv_heads"] = sizes["n_head"] if kv_heads is None else kv_heads
    sizes["hidden_width"] = hidden or hidden_width(sizes["n_embd"], sizes["is_gated"])
    sizes["head_size"] = sizes["n_embd"] // sizes["n_head"] if head_size is None else head_size
    return ModelShape(**{field.name: sizes[field.name] for field in fields(ModelShape)})
