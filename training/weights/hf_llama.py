"""Conversion between our Llama and Hugging Face's LlamaForCausalLM."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from models.config import LlamaConfig
from models.llama import FAST_TURNS, Llama

NAME, EMBEDDING = "Llama", "model.embed_tokens.weight"

# Hugging Face's names, by ours, of weights; ours stack several of theirs by rows.
MODEL: dict[str, tuple[str, ...]] = {
    "transformer.wte.weight": ("model.embed_tokens.weight",),
    "transformer.ln_f.weight": ("model.norm.weight",),
    "lm_head.weight": ("lm_head.weight",),
}
BLOCK = {
    "ln_1.weight": ("input_layernorm.weight",),
    "attn.c_attn.weight": ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"),
    "attn.c_proj.weight": ("self_attn.o_proj.weight",),
    "ln_2.weight": ("post_attention_layernorm.weight",),
    "mlp.c_fc.weight": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "mlp.c_proj.weight": ("mlp.down_proj.weight",),
}

# Buffers, not weights: the speeds of rotations, in older files.
SPEEDS = re.compile(r"rotary_emb\.inv_freq$")

# LlamaConfig's fields by their names in config.json, and the optional ones.
FIELDS = {
    "vocab_size": "vocab_size",
    "max_position_embeddings": "block_size",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "hidden_size": "n_embd",
    "intermediate_size": "n_hidden",
    "rms_norm_eps": "norm_eps",
}
OPTIONAL = {"num_key_value_heads": "n_kv_head", "rope_theta": "rope_theta", "tie_word_embeddings": "tied"}

# A Llama with slowed rotations: the common values, and LlamaConfig's fields.
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": float(FAST_TURNS)}
SCALING = {"factor": "rope_factor", "original_max_position_embeddings": "rope_original_length"}

ROPE = ("rope_theta", *SCALING.values())

# Values common to all Llamas of models/llama.py.
FIXED = {
    "model_type": "llama",
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "attention_dropout": 0.0,
}


def names_of(config: LlamaConfig) -> dict[str, tuple[str, ...]]:
    """Return Hugging Face's names of each weight."""
    names = {name: theirs for name, theirs in MODEL.items() if not (config.tied and name == "lm_head.weight")}
    for number in range(config.n_layer):
        for name, theirs in BLOCK.items():
            names[f"transformer.h.{number}.{name}"] = tuple(f"model.layers.{number}.{each}" for each in theirs)
    return names


def to_theirs(model: Llama) -> dict[str, Tensor]:
    """Convert the weights to their names and layout."""
    tensors, config = {}, model.config
    kv_width = config.num_kv_heads * config.head_size
    for name, theirs in names_of(config).items():
        weight = model.get_parameter(name).detach().cpu()
        lengths = (config.n_embd, kv_width, kv_width) if len(theirs) == 3 else len(weight) // len(theirs)
        for each, part in zip(theirs, weight.split(lengths), strict=True):
            tensors[each] = part.contiguous()
    return tensors


def to_ours(tensors: Mapping[str, Tensor], config: LlamaConfig) -> dict[str, Tensor]:
    return {name: torch.cat([tensors[each] for each in theirs]) for name, theirs in names_of(config).items()}


def config_file(config: LlamaConfig) -> dict[str, Any]:
    """Return the contents of config.json."""
    return {
        **FIXED,
        **{theirs: getattr(config, ours) for theirs, ours in (FIELDS | OPTIONAL).items()},
        "rope_scaling": rope_scaling(config),
        "intermediate_size": config.hidden_width,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_size,
        "architectures": ["LlamaForCausalLM"],
        # The defaults, 1 and 2, are tokens of Hugging Face's vocabulary.
        "bos_token_id": None,
        "eos_token_id": None,
    }


def rope_scaling(config: LlamaConfig) -> dict[str, Any] | None:
    """Return config.json's entries for rope_factor."""
    if config.rope_factor == 1:
        return None
    return {"rope_type": "llama3", **LLAMA3, **{theirs: getattr(config, ours) for theirs, ours in SCALING.items()}}


def read_config(values: Mapping[str, Any]) -> LlamaConfig:
    """Return the config for config.json's values; raise ValueError for values that models/llama.py does not support."""
    fields = {ours: values[theirs] for theirs, ours in (FIELDS | OPTIONAL).items() if values.get(theirs) is not None}
    return LlamaConfig(**{**fields, **rope_fields(values)})


def rope_fields(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return LlamaConfig's settings of rotations; transformers 5 keeps all of them in one entry, 4 only the factor."""
    name = "rope_parameters" if values.get("rope_parameters") else "rope_scaling"
    rope = values.get(name) or {}
    if not isinstance(rope, dict):
        raise ValueError(f"{name} is {rope!r}; an object of settings is expected")
    theta = {"rope_theta": rope["rope_theta"]} if "rope_theta" in rope else {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return theta
    if kind != "llama3":
        raise ValueError(f"rope_type is {kind!r}; only 'default' and 'llama3' can be loaded")
    if missing := (LLAMA3 | SCALING).keys() - rope.keys():
        raise ValueError(f"{name} has no {min(missing)}; get the file again")
    for setting, fixed in LLAMA3.items():
        if rope[setting] != fixed:
            raise ValueError(f"{setting} is {rope[setting]!r}; only {fixed!r} can be loaded")
    return {**theta, **{ours: rope[theirs] for theirs, ours in SCALING.items()}}


def fitted(config: LlamaConfig, tensors: Mapping[str, Tensor]) -> LlamaConfig:
    return config


def weights_in(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights of a file, without buffers."""
    return {name: tensor for name, tensor in tensors.items() if not SPEEDS.search(name)}


def sizes(config: LlamaConfig) -> dict[str, Any]:
    """Return the sizes, by flag, that two models must share for one to load the other's weights."""
    names = ("vocab_size", "n_layer", "n_head", "n_embd", *ROPE, "norm_eps", "tied")
    own = {name: getattr(config, name) for name in names}
    return {**own, "n_kv_head": config.num_kv_heads, "n_hidden": config.hidden_width}
