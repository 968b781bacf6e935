"""Families of models of Hugging Face: a table of rules for config.json, and of names of weights, for each.

Source: transformers, configuration_*.py and modeling_*.py of each family.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from models.config import ModelConfig
from models.decoder import Decoder
from parallelism.planner import presets
from training.weights.rules import (
    WINDOW,
    Rule,
    activation,
    constant,
    heads,
    option,
    rope,
    size,
    unrotated_layers,
    window_by_layer,
    window_everywhere,
)

# Names of modules by ours; ours stack several of theirs by rows.
MODEL = {"transformer.wte": "model.embed_tokens", "transformer.ln_f": "model.norm", "lm_head": "lm_head"}
BLOCK: dict[str, tuple[str, ...]] = {
    "ln_1": ("input_layernorm",),
    "attn.c_attn": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attn.c_proj": ("self_attn.o_proj",),
    "attn.heads.q_norm": ("self_attn.q_norm",),
    "attn.heads.k_norm": ("self_attn.k_norm",),
    "ln_2": ("post_attention_layernorm",),
    "mlp.c_fc": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.c_proj": ("mlp.down_proj",),
    "mlp.router": ("mlp.gate",),
}
EXPERTS = {"mlp.c_fc": ("gate_proj", "up_proj"), "mlp.c_proj": ("down_proj",)}
SPEEDS = re.compile(r"rotary_emb\.inv_freq$")  # buffers, not weights, in older files
IN_BLOCK = re.compile(r"transformer\.h\.(\d+)\.(.+)\.(weight|bias)")

SIZES = (
    size("vocab_size", "vocab_size"),
    size("max_position_embeddings", "block_size"),
    size("num_hidden_layers", "n_layer"),
    size("num_attention_heads", "n_head"),
    size("hidden_size", "n_embd"),
    size("rms_norm_eps", "norm_eps"),
    constant("attention_dropout", 0.0),
    constant("partial_rotary_factor", 1.0)._replace(write=lambda config: {}),  # which most families do not have
)
SILU = (activation("hidden_act", "silu"),)
DENSE = (size("intermediate_size", "n_hidden", "hidden_width"),)
ATTENTION_BIAS = option("attention_bias", False, "qkv_bias", "out_bias")
LLAMA_BIASES = (ATTENTION_BIAS, option("mlp_bias", False, "mlp_bias"))
UNTIED, TIED = (option("tie_word_embeddings", default, "tied") for default in (False, True))
QWEN_WINDOWS = window_by_layer(
    lambda values, layer: layer >= values.get("max_window_layers", 28), use_sliding_window=True
)
GEMMA_WINDOWS = window_by_layer(lambda values, layer: (layer + 1) % (values.get("sliding_window_pattern") or 6) != 0)


@dataclass(frozen=True)
class FamilyTable:
    """A family: its description, the class of its models, the rules for config.json, and names of modules."""

    family: presets.Family
    architecture: str
    rules: tuple[Rule, ...]
    block: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: BLOCK)
    experts: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: EXPERTS)
    of_experts: str = "mlp.experts"
    embedding: str = "model.embed_tokens.weight"

    def read(self, values: Mapping[str, Any]) -> ModelConfig:
        """Return the description in config.json.

        Raises: ValueError for a missing setting, and one that cannot be loaded.
        """
        description = {**self.family.settings, **self.family.common}
        for rule in self.rules:
            description |= rule.read(values)
        return ModelConfig(**description)

    def write(self, config: ModelConfig) -> dict[str, Any]:
        """Return the settings in config.json."""
        written = {name: value for rule in self.rules for name, value in rule.write(config).items()}
        return {"model_type": self.family.name, "architectures": [self.architecture], **written}

    def to_theirs(self, model: Decoder) -> dict[str, Tensor]:
        """Convert the weights to their names and layout."""
        tensors: dict[str, Tensor] = {}
        for name, p in model.named_parameters():  # a tied head is listed as the embedding only
            weight = p.detach().cpu()
            if weight.dim() == 3:
                tensors.update(self.experts_to_theirs(name, weight))
                continue
            theirs = self.names(name)
            for each, part in zip(theirs, weight.split(row_counts(model.config, theirs, len(weight))), strict=True):
                tensors[each] = part.contiguous()
        return tensors

    def experts_to_theirs(self, name: str, weight: Tensor) -> dict[str, Tensor]:
        """Convert a layer of all experts, (experts, in, out), to one of each, or to its gate and values."""
        parts = self.expert_names(name)
        return {
            f"{prefix}.{number}.{each}.weight": matrix.t().contiguous()
            for prefix, each, part in zip(*parts, weight.chunk(len(parts[0]), -1), strict=True)
            for number, matrix in enumerate(part)
        }

    def to_ours(self, tensors: Mapping[str, Tensor], model: Decoder) -> dict[str, Tensor]:
        """Convert weights to the names and layout of a model."""
        ours = {}
        for name, p in model.named_parameters():
            if p.dim() == 3:
                parts = [
                    torch.stack([tensors[f"{prefix}.{number}.{each}.weight"].t() for number in range(len(p))])
                    for prefix, each in zip(*self.expert_names(name), strict=True)
                ]
                ours[name] = torch.cat(parts, -1)
            else:
                ours[name] = torch.cat([tensors[each] for each in self.names(name)])
        return ours

    def names(self, name: str) -> list[str]:
        """Return their names of a parameter of ours."""
        if match := IN_BLOCK.fullmatch(name):
            number, module, kind = match.groups()
            return [f"model.layers.{number}.{each}.{kind}" for each in self.block[module]]
        module, _, kind = name.rpartition(".")
        return [f"{MODEL[module]}.{kind}"]

    def expert_names(self, name: str) -> tuple[list[str], tuple[str, ...]]:
        """Return their prefixes and names of the parts of a layer of experts."""
        match = IN_BLOCK.fullmatch(name)
        assert match
        parts = self.experts[match[2]]
        return [f"model.layers.{match[1]}.{self.of_experts}"] * len(parts), parts

    def weights_in(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the weights of a file, without buffers."""
        return {name: tensor for name, tensor in tensors.items() if not SPEEDS.search(name)}

    def fitted(self, config: ModelConfig, tensors: Mapping[str, Tensor]) -> ModelConfig:
        return config


