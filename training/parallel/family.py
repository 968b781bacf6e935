"""Sharding plans and pipeline layers of each model family."""

from __future__ import annotations

from models.config import LlamaConfig, ModelConfig
from models.llama import Llama
from models.model import Model
from parallelism.pipeline.stage import Layer
from parallelism.tensor.sharding_plan import ShardingPlan
from training.parallel.gpt import gpt2_layers, gpt2_plan
from training.parallel.llama import llama_layers, llama_plan


def plan_of(config: ModelConfig) -> ShardingPlan:
    if isinstance(config, LlamaConfig):
        return llama_plan(config)
    return gpt2_plan(config.vocab_size, config.n_head, config.n_kv_head, config.num_experts > 0)


def layers_of(model: Model) -> list[Layer]:
    return llama_layers(model) if isinstance(model, Llama) else gpt2_layers(model)
