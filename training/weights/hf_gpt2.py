"""Conversion between our GPT and Hugging Face's GPT2LMHeadModel."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from models.config import GPTConfig
from models.gpt import GPT
from models.mixture import routers

NAME, EMBEDDING = "GPT-2", "transformer.wte.weight"

# Hugging Face stores these as Conv1D, with weights (in, out), the transpose of nn.Linear's.
CONV1D = ("c_attn.weight", "c_proj.weight", "c_fc.weight")

# Buffers, not weights: attention masks.
MASK = re.compile(r"\bh\.\d+\.attn\.(masked_)?bias$")

# GPTConfig's fields by their names in config.json.
FIELDS = {
    "vocab_size": "vocab_size",
    "n_positions": "block_size",
    "n_embd": "n_embd",
    "n_layer": "n_layer",
    "n_head": "n_head",
    "resid_pdrop": "dropout",
}

# GPTConfig's fields of mixtures, which Hugging Face's GPT-2 lacks; same names in config.json.
MIXTURE = ("num_experts", "experts_per_token", "expert_capacity", "balance_loss")

# Values common to all GPTs of models/gpt.py.
FIXED = {
    "model_type": "gpt2",
    "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-5,
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "tie_word_embeddings": True,
}


def to_theirs(model: GPT) -> dict[str, Tensor]:
    """Convert the weights to their names and layout, with zeros for missing biases."""
    tensors = {f"{name}.bias": router.bias.cpu() for name, router in routers(model)}
    for name, p in model.named_parameters():  # the tied lm_head.weight is listed as wte.weight only
        weight = p.detach().cpu()
        tensors[name] = transposed(name, weight).contiguous()
        has_bias = weight.dim() < 3 and not name.endswith(("wte.weight", "wpe.weight", "router.weight"))
        if has_bias and not model.config.bias:
            tensors[name.removesuffix("weight") + "bias"] = weight.new_zeros(len(weight))
    return tensors


def to_ours(tensors: Mapping[str, Tensor], config: GPTConfig) -> dict[str, Tensor]:
    return {name: transposed(name, tensor) for name, tensor in tensors.items()}


def transposed(name: str, weight: Tensor) -> Tensor:
    """Convert a weight between our layout and Conv1D's; experts' weights are (in, out) in both."""
    return weight.t() if name.endswith(CONV1D) and weight.dim() == 2 else weight


def config_file(config: GPTConfig) -> dict[str, Any]:
    """Return the contents of config.json."""
    grouped = {} if config.n_kv_head is None else {"n_kv_head": config.n_kv_head}  # not in Hugging Face's GPT-2
    hidden = {} if config.n_hidden is None else {"n_inner": config.n_hidden}
    mixture = {name: getattr(config, name) for name in MIXTURE} if config.num_experts else {}
    return {
        **FIXED,
        **grouped,
        **hidden,
        "bias": config.bias,  # not in Hugging Face's GPT-2, which always has biases
        **mixture,
        **{theirs: getattr(config, ours) for theirs, ours in FIELDS.items()},
        "architectures": ["GPT2LMHeadModel"],
        "n_ctx": config.block_size,
        "embd_pdrop": config.dropout,
        "attn_pdrop": config.dropout,
        # The default, 50256, is outside of a smaller vocabulary.
        "bos_token_id": None,
        "eos_token_id": None,
    }


def read_config(values: Mapping[str, Any]) -> GPTConfig:
    """Return the config for config.json's values; raise ValueError for values that models/gpt.py does not support."""
    fields = {ours: values[theirs] for theirs, ours in FIELDS.items()}
    own = {name: values[name] for name in ("n_kv_head", *MIXTURE) if name in values}
    return GPTConfig(**fields, **own, n_hidden=values.get("n_inner"), bias=values.get("bias", True))


def fitted(config: GPTConfig, tensors: Mapping[str, Tensor]) -> GPTConfig:
    """Return the config, with biases if any bias in the file is not 0."""
    biases = (tensor for name, tensor in tensors.items() if name.endswith(".bias") and "router" not in name)
    return replace(config, bias=any(bool(tensor.any()) for tensor in biases))


def weights_in(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a file's weights by current names: GPT2Model omits "transformer."; older files contain attention masks."""
    return {named(name): tensor for name, tensor in tensors.items() if not MASK.search(name)}


def named(name: str) -> str:
    return name if name.startswith(("transformer.", "lm_head.")) else f"transformer.{name}"


def sizes(config: GPTConfig) -> dict[str, Any]:
    """Return the sizes, by flag, that two models must share for one to load the other's weights."""
    names = "vocab_size", "block_size", "n_layer", "n_head", "n_embd", "bias", "num_experts"
    own = {name: getattr(config, name) for name in names}
    return {**own, "n_kv_head": config.num_kv_heads, "n_hidden": config.hidden_width}