def row_counts(config: ModelConfig, names: list[str], rows: int) -> list[int]:
    """Return the rows of each of the matrices that a parameter of ours stacks."""
    if len(names) == 3:
        return [count * config.head_size for count in config.head_counts]
    return [rows // len(names)] * len(names)


LLAMA = FamilyTable(
    presets.LLAMA, "LlamaForCausalLM", (*SIZES, *DENSE, *SILU, *LLAMA_BIASES, heads(), rope(10000.0), UNTIED)
)
MISTRAL = FamilyTable(
    presets.MISTRAL,
    "MistralForCausalLM",
    (*SIZES, *DENSE, *SILU, heads(), rope(10000.0), window_everywhere(WINDOW), UNTIED),
)
MIXTRAL = FamilyTable(
    presets.MIXTRAL,
    "MixtralForCausalLM",
    (
        *(*SIZES, *DENSE, *SILU, heads(), rope(1e6), window_everywhere(None), UNTIED),
        size("num_local_experts", "num_experts"),
        size("num_experts_per_tok", "experts_per_token"),
    ),
    {**BLOCK, "mlp.router": ("block_sparse_moe.gate",)},
    {"mlp.c_fc": ("w1", "w3"), "mlp.c_proj": ("w2",)},
    "block_sparse_moe.experts",
)
QWEN2 = FamilyTable(
    presets.QWEN2, "Qwen2ForCausalLM", (*SIZES, *DENSE, *SILU, heads(), rope(10000.0), QWEN_WINDOWS, UNTIED)
)
QWEN3 = FamilyTable(
    presets.QWEN3,
    "Qwen3ForCausalLM",
    (*SIZES, *DENSE, *SILU, ATTENTION_BIAS, heads(128), rope(10000.0), QWEN_WINDOWS, UNTIED),
)
QWEN3_MOE = FamilyTable(
    presets.QWEN3_MOE,
    "Qwen3MoeForCausalLM",
    (
        *(
            *SIZES,
            *SILU,
            ATTENTION_BIAS,
            heads(),
            rope(10000.0),
            window_everywhere(WINDOW, "use_sliding_window"),
            UNTIED,
        ),
        size("moe_intermediate_size", "n_hidden", "hidden_width"),
        size("num_experts", "num_experts", also="num_local_experts"),
        size("num_experts_per_tok", "experts_per_token"),
        option("norm_topk_prob", False, "normalizes_choices"),
        constant("decoder_sparse_step", 1),
        constant("mlp_only_layers", []),
    ),
)
GEMMA3 = FamilyTable(
    presets.GEMMA3,
    "Gemma3ForCausalLM",
    (
        *(*SIZES, *DENSE, activation("hidden_activation", "gelu_pytorch_tanh"), ATTENTION_BIAS, heads(256), TIED),
        *(rope(1e6, 10000.0), GEMMA_WINDOWS),
        Rule(
            lambda values: {"attention_scale": (values.get("query_pre_attn_scalar") or 256) ** -0.5},
            lambda config: {"query_pre_attn_scalar": scalar_of(config)},
        ),
        *(constant(f"{name}_logit_softcapping", None) for name in ("attn", "final")),
        constant("use_bidirectional_attention", False),
    ),
    {
        **BLOCK,
        "ln_1_after": ("post_attention_layernorm",),
        "ln_2": ("pre_feedforward_layernorm",),
        "ln_2_after": ("post_feedforward_layernorm",),
    },
)
SMOLLM3 = FamilyTable(
    presets.SMOLLM3,
    "SmolLM3ForCausalLM",
    (
        *(*SIZES, *DENSE, *SILU, *LLAMA_BIASES, heads(), rope(2e6), unrotated_layers(4), TIED),
        constant("use_sliding_window", False),
    ),
)


def scalar_of(config: ModelConfig) -> float:
    """Return the number of whose root the scale of Gemma's scores is the inverse."""
    scalar = config.head_size if config.attention_scale is None else config.attention_scale**-2
    return round(scalar) if math.isclose(scalar, round(scalar)) else scalar
