"""Element counts: parameters of a rank, and activations that a block saves for its backward pass.

A tp rank has a shard of the parameters that `training.family.plan_of` splits, and all of the others.

Source: Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", 2022, arXiv 2205.05198,
sections 4.1 to 4.3, for fused attention, which saves no scores.
"""

from typing import NamedTuple

from parallelism.numerics.precision import ElementBytes
from parallelism.planner.flops import mlp_params
from parallelism.planner.layout import ParallelLayout, TrainingJob
from parallelism.planner.shape import ModelShape

STATES = {"adamw": (2, 2), "sgd": (1, 1), "muon": (1, 2)}  # states per element: in blocks' matrices, in others
FULLEST = 1.25  # rows of the fullest ep rank relative to the mean; benchmarks/planning.py has had 1.2 to 1.6


def widths(model: ModelShape) -> tuple[int, int]:
    """Return the widths of q, and of k and v each."""
    return model.n_embd, model.head_size * model.num_kv_heads


def fullest_rows(model: ModelShape, ep: int) -> float:
    """Return the rows per token of the ep rank with the most; a capacity limits its experts' relative to the mean."""
    if not model.num_experts:
        return 1.0
    fullest, limit = FULLEST if ep > 1 else 1.0, model.expert_capacity
    return model.experts_per_token * (fullest if limit is None else min(limit, fullest))


class ParamCounts(NamedTuple):
    """Numbers of parameters of a tp and ep rank: of a block, of its experts and its matrices, and of other layers."""

    model: ModelShape
    tp: int = 1
    ep: int = 1

    def experts(self) -> int:
        return self.model.num_experts // self.ep * mlp_params(self.model) // self.tp

    def matrices(self) -> int:
        width, kv_width = widths(self.model)
        mlps = self.model.num_experts // self.ep or 1
        split = width * (width + 2 * kv_width) + width * width + mlps * mlp_params(self.model)
        return split // self.tp + self.model.num_experts * width

    def block(self) -> int:
        (width, kv_width), hidden = widths(self.model), self.model.hidden_width
        norms, split_biases, whole_biases = 2 * width, width + 2 * kv_width + hidden, 4 * width
        if self.model.num_experts:
            split_biases, whole_biases = split_biases - hidden, whole_biases - width  # experts have no biases
        biases = split_biases // self.tp + whole_biases if self.model.bias else 0
        return self.matrices() + norms + biases

    def vocabulary(self) -> int:
        """Count those of the embedding or the head, which a rank that has both stores once if they are tied."""
        return -(-self.model.vocab_size // self.tp) * self.model.n_embd

    def embedding(self) -> int:
        return self.vocabulary() + self.model.block_size * self.model.n_embd * self.model.embeds_positions

    def norm(self) -> int:
        return self.model.n_embd * (2 if self.model.bias else 1)

    def beside_blocks(self, *stages: range) -> int:
        """Count those beside blocks: embeddings on the rank of the first layer, norm and head on that of the last."""
        first, last = self.ends(*stages)
        head = self.vocabulary() * (last and not (first and self.model.tied))
        return self.embedding() * first + self.norm() * last + head

    def ends(self, *stages: range) -> tuple[bool, bool]:
        """Return whether a rank has the first and the last layer."""
        return any(layers.start == 0 for layers in stages), any(layers.stop == self.model.n_layer for layers in stages)

    def stages(self, *stages: range) -> int:
        """Count those of a rank's stages, each a range of layers."""
        return sum(map(len, stages)) * self.block() + self.beside_blocks(*stages)

    def layer(self, layers: range) -> int:
        """Count those of the largest of some layers: a block, embeddings with a block, or norm and head."""
        first, last = self.ends(layers)
        return max(self.block() + self.embedding() * first, (self.norm() + self.vocabulary()) * last)


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
    width, kv_width = widths(model)
    between, split = num_tokens / between_tp(layout), num_tokens / layout.tp
    if layout.recompute == "full":
        return SavedElements(between * width)
    keeps_result = layout.sp > job.head_ranks(layout.sp) or model.dropout > 0  # of attention in a ring, or dropped
    activation = 2 * between * width + split * (2 * width + 2 * kv_width) + split * width * keeps_result
    activation += split * mlp_saved(model, layout)
    attention = split * model.n_head
    if layout.recompute == "selective":
        activation -= split * model.hidden_width * fullest_rows(model, layout.ep)
    keys = 4 * between if model.dropout else 0  # two keys of 8 bytes
    norm_tensors, norm_numbers = norm_saved(model)
    in_float32 = 2 * norm_numbers * between + keys + attention
    if not model.embeds_positions:
        in_float32 += model.block_size // layout.sp * model.head_size
    params = ParamCounts(model, layout.tp, layout.ep).block()
    return SavedElements(2 * norm_tensors * between * width, activation, in_float32, params)


def norm_saved(model: ModelShape) -> tuple[int, int]:
    """Count the tensors that a norm saves beside its result, and the numbers per token."""
    return (2, 1) if model.has_rms_norms else (1, 2)


def mlp_saved(model: ModelShape, layout: ParallelLayout) -> float:
    """Count the saved elements of a token's MLP over tp shards: the inputs and results of GELU or of a gate.

    A mixture also saves its rows, before and after, and scores, all of which every tp rank holds.
    """
    if not model.num_experts:
        return (3 if model.is_gated else 2) * model.hidden_width
    tp = layout.tp
    row = 2 * model.hidden_width + 2 * tp * model.n_embd
    return fullest_rows(model, layout.ep) * row + 3 * tp * model.num_experts


def mlp_inputs(model: ModelShape) -> int:
    """Count the outputs of the MLP's first layer."""
    return (2 if model.is_gated else 1) * model.hidden_width


def head_saved(job: TrainingJob, layout: ParallelLayout) -> SavedElements:
    """Count the saved elements of the head: the norm's input and result, and the log-probabilities."""
    between = tokens(job, layout) / between_tp(layout) * job.model.n_embd
    head = ParamCounts(job.model, layout.tp).vocabulary()
    return SavedElements(norm_saved(job.model)[0] * between, between, logits(job, layout), head)


def logits(job: TrainingJob, layout: ParallelLayout) -> float:
    return tokens(job, layout) * -(-job.model.vocab_size // layout.tp)
