"""Parallel layout of a decoder, which follows from its config: sharding plan, pipeline layers, recomputation."""

from __future__ import annotations

from torch import Tensor, nn

from models.attention import Heads
from models.config import ModelConfig
from models.decoder import Decoder
from models.mlp import Gate
from models.rotary import rotations
from parallelism.numerics.dropout import BatchPosition
from parallelism.numerics.pointwise import GateFunction, GELUFunction, RotationFunction, takes
from parallelism.numerics.recomputation import recompute
from parallelism.pipeline.stage import Batch, Layer, joined
from parallelism.planner.flops import block_flops, head_flops
from parallelism.planner.shape import ModelShape
from parallelism.tensor.sharding_plan import (
    Attention,
    ColumnParallel,
    ExpertParallel,
    HeadRegion,
    Loss,
    RowParallel,
    SequenceRegion,
    ShardingPlan,
    Strategy,
    Vocabulary,
)

HEAD = ("transformer.ln_f", "lm_head", "loss")
MODES = ("full", "selective")  # recomputation modes


def plan_of(config: ModelConfig) -> ShardingPlan:
    """Return the sharding plan: one sum over the ranks for attention, and one for the MLP."""
    vocabulary, between = Vocabulary(config.vocab_size), SequenceRegion()
    plan: dict[str, Strategy] = {
        "transformer.wte": vocabulary,
        **({"transformer.wpe": between} if config.embeds_positions else {}),
        "transformer.drop": between,
        "transformer.h.*.ln_*": between,
        "transformer.h.*.attn.c_attn": ColumnParallel(config.head_counts, ("n_head", "n_kv_head", "n_kv_head")),
        **({"transformer.h.*.attn.heads.?_norm": HeadRegion()} if config.has_qk_norms else {}),
        "transformer.h.*.attn.attend": Attention(config.n_head, config.num_kv_heads),
        "transformer.h.*.attn.c_proj": RowParallel(),
    }
    gates = (config.hidden_width,) * 2 if config.is_gated else ()
    if config.num_experts:
        plan["transformer.h.*.mlp"] = ExpertParallel(pieces=gates or (1,))
    else:
        plan["transformer.h.*.mlp.c_fc"] = ColumnParallel(gates, ("n_hidden",) * len(gates))
        plan["transformer.h.*.mlp.c_proj"] = RowParallel()
    rest = dict.fromkeys(("transformer.h.*dropout", "transformer.ln_f"), between)
    return {**plan, **rest, "lm_head": vocabulary, "loss": Loss(config.vocab_size)}


def layers_of(model: Decoder, counts_ends: bool = False) -> list[Layer]:
    """Return the pipeline layers: the blocks, the first with the embeddings, and the head with the loss.

    Costs are the floating-point operations of one token's forward pass.  With `counts_ends`, the embeddings are a layer
    of their own, and they and the head cost as much as a block, so that stages have as many layers.

    Source: Grattafiori et al., "The Llama 3 Herd of Models", 2024, section 3.3.2.
    """
    shape, transformer = ModelShape.of(model.config), model.transformer
    embedding = [f"transformer.{name}" for name, _ in transformer.named_children() if name in ("wte", "wpe", "drop")]

    def embed(x: Tensor | None, batch: Batch) -> Tensor:
        return transformer.embed(batch.tokens, batch.positions)

    def block(number: int) -> Layer:
        name = f"transformer.h.{number}"

        def run(x: Tensor | None, batch: Batch) -> Tensor:
            return model.get_submodule(name)(x, batch.positions, batch.documents)

        return Layer(f"block {number}", (name,), run, block_flops(shape, number))

    def head(x: Tensor | None, batch: Batch) -> Tensor:
        return model.loss(model.lm_head(transformer.ln_f(x)), batch.targets)

    layers = [block(number) for number in range(shape.n_layer)]
    first, last = Layer("embedding", tuple(embedding), embed, 0), Layer("head", HEAD, head, head_flops(shape))
    if counts_ends:
        return [layer._replace(cost=block_flops(shape)) for layer in (first, *layers, last)]
    return [joined(first, layers[0]), *layers[1:], last]


def whole_layer(model: Decoder) -> Layer:
    """Return the whole model as one layer that calls it, because the call is compiled."""

    def run(x: Tensor | None, batch: Batch) -> Tensor:
        return model(batch.tokens, batch.targets, batch.positions, batch.documents)[1]

    return Layer("model", ("",), run, 1)


def recompute_model(model: Decoder, mode: str, position: BatchPosition | None = None) -> None:
    """Make a model, plain or divided, recompute activations block by block.

    `full`: a block saves only its input, and is computed twice.  `selective`: a block recomputes large activations that
    need no matrix product with weights: the result of GELU, which the MLP's second layer saves, 4 of a block's 16 saved
    tensors of its input's size; or a gate and its product with the values.  Recomputing the attention core, the
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


def fuse(model: nn.Module) -> None:
    """Fuse a model's GELUs, gates and rotations on the CPU: one pass each, forward and backward.

    Parameters and their names do not change.
    """
    for module in list(model.modules()):
        if isinstance(module, nn.GELU) and module.approximate == "tanh":
            module.__class__ = FusedGELU
        elif type(module) is Gate and isinstance(module.activation, nn.SiLU):
            module.__class__ = FusedGate
        elif type(module) is Heads and module.speeds is not None and not module.has_norms:
            module.__class__ = FusedHeads


class FusedGELU(nn.GELU):
    def forward(self, x: Tensor) -> Tensor:
        return GELUFunction.apply(x) if takes(x) else super().forward(x)


class FusedGate(Gate):
    def forward(self, x: Tensor) -> Tensor:
        return GateFunction.apply(x)


class FusedHeads(Heads):
    def forward(self, qkv: Tensor, positions: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        if self.speeds is None or not takes(qkv):
            return super().forward(qkv, positions)
        heads = qkv.unflatten(-1, (-1, self.head_size))  # (batch, seq, heads, head_size)
        cos, sin = rotations(heads.transpose(1, 2), positions, self.speeds)
        counts = [heads.shape[2] * count // sum(self.head_counts) for count in self.head_counts]
        q, k, v = RotationFunction.apply(heads, cos, sin, counts)
        return self.scale(q.transpose(1, 2)), k.transpose(1, 2), v.transpose(1, 2)
