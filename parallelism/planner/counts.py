"""Element counts: parameters of a rank, and activations that a block saves for its backward pass.

A tp rank has a shard of the parameters that `training.family.plan_of` splits, and all of the others.

Source: Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", 2022, arXiv 2205.05198,
sections 4.1 to 4.3, for fused attention, which saves no scores.
"""

from typing import NamedTuple

from models.config import ModelConfig
from models.flops import mlp_params
from parallelism.numerics.precision import ElementBytes, Precision
from parallelism.planner.layout import ParallelLayout, TrainingJob

STATES = {"adamw": (2, 2), "sgd": (1, 1), "muon": (1, 2)}  # states per element: in blocks' matrices, in others


def precision_of(job: TrainingJob) -> ElementBytes:
    return Precision(job.dtype, job.master_weights, job.grad_dtype).element_bytes


FULLEST = 1.25  # rows of the fullest ep rank relative to the mean; benchmarks/planning.py has had 1.2 to 1.6


def widths(model: ModelConfig) -> tuple[int, int]:
    """Return the widths of q, and of k and v each."""
    return model.n_embd, model.head_size * model.num_kv_heads


def fullest_rows(model: ModelConfig, ep: int) -> float:
    """Return the rows per token of the ep rank with the most; a capacity limits its experts' relative to the mean."""
    fullest, limit = FULLEST if ep > 1 else 1.0, model.expert_capacity
    return model.experts_per_token * (fullest if limit is None else min(limit, fullest))


