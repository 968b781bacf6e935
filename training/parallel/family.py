"""Sharding plans and pipeline layers of each model family."""

from __future__ import annotations

from models.config import LlamaConfig, ModelConfig
from models.llama import Llama
from models.model import Model
from parallelism.pipeline.stage import Layer
from parallelism.tensor.sharding_plan import ColumnParallel, RowParallel, ShardingPlan
from training.parallel.gpt import decoder_plan, gpt2_layers, gpt2_plan, model_layers


def plan_of(config: ModelConfig) -> ShardingPlan:
    """Return the sharding plan: one sum over the ranks for attention, and one for the MLP, which may be gated."""
    if not isinstance(config, LlamaConfig):
        return gpt2_plan(config.vocab_size, config.n_head, config.n_kv_head, config.num_experts > 0)
    gates_and_values = ColumnParallel((config.hidden_width,) * 2, ("n_hidden", "n_hidden"))
    mlp = {"mlp.c_fc": gates_and_values, "mlp.c_proj": RowParallel()}
    return decoder_plan(config.vocab_size, config.n_head, config.num_kv_heads, mlp)


def layers_of(model: Model) -> list[Layer]:
    """Return the pipeline layers; a Llama's blocks rotate by the positions of the batch."""
    if not isinstance(model, Llama):
        return gpt2_layers(model)
    return model_layers(model, ("transformer.wte",), lambda block, x, batch: block(x, batch.positions, batch.documents))
