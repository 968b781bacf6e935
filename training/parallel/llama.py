"""Parallel layout of a Llama: its sharding plan and its pipeline layers."""

from __future__ import annotations

from models.config import LlamaConfig
from models.llama import Llama
from parallelism.pipeline.stage import Layer
from parallelism.tensor.sharding_plan import (
    Attention,
    ColumnParallel,
    Loss,
    RowParallel,
    SequenceRegion,
    Strategy,
    Vocabulary,
)
from training.parallel.gpt import model_layers


def llama_plan(config: LlamaConfig) -> dict[str, Strategy]:
    """Return the sharding plan of a Llama: one sum over the ranks for attention, and one for the gated MLP."""
    n_head, kv, hidden = config.n_head, config.num_kv_heads, config.hidden_width
    vocabulary, between = Vocabulary(config.vocab_size), SequenceRegion()
    return {
        "transformer.wte": vocabulary,
        "transformer.h.*.ln_*": between,
        "transformer.h.*.attn.c_attn": ColumnParallel((n_head, kv, kv), ("n_head", "n_kv_head", "n_kv_head")),
        "transformer.h.*.attn.attend": Attention(n_head, kv),
        "transformer.h.*.attn.c_proj": RowParallel(),
        "transformer.h.*.mlp.c_fc": ColumnParallel((hidden, hidden), ("n_hidden", "n_hidden")),
        "transformer.h.*.mlp.c_proj": RowParallel(),
        "transformer.ln_f": between,
        "lm_head": vocabulary,
        "loss": Loss(config.vocab_size),
    }


def llama_layers(model: Llama) -> list[Layer]:
    """Return the layers of a Llama as `gpt2_layers` does; each block rotates by the positions of the batch."""
    return model_layers(model, ("transformer.wte",), lambda block, x, batch: block(x, batch.positions, batch.documents))
