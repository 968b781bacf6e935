"""The table of GPT-2: names and layout of Hugging Face's GPT2LMHeadModel, and its config.json."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from models.config import ModelConfig
from models.decoder import Decoder
from models.mixture import routers
from parallelism.planner import presets
from training.weights.rules import activation, constant, size

# Hugging Face stores these as Conv1D, with weights (in, out), the transpose of nn.Linear's.
CONV1D = ("c_attn.weight", "c_proj.weight", "c_fc.weight")

# Buffers, not weights: attention masks.
MASK = re.compile(r"\bh\.\d+\.attn\.(masked_)?bias$")

# Settings of mixtures in folders that this program wrote before it had a format of its own; same names in config.json.
MIXTURE = ("num_experts", "experts_per_token", "expert_capacity", "balance_loss")

RULES = (
    *(size(name, name) for name in ("n_embd", "n_head", "n_layer", "vocab_size")),
    size("n_positions", "block_size"),
    size("resid_pdrop", "dropout"),
    constant("layer_norm_epsilon", 1e-5),
    activation("activation_function", "gelu_new"),
    constant("scale_attn_weights", True),
    constant("scale_attn_by_inverse_layer_idx", False),
    constant("tie_word_embeddings", True),
)


class GPT2Table:
    """The family of GPT-2, as `training.weights.families.FamilyTable` describes others."""

    family = presets.GPT2
    embedding = "transformer.wte.weight"

    def read(self, values: Mapping[str, Any]) -> ModelConfig:
        """Return the description in config.json.

        Raises: ValueError for a missing setting, and one that cannot be loaded.
        """
        own = {name: values[name] for name in ("n_kv_head", *MIXTURE) if name in values}
        read = {name: value for rule in RULES for name, value in rule.read(values).items()}
        return ModelConfig(**own, **read, n_hidden=values.get("n_inner"), bias=values.get("bias", True))

    def write(self, config: ModelConfig) -> dict[str, Any]:
        """Return the contents of config.json."""
        return {
            "model_type": "gpt2",
            "architectures": ["GPT2LMHeadModel"],
            **{name: value for rule in RULES for name, value in rule.write(config).items()},
            **({} if config.n_hidden is None else {"n_inner": config.n_hidden}),
            "bias": config.bias,  # not in Hugging Face's GPT-2, which always has biases
            "n_ctx": config.block_size,
            "embd_pdrop": config.dropout,
            "attn_pdrop": config.dropout,
        }

    def to_theirs(self, model: Decoder) -> dict[str, Tensor]:
        """Convert the weights to their names and layout, with zeros for missing biases."""
        tensors = {f"{name}.bias": router.bias.cpu() for name, router in routers(model)}  # in older folders
        for name, p in model.named_parameters():  # the tied lm_head.weight is listed as wte.weight only
            weight = p.detach().cpu()
            tensors[name] = transposed(name, weight).contiguous()
            has_bias = weight.dim() < 3 and not name.endswith(("wte.weight", "wpe.weight", "router.weight"))
            if has_bias and not model.config.bias:
                tensors[name.removesuffix("weight") + "bias"] = weight.new_zeros(len(weight))
        return tensors

    def to_ours(self, tensors: Mapping[str, Tensor], model: Decoder) -> dict[str, Tensor]:
        return {name: transposed(name, tensor) for name, tensor in tensors.items()}

    def fitted(self, config: ModelConfig, tensors: Mapping[str, Tensor]) -> ModelConfig:
        """Return the config, with biases if any bias in the file is not 0."""
        biases = (tensor for name, tensor in tensors.items() if name.endswith(".bias") and "router" not in name)
        return replace(config, bias=any(bool(tensor.any()) for tensor in biases))

    def weights_in(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return a file's weights by current names: GPT2Model omits "transformer."; older files have masks."""
        return {named(name): tensor for name, tensor in tensors.items() if not MASK.search(name)}


def transposed(name: str, weight: Tensor) -> Tensor:
    """Convert a weight between our layout and Conv1D's; experts' weights are (in, out) in both."""
    return weight.t() if name.endswith(CONV1D) and weight.dim() == 2 else weight


def named(name: str) -> str:
    return name if name.startswith(("transformer.", "lm_head.")) else f"transformer.{name}"


class OwnTable(GPT2Table):
    """The format of decoders of which Hugging Face has none: our description, and our names and layout of weights."""

    family = presets.GPT2._replace(name="decoder", label="decoder of our own")

    def read(self, values: Mapping[str, Any]) -> ModelConfig:
        names = ModelConfig.__dataclass_fields__
        if missing := names.keys() - values.keys():
            raise ValueError(f"no {min(missing)}; get the file again")
        return ModelConfig(**{name: values[name] for name in names})

    def write(self, config: ModelConfig) -> dict[str, Any]:
        return {"model_type": self.family.name, **vars(config)}

    def to_theirs(self, model: Decoder) -> dict[str, Tensor]:
        biases = {f"{name}.bias": router.bias.cpu() for name, router in routers(model)}
        return biases | {name: p.detach().cpu().contiguous() for name, p in model.named_parameters()}

    def to_ours(self, tensors: Mapping[str, Tensor], model: Decoder) -> dict[str, Tensor]:
        return dict(tensors)

    def fitted(self, config: ModelConfig, tensors: Mapping[str, Tensor]) -> ModelConfig:
        return config