def expert_params(model: ModelConfig, tp: int, ep: int) -> int:
    """Count a rank's expert parameters in a block."""
    return 8 * (model.num_experts // ep) * model.n_embd**2 // tp


def block_matrices(model: ModelConfig, tp: int, ep: int = 1) -> int:
    width, kv_width = widths(model)
    mlps = model.num_experts // ep or 1
    split = width * (width + 2 * kv_width) + width * width + mlps * mlp_params(model)
    return split // tp + model.num_experts * width


def block_params(model: ModelConfig, tp: int, ep: int = 1) -> int:
    width, kv_width = widths(model)
    norms, split_biases, whole_biases = 2 * width, width + 2 * kv_width + 4 * width, 4 * width
    if model.num_experts:
        split_biases, whole_biases = split_biases - 4 * width, whole_biases - width  # experts have no biases
    biases = split_biases // tp + whole_biases if model.bias else 0
    return block_matrices(model, tp, ep) + norms + biases


def state_elements(optimizer: str, params: int, matrices: int) -> int:
    """Count an optimizer's state elements for `params` parameters, `matrices` of them in blocks' matrices.

    >>> state_elements("adamw", 10, 8), state_elements("muon", 10, 8)
    (20, 12)
    """
    of_matrices, of_others = STATES[optimizer]
    return of_matrices * matrices + of_others * (params - matrices)


def vocabulary_params(model: ModelConfig, tp: int) -> int:
    """Count the parameters of the embedding or the head, which a rank that has both stores once if they are tied."""
    return -(-model.vocab_size // tp) * model.n_embd


def embedding_params(model: ModelConfig, tp: int) -> int:
    return vocabulary_params(model, tp) + model.block_size * model.n_embd * model.embeds_positions


def norm_params(model: ModelConfig) -> int:
    """Count the parameters of the final norm."""
    return model.n_embd * (2 if model.bias else 1)


def stage_params(model: ModelConfig, tp: int, ep: int, layers: range) -> int:
    """Count the parameters of some layers; the first has the embeddings, the last the norm and the head."""
    first, last = layers.start == 0, layers.stop == model.n_layer
    count = len(layers) * block_params(model, tp, ep)
    count += embedding_params(model, tp) * first + norm_params(model) * last
    return count + vocabulary_params(model, tp) * (last and not (first and model.tied))


def layer_params(model: ModelConfig, tp: int, ep: int, layers: range) -> int:
    """Count the parameters of the largest of some layers: a block, embeddings with a block, or norm and head."""
    count = block_params(model, tp, ep) + embedding_params(model, tp) * (layers.start == 0)
    return max(count, (norm_params(model) + vocabulary_params(model, tp)) * (layers.stop == model.n_layer))


def rank_params(model: ModelConfig, tp: int, ep: int, stages: list[range]) -> int:
    """Count the parameters of a rank's stages."""
    count = sum(stage_params(model, tp, ep, layers) for layers in stages)
    ends = [layers.start == 0 for layers in stages], [layers.stop == model.n_layer for layers in stages]
    has_both = any(ends[0]) and any(ends[1]) and len(stages) > 1 and model.tied
    return count - vocabulary_params(model, tp) * has_both


class SavedElements(NamedTuple):
    """Elements saved of a micro-batch: residual stream, other activations, float32 values, and parameters."""

    residual: float
    activation: float = 0.0
    float32: float = 0.0
    cast: float = 0.0

    def nbytes(self, precision: ElementBytes) -> float:
        sizes = precision.residual, precision.activation, 4, precision.cast
        return sum(count * size for count, size in zip(self, sizes, strict=True))


def tokens(job: TrainingJob, layout: ParallelLayout) -> int:
    """Count a rank's tokens of a micro-batch."""
    return layout.micro_batch_size * job.model.block_size // layout.sp


def between_tp(layout: ParallelLayout) -> int:
    """Return the number of tp ranks over which activations between split layers are sharded."""
    return layout.tp if layout.sequence_parallel else 1


def block_kept(job: TrainingJob, layout: ParallelLayout) -> SavedElements:
    """Count a block's saved elements: its input alone with full recomputation.

    Otherwise they are the norms' inputs and results, with two numbers per token, q, k and v, attention's result and
    log-sum-exp, and GELU's inputs and results.  Dropout saves a key per token; selective recomputation omits the
    results of GELU or of a gate.  An RMSNorm saves one number per token, and its result before the weights, too;
    rotations save cosines and sines.
    """
    model, num_tokens = job.model, tokens(job, layout)
    width, kv_width = widths(model)
    between, split = num_tokens / between_tp(layout), num_tokens / layout.tp
    if layout.recompute == "full":
        return SavedElements(between * width)
    keeps_result = layout.sp > job.head_ranks(layout.sp) or model.dropout > 0  # of attention in a ring, or dropped
    activation = 2 * between * width + split * (2 * width + 2 * kv_width) + split * width * keeps_result
    activation += split * mlp_kept(model, layout)
    attention = split * model.n_head
    if layout.recompute == "selective":
        activation -= split * hidden(model, layout.ep)
    keys = 4 * between if model.dropout else 0  # two keys of 8 bytes
    norm_tensors, norm_numbers = norm_kept(model)
    in_float32 = 2 * norm_numbers * between + keys + attention
    if not model.embeds_positions:
        in_float32 += model.block_size // layout.sp * model.head_size
    params = block_params(model, layout.tp, layout.ep)
    return SavedElements(2 * norm_tensors * between * width, activation, in_float32, params)


def norm_kept(model: ModelConfig) -> tuple[int, int]:
    """Count the tensors that a norm saves beside its result, and the numbers per token."""
    return (2, 1) if model.has_rms_norms else (1, 2)


def mlp_kept(model: ModelConfig, layout: ParallelLayout) -> float:
    """Count the saved elements of a token's MLP over tp shards: the inputs and results of GELU or of a gate.

    A mixture also saves its rows, before and after, and scores, all of which every tp rank holds.
    """
    if not model.num_experts:
        return (3 if model.is_gated else 2) * model.hidden_width
    tp = layout.tp
    return fullest_rows(model, layout.ep) * (8 + 2 * tp) * model.n_embd + 3 * tp * model.num_experts


def mlp_inputs(model: ModelConfig) -> int:
    """Count the outputs of the MLP's first layer."""
    return (2 if model.is_gated else 1) * model.hidden_width


def hidden(model: ModelConfig, ep: int) -> float:
    """Count a token's elements in the MLP's hidden layer: those that selective recomputation does not save."""
    return model.hidden_width * (fullest_rows(model, ep) if model.num_experts else 1)


def head_kept(job: TrainingJob, layout: ParallelLayout) -> SavedElements:
    """Count the saved elements of the head: the norm's input and result, and the log-probabilities."""
    between = tokens(job, layout) / between_tp(layout) * job.model.n_embd
    head = vocabulary_params(job.model, layout.tp)
    return SavedElements(norm_kept(job.model)[0] * between, between, logits(job, layout), head)


def logits(job: TrainingJob, layout: ParallelLayout) -> float:
    return tokens(job, layout) * -(-job.model.vocab_size // layout.tp)
