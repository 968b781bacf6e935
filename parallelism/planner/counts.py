"""Element counts: parameters of a rank, and activations that a block saves for its backward pass.

A tp rank has a shard of the parameters that `training.parallel.decoder.plan_of` splits, and all of the others.

Source: Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", 2022, arXiv 2205.05198,
sections 4.1 to 4.3, for fused attention, which saves no scores.
"""

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

from parallelism.numerics.precision import ElementBytes
from parallelism.planner.flops import attention_params, mlp_params
from parallelism.planner.layout import ParallelLayout, TrainingJob
from parallelism.planner.shape import ModelShape, attention_span, kv_width, q_width

STATES = {"adamw": (2, 2), "sgd": (1, 1), "muon": (1, 2)}  # states per element: in blocks' matrices, in others
FULLEST = 1.25  # rows of the fullest ep rank relative to the mean; benchmarks/planner.py has had 1.2 to 1.6


def widths(model: ModelShape) -> tuple[int, int]:
    """Return the widths of q, and of k and v each."""
    return q_width(model), kv_width(model)


def fullest_rows(model: ModelShape, ep: int) -> float:
    """Return the rows per token of the ep rank with the most; a capacity limits its experts' relative to the mean."""
    if not model.num_experts:
        return 1.0
    fullest, limit = FULLEST if ep > 1 else 1.0, model.expert_capacity
    return model.experts_per_token * (fullest if limit is None else min(limit, fullest))


