"""What knows both a GPT and how it is laid out: the layers that a pipeline is cut from."""

from __future__ import annotations

from torch import Tensor

from models.gpt import GPT
from parallelism.flops import block_flops, head_flops
from parallelism.pipeline.stage import Batch, Layer, joined

EMBEDDING = ("transformer.wte", "transformer.wpe", "transformer.drop")
HEAD = ("transformer.ln_f", "lm_head", "loss")


def gpt2_layers(model: GPT) -> list[Layer]:
    """One for each block of a GPT, plain or divided, the first with the embeddings, and one of the head and the loss.

    Costs are counted: floating-point operations of one token's forward pass.
    """
    config = model.config

    def embed(x: Tensor | None, batch: Batch) -> Tensor:
        return model.transformer.embed(batch.tokens, batch.positions)

    def block(number: int) -> Layer:
        name = f"transformer.h.{number}"
        return Layer(
            f"block {number}",
            (name,),
            lambda x, batch: model.get_submodule(name)(x, batch.documents),
            block_flops(config),
        )

    def head(x: Tensor | None, batch: Batch) -> Tensor:
        return model.loss(model.lm_head(model.transformer.ln_f(x)), batch.targets)

    layers = [block(number) for number in range(config.n_layer)]
    layers[0] = joined(Layer("embedding", EMBEDDING, embed, 0), layers[0])
    return [*layers, Layer("head", HEAD, head, head_flops(config))]


def whole_layer(model: GPT) -> Layer:
    """The whole model as one layer, called as such: what is compiled is its call."""

    def run(x: Tensor | None, batch: Batch) -> Tensor:
        return model(batch.tokens, batch.targets, batch.positions, batch.documents)[1]

    return Layer("model", ("",), run, 1)
