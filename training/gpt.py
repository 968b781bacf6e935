"""What knows a GPT as well as how it is divided: which module is sharded how, and which recompute activations."""

from __future__ import annotations

from torch import nn

from models.gpt import GPT, CausalAttention
from parallelism.numerics.dropout import BatchPosition
from parallelism.numerics.recomputation import recompute
from parallelism.sequence.sequence_parallel import DroppingAttention
from parallelism.tensor.sharding_plan import (
    Attention,
    ColumnParallel,
    Loss,
    RowParallel,
    SequenceRegion,
    Strategy,
    Vocabulary,
)

MODES = ("full", "selective")  # of recomputation


def gpt2_plan(vocab_size: int, n_head: int, n_kv_head: int | None = None) -> dict[str, Strategy]:
    """A GPT-2, modules named as Hugging Face names them: one sum over the ranks for attention, one for the MLP."""
    kv, vocabulary, between = n_kv_head or n_head, Vocabulary(vocab_size), SequenceRegion()
    return {
        "transformer.wte": vocabulary,
        "transformer.wpe": between,
        "transformer.h.*.ln_*": between,
        "transformer.h.*.attn.c_attn": ColumnParallel(pieces=(n_head, kv, kv)),
        "transformer.h.*.attn.c_proj": RowParallel(),
        "transformer.h.*.mlp.c_fc": ColumnParallel(),
        "transformer.h.*.mlp.c_proj": RowParallel(),
        "transformer.ln_f": between,
        "transformer.drop": between,
        "transformer.h.*dropout": between,
        "transformer.h.*.attn.attend": Attention(n_head, kv),
        "lm_head": vocabulary,
        "loss": Loss(vocab_size),
    }


def recompute_model(model: GPT, mode: str, place: BatchPosition | None = None) -> None:
    """Let a GPT, plain or divided, recompute activations, block by block.

    `full`: a block keeps its input alone, and is computed twice.  `selective`: it recomputes what is large and takes no
    matrix product of weights.  That is the GELU, which makes what the MLP's second layer keeps: 4 of the 16 tensors as
    large as the input that a block keeps.  The core of attention, which the source is about, is recomputed where it
    keeps the scores, as with dropout of them; fused, it keeps its output and no scores, and there is nothing to gain.

    Raises: ValueError for an unknown mode.
    """
    if mode not in MODES:
        raise ValueError(f"recompute mode {mode!r} is unknown: use {' or '.join(MODES)}")
    for block in model.transformer.h:
        if mode == "full":
            recompute(block, place)
        else:
            recompute(block.get_submodule("mlp"), place, "project")
            for core in cores_with_scores(block.get_submodule("attn.attend")):
                recompute(core, place)


def cores_with_scores(attention: nn.Module) -> list[nn.Module]:
    """What keeps the probabilities that it drops, within what attends.  A ring computes them again anyway."""
    cores: list[nn.Module] = [core for core in attention.modules() if isinstance(core, DroppingAttention)]
    return cores or [core for core in attention.modules() if isinstance(core, CausalAttention) and core.dropout]