@dataclass(frozen=True)
class ParamCounts:
    """Numbers of parameters of a tp and ep rank: of a block, of its experts and its matrices, and of other layers."""

    model: ModelShape
    tp: int = 1
    ep: int = 1

    @cached_property
    def experts(self) -> int:
        return self.model.num_experts // self.ep * mlp_params(self.model) // self.tp

    @cached_property
    def matrices(self) -> int:
        mlps = self.model.num_experts // self.ep or 1
        split = attention_params(self.model) + mlps * mlp_params(self.model)
        return split // self.tp + self.model.num_experts * self.model.n_embd

    @cached_property
    def block(self) -> int:
        model = self.model
        norms = (4 if model.norms == "around" else 2) * self.norm + model.has_qk_norms * 2 * model.head_size
        split = (model.bias or model.qkv_bias) * (q_width(model) + 2 * kv_width(model))
        whole = (model.bias or model.out_bias) * model.n_embd
        if (model.bias or model.mlp_bias) and not model.num_experts:  # experts have no biases
            split, whole = split + mlp_inputs(model), whole + model.n_embd
        return self.matrices + norms + split // self.tp + whole

    @cached_property
    def vocabulary(self) -> int:
        """Count those of the embedding or the head, which a rank that has both stores once if they are tied."""
        return -(-self.model.vocab_size // self.tp) * self.model.n_embd

    @cached_property
    def embedding(self) -> int:
        return self.vocabulary + self.model.block_size * self.model.n_embd * self.model.embeds_positions

    @cached_property
    def norm(self) -> int:
        return self.model.n_embd * (2 if self.model.bias else 1)

    def beside_blocks(self, *stages: range) -> int:
        """Count those beside blocks: embeddings on the rank of the first layer, norm and head on that of the last."""
        first, last = self.ends(*stages)
        head = self.vocabulary * (last and not (first and self.model.tied))
        return self.embedding * first + self.norm * last + head

    def ends(self, *stages: range) -> tuple[bool, bool]:
        """Return whether a rank has the first and the last layer."""
        most = self.model.n_layer + 2
        return any(layers.start == 0 for layers in stages), any(layers.stop == most for layers in stages)

    def stages(self, *stages: range) -> int:
        """Count those of a rank's stages, each a range of layers: 0 is the embedding, and the last one the head."""
        return sum(map(self.blocks, stages)) * self.block + self.beside_blocks(*stages)

    def blocks(self, layers: range) -> int:
        return len(range(max(1, layers.start), min(layers.stop, self.model.n_layer + 1)))

    def layer(self, layers: range) -> int:
        """Count those of the largest of some layers: a block, embeddings with a block, or norm and head."""
        first, last = self.ends(layers)
        block = self.block * bool(self.blocks(layers))
        return max(block + self.embedding * first, (self.norm + self.vocabulary) * last)


@lru_cache(maxsize=1024)
def param_counts(model: ModelShape, tp: int = 1, ep: int = 1) -> ParamCounts:
    return ParamCounts(model, tp, ep)


def state_elements(optimizer: str, params: int, matrices: int) -> int:
    """Count an optimizer's state elements for `params` parameters, `matrices` of them in blocks' matrices.

    >>> state_elements("adamw", 10, 8), state_elements("muon", 10, 8)
    (20, 12)
    """
    of_matrices, of_others = STATES[optimizer]
    return of_matrices * matrices + of_others * (params - matrices)


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


def block_saved(job: TrainingJob, layout: ParallelLayout) -> SavedElements:
    """Count a block's saved elements: its input alone with full recomputation.

    Otherwise they are the norms' inputs and results, with two numbers per token, q, k and v, attention's result and
    log-sum-exp, and GELU's inputs and results.  Dropout saves a key per token; selective recomputation omits the
    results of GELU or of a gate.  An RMSNorm saves one number per token, and its result before the weights, too;
    rotations save cosines and sines.
    """
    model, num_tokens = job.model, tokens(job, layout)
    width, (of_queries, of_keys) = model.n_embd, widths(model)
    between, split = num_tokens / between_tp(layout), num_tokens / layout.tp
    if layout.recompute == "full":
        return SavedElements(between * width)
    keeps_result = layout.sp > job.head_ranks(layout.sp) or model.dropout > 0  # of attention in a ring, or dropped
    activation = 2 * between * width + split * (2 * of_queries + 2 * of_keys) + split * of_queries * keeps_result
    activation += split * mlp_saved(model, layout)
    if job.kernels.compiled:  # the results of GELU or of a gate are computed again
        activation -= split * model.hidden_width * fullest_rows(model, layout.ep)
    if not job.kernels.fused_attention:  # scores, dropped ones, and a mask of a byte
        activation += 2.5 * split * model.n_head * model.block_size
    attention = split * model.n_head
    if layout.recompute == "selective" and not job.kernels.compiled:
        activation -= split * model.hidden_width * fullest_rows(model, layout.ep)
    keys = 4 * between if model.dropout else 0  # two keys of 8 bytes
    norm_tensors, norm_numbers = norm_saved(job)
    in_float32 = 2 * norm_numbers * between + keys + attention
    if not model.embeds_positions:
        in_float32 += model.block_size // layout.sp * model.head_size
    if model.has_qk_norms:  # q, k and v as they are before, and normed
        activation += split * (2 * of_queries + 3 * of_keys)
        in_float32 += split * (model.n_head + model.num_kv_heads)
    if model.norms == "around":
        activation += 2 * norm_tensors * between * width
        in_float32 += 2 * norm_numbers * between
    in_float32 += window_fraction(model) * (model.block_size // layout.sp) ** 2
    params = param_counts(model, layout.tp, layout.ep).block
    return SavedElements(2 * norm_tensors * between * width, activation, in_float32, params)


@lru_cache(maxsize=64)
def window_fraction(model: ModelShape) -> float:
    """Return the fraction of the layers that have a window shorter than the sequence, and so a mask."""
    return sum(attention_span(model, layer) < model.block_size for layer in range(model.n_layer)) / model.n_layer


def norm_saved(job: TrainingJob) -> tuple[int, int]:
    """Count the tensors that a norm saves beside its result, and the numbers per token."""
    if not job.model.has_rms_norms:
        return 1, 2
    return (1 if job.kernels.compiled else 2), 1


def mlp_saved(model: ModelShape, layout: ParallelLayout) -> float:
    """Count the saved elements of a token's MLP over tp shards: the inputs and results of GELU or of a gate.

    A mixture also saves its rows, before and after, and scores, all of which every tp rank holds.
    """
    hidden = mlp_inputs(model) + model.hidden_width
    if model.is_gated and model.activation != "silu" and layout.recompute == "none":  # whose gate is not one operation
        hidden += model.hidden_width
    if not model.num_experts:
        return hidden
    tp = layout.tp
    row = hidden + (3 if layout.ep == 1 else 2) * tp * model.n_embd  # the sum of a token's rows saves them, too
    return fullest_rows(model, layout.ep) * row + 3 * tp * model.num_experts


def mlp_inputs(model: ModelShape) -> int:
    """Count the outputs of the MLP's first layer."""
    return (2 if model.is_gated else 1) * model.hidden_width


def head_saved(job: TrainingJob, layout: ParallelLayout) -> SavedElements:
    """Count the saved elements of the head: the norm's input and result, and the log-probabilities."""
    between = tokens(job, layout) / between_tp(layout) * job.model.n_embd
    head = param_counts(job.model, layout.tp).vocabulary
    saved = SavedElements(norm_saved(job)[0] * between, between, logits(job, layout), head)
    if job.kernels.fused_loss:
        saved = saved._replace(activation=between + saved.float32, float32=0.0)
    return saved


def logits(job: TrainingJob, layout: ParallelLayout) -> float:
    return tokens(job, layout) * -(-job.model.vocab_size // layout.tp)
