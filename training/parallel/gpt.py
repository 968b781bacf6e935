"""Parallel layout of a GPT: its sharding plan, its pipeline layers, and its recomputation."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor, nn

from models.gpt import GPT
from models.model import Model
from parallelism.numerics.dropout import BatchPosition
from parallelism.numerics.recomputation import recompute
from parallelism.pipeline.stage import Batch, Layer, joined
from parallelism.planner.flops import block_flops, head_flops
from parallelism.planner.shape import ModelShape
from parallelism.tensor.sharding_plan import (
    Attention,
    ColumnParallel,
    ExpertParallel,
    Loss,
    RowParallel,
    SequenceRegion,
    Strategy,
    Vocabulary,
)

EMBEDDING = ("transformer.wte", "transformer.wpe", "transformer.drop")
HEAD = ("transformer.ln_f", "lm_head", "loss")
MODES = ("full", "selective")  # recomputation modes


def decoder_plan(vocab_size: int, n_head: int, n_kv_head: int, mlp: Mapping[str, Strategy]) -> dict[str, Strategy]:
    """Return the sharding plan of what all families have, and of an MLP: one sum over the ranks for attention."""
    vocabulary, between = Vocabulary(vocab_size), SequenceRegion()
    heads = n_head, n_kv_head, n_kv_head
    return {
        "transformer.wte": vocabulary,
        "transformer.h.*.ln_*": between,
        "transformer.h.*.attn.c_attn": ColumnParallel(heads, ("n_head", "n_kv_head", "n_kv_head")),
        "transformer.h.*.attn.c_proj": RowParallel(),
        "transformer.h.*.attn.attend": Attention(n_head, n_kv_head),
        **{f"transformer.h.*.{name}": strategy for name, strategy in mlp.items()},
        "transformer.ln_f": between,
        "lm_head": vocabulary,
        "loss": Loss(vocab_size),
    }


def gpt2_plan(
    vocab_size: int, n_head: int, n_kv_head: int | None = None, has_experts: bool = False
) -> dict[str, Strategy]:
    """Return the sharding plan of a GPT-2: one sum over the ranks for attention, and one for the MLP.

    With `has_experts`, MLPs are mixtures.
    """
    layers: dict[str, Strategy] = {"mlp.c_fc": ColumnParallel(), "mlp.c_proj": RowParallel()}
    plan = decoder_plan(vocab_size, n_head, n_kv_head or n_head, {"mlp": ExpertParallel()} if has_experts else layers)
    return plan | dict.fromkeys(("transformer.wpe", "transformer.drop", "transformer.h.*dropout"), SequenceRegion())


def gpt2_layers(model: GPT) -> list[Layer]:
    """Return the pipeline layers of a GPT: its blocks, the first with the embeddings, and the head with the loss.

    Costs are the floating-point operations of one token's forward pass.
    """
    return model_layers(model, EMBEDDING, lambda block, x, batch: block(x, batch.documents))


def model_layers(
    model: Model, embedding: tuple[str, ...], run: Callable[[nn.Module, Tensor | None, Batch], Tensor]
) -> list[Layer]:
    """Return the layers of a model of any family; `embedding` names its embeddings, and `run` calls a block."""
    shape = ModelShape.of(model.config)

    def embed(x: Tensor | None, batch: Batch) -> Tensor:
        return model.transformer.embed(batch.tokens, batch.positions)

    def block(number: int) -> Layer:
        name = f"transformer.h.{number}"
        return Layer(
            f"block {number}", (name,), lambda x, batch: run(model.get_submodule(name), x, batch), block_flops(shape)
        )

    def head(x: Tensor | None, batch: Batch) -> Tensor:
        return model.loss(model.lm_head(model.transformer.ln_f(x)), batch.targets)

    layers = [block(number) for number in range(shape.n_layer)]
    layers[0] = joined(Layer("embedding", embedding, embed, 0), layers[0])
    return [*layers, Layer("head", HEAD, head, head_flops(shape))]


def whole_layer(model: Model) -> Layer:
    """Return the whole model as one layer that calls it, because the call is compiled."""

    def run(x: Tensor | None, batch: Batch) -> Tensor:
        return model(batch.tokens, batch.targets, batch.positions, batch.documents)[1]

    return Layer("model", ("",), run, 1)


def recompute_model(model: Model, mode: str, position: BatchPosition | None = None) -> None:
    """Make a model, plain or divided, recompute activations block by block.

    `full`: a block saves only its input, and is computed twice.  `selective`: a block recomputes large activations that
    need no matrix product with weights: the result of GELU, which the MLP's second layer saves, 4 of a block's 16 saved
    tensors of its input's size; or a Llama's gate and its product with the values.  Recomputing the attention core, the
    source's subject, would gain nothing, as it saves its output but no scores, with or without dropout.

    Raises: ValueError for an unknown mode.
    """
    if mode not in MODES:
        raise ValueError(f"recompute mode {mode!r} is unknown: use {' or '.join(MODES)}")
    for block in model.transformer.h:
        if mode == "full":
            recompute(block, position)
        else:
            recompute(block.get_submodule("mlp"), position, "project")
