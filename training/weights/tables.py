"""The tables of all families, and the one by which a model is written."""

from __future__ import annotations

from typing import Any

from models.config import ModelConfig
from training.weights import families
from training.weights.gpt2 import GPT2Table, OwnTable

OWN = OwnTable()
TABLES: dict[str, Any] = {  # by the model_type in config.json
    table.family.name: table
    for table in (
        *(GPT2Table(), families.LLAMA, families.MISTRAL, families.MIXTRAL, families.QWEN2, families.QWEN3),
        *(families.QWEN3_MOE, families.GEMMA3, families.SMOLLM3),
    )
}
TRAINED_WITH = ("family", "dropout", "expert_capacity", "balance_loss")  # not what a model computes


def table_of(config: ModelConfig) -> Any:
    """Return the table by which a model is written: its family's, or another one that fits, or our own."""
    by_family = sorted(TABLES.values(), key=lambda table: table.family.name != config.family)
    return next((table for table in by_family if not misfits(table, config)), OWN)


def misfits(table: Any, config: ModelConfig) -> list[str]:
    """Return the settings of a model that a family does not have, as `name=value`: those not read as written."""
    try:
        return [
            f"{name}={effective_settings(config)[name]}"
            for name in differences(config, table.read(table.write(config)))
        ]
    except ValueError as error:
        return [str(error)]


def differences(config: ModelConfig, other: ModelConfig) -> list[str]:
    """Return the settings of a model that another one has otherwise."""
    ours, theirs = effective_settings(config), effective_settings(other)
    unused = {name for each in (config, other) for name in unused_settings(each)}
    if config.n_layer != other.n_layer:
        unused.add("layers")
    return [name for name, value in ours.items() if value != theirs[name] and name not in unused]


def effective_settings(config: ModelConfig) -> dict[str, Any]:
    """Return what decides what a model computes, with the defaults filled in."""
    own: dict[str, Any] = {name: value for name, value in vars(config).items() if name not in TRAINED_WITH}
    plain = config.n_embd // config.n_head
    return own | {
        "n_kv_head": config.num_kv_heads,
        "n_hidden": config.hidden_width,
        "head_dim": None if config.head_dim == plain else config.head_dim,
        "attention_scale": None if config.attention_scale == config.head_size**-0.5 else config.attention_scale,
        "layers": " ".join(config.layer_kinds),
    }


def unused_settings(config: ModelConfig) -> list[str]:
    """Return the settings that have no effect on what a model computes."""
    unused = []
    if config.embeds_positions:
        unused += ["rope_theta", "local_rope_theta", "rope_factor"]
    if config.embeds_positions or config.rope_factor == 1:
        unused += ["rope_scaling", "rope_original_length"]
    if config.rope_scaling == "linear":
        unused += ["rope_original_length"]
    if "window" not in config.layer_kinds:
        unused += ["local_rope_theta", "window"]
    if not config.num_experts:
        unused += ["experts_per_token", "router", "normalizes_choices"]
    return unused
