"""What a rank holds of a GPT, counted in elements: parameters, and what a block keeps for its backward pass.

A rank of tp has a part of what `parallelism.tensor.sharding_plan.gpt2_plan` splits, and the whole of the rest.

Source: Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", 2022, arXiv 2205.05198,
sections 4.1 to 4.3, for attention that is computed as one, and so keeps no scores.
"""

from __future__ import annotations

from typing import NamedTuple

from models.config import GPTConfig
from parallelism.numerics.precision import ElementBytes, Precision
from parallelism.planner.layout import ParallelLayout, TrainingJob


def precision_of(job: TrainingJob) -> ElementBytes:
    return Precision(job.dtype, job.master_weights, job.grad_dtype).element_bytes


def widths(model: GPTConfig) -> tuple[int, int]:
    """Of q, and of k and v each."""
    return model.n_embd, model.n_embd // model.n_head * model.num_kv_heads


def expert_params(model: GPTConfig, tp: int, ep: int) -> int:
    """Of a rank's experts of a block."""
    return 8 * (model.num_experts // ep) * model.n_embd**2 // tp


def block_params(model: GPTConfig, tp: int, ep: int = 1) -> int:
    width, kv_width = widths(model)
    mlps = model.num_experts // ep or 1
    split = width * (width + 2 * kv_width) + width * width + 8 * mlps * width * width
    norms, split_biases, whole_biases = 2 * width, width + 2 * kv_width + 4 * width, 4 * width
    if model.num_experts:
        split_biases, whole_biases = split_biases - 4 * width, whole_biases - width  # the experts have none
    biases = split_biases // tp + whole_biases if model.bias else 0
    return split // tp + norms + biases + model.num_experts * width


def vocabulary_params(model: GPTConfig, tp: int) -> int:
    """Of the embedding, which the head shares where a rank has both."""
    return -(-model.vocab_size // tp) * model.n_embd


def embedding_params(model: GPTConfig, tp: int) -> int:
    return vocabulary_params(model, tp) + model.block_size * model.n_embd


def norm_params(model: GPTConfig) -> int:
    """Of the last norm."""
    return model.n_embd * (2 if model.bias else 1)


def stage_params(model: GPTConfig, tp: int, ep: int, layers: range) -> int:
    """Of some layers, of which the first has the embeddings and the last the norm and the head, unless both are."""
    first, last = layers.start == 0, layers.stop == model.n_layer
    found = len(layers) * block_params(model, tp, ep)
    found += embedding_params(model, tp) * first + norm_params(model) * last
    return found + vocabulary_params(model, tp) * (last and not first)


def layer_params(model: GPTConfig, tp: int, ep: int, layers: range) -> int:
    """Of the largest of some layers: a block, that with the embeddings, or the norm and the head."""
    found = block_params(model, tp, ep) + embedding_params(model, tp) * (layers.start == 0)
    return max(found, (norm_params(model) + vocabulary_params(model, tp)) * (layers.stop == model.n_layer))


def rank_params(model: GPTConfig, tp: int, ep: int, stages: list[range]) -> int:
    """Of the stages of a rank."""
    found = sum(stage_params(model, tp, ep, layers) for layers in stages)
    ends = [layers.start == 0 for layers in stages], [layers.stop == model.n_layer for layers in stages]
    has_both = any(ends[0]) and any(ends[1]) and len(stages) > 1
    return found - vocabulary_params(model, tp) * has_both


class SavedElements(NamedTuple):
    """Elements kept of a micro-batch: of the residual stream, other activations, what is in float32, and parameters."""

    residual: float
    activation: float = 0.0
    float32: float = 0.0
    cast: float = 0.0

    def nbytes(self, precision: ElementBytes) -> float:
        sizes = precision.residual, precision.activation, 4, precision.cast
        return sum(count * size for count, size in zip(self, sizes, strict=True))


def tokens(job: TrainingJob, layout: ParallelLayout) -> int:
    """Of a micro-batch, that a rank has."""
    return layout.micro_batch_size * job.model.block_size // layout.sp


def between_tp(layout: ParallelLayout) -> int:
    """In how many parts tp ranks have what lies between split layers."""
    return layout.tp if layout.sequence_parallel else 1


def block_kept(job: TrainingJob, layout: ParallelLayout) -> SavedElements:
    """With full recomputation its input, else the inputs of both norms and all that follows.

    Those are the norms' results, with two numbers a token, q, k and v, attention's result and the log of its sums, the
    inputs of GELU and its results; with dropout the masks, and attention's probabilities, masked and not, and theirs,
    unless keys go round a ring.  Selective recomputation spares GELU's results, and the probabilities.
    """
    model, num_tokens = job.model, tokens(job, layout)
    width, kv_width = widths(model)
    between, split = num_tokens / between_tp(layout), num_tokens / layout.tp
    if layout.recompute == "full":
        return SavedElements(between * width)
    parts = job.head_ranks(layout.sp)
    in_ring = layout.sp > parts
    activation = 2 * between * width + split * (2 * width + 2 * kv_width) + split * width * in_ring
    activation += split * mlp_kept(model, layout.tp)
    attention = split * model.n_head
    if layout.recompute == "selective":
        activation -= 4 * split * width * (model.experts_per_token if model.num_experts else 1)
    if model.dropout:
        activation += 2 * between * width
        attention *= 1 if in_ring or layout.recompute == "selective" else 3 * model.block_size
    return SavedElements(
        2 * between * width, activation, 4 * between + attention, block_params(model, layout.tp, layout.ep)
    )


def mlp_kept(model: GPTConfig, tp: int) -> float:
    """Of a token, in tp parts: the inputs and results of GELU; of a mixture also rows, before and after, and scores.

    Each rank of tp has the whole of rows and scores.
    """
    if not model.num_experts:
        return 8 * model.n_embd
    return model.experts_per_token * (8 + 2 * tp) * model.n_embd + 3 * tp * model.num_experts


def head_kept(job: TrainingJob, layout: ParallelLayout) -> SavedElements:
    """The norm's input and result, and the log of the probabilities."""
    between = tokens(job, layout) / between_tp(layout) * job.model.n_embd
    return SavedElements(between, between, logits(job, layout), vocabulary_params(job.model, layout.tp))


def logits(job: TrainingJob, layout: ParallelLayout) -> float:
    return tokens(job, layout) * -(-job.model.vocab_size // layout.tp)
