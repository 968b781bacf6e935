"""Pass times: computation and exposed communication of a stage's passes of a micro-batch.

Source: those of `parallelism.tensor.layers`, `ring_attention`, `sequence_parallel` and `experts.exchange`, whose
collectives are modelled, with the computation that hides each.
"""

from typing import NamedTuple

import numpy as np

from models.flops import attention_flops, head_flops, matrix_flops
from parallelism.planner import counts
from parallelism.planner.counts import precision_of
from parallelism.planner.layout import ParallelLayout, TrainingJob
from parallelism.planner.memory import stages
from parallelism.planner.place import RankPlacement

# A pass is an array of seconds, (kinds, parts).
FORWARD, INPUTS, WEIGHTS = KINDS = range(3)
COMPUTE, TP, SP, EP, ZERO = PARTS = range(5)


class PassContext(NamedTuple):
    """A job, its layout, and the machine it is placed on."""

    job: TrainingJob
    layout: ParallelLayout
    place: RankPlacement
    flops_per_s: float
    least_pass_s: float = 0.0

    @property
    def tokens(self) -> int:
        return counts.tokens(self.job, self.layout)

    @property
    def splits(self) -> bool:
        return stages(self.job, self.layout).splits

    def compute_s(self, flops_per_token: float) -> float:
        return flops_per_token * self.tokens / self.layout.tp / self.flops_per_s

    def gelu_s(self) -> float:
        """Return the seconds of GELU, which reads and writes four times the width, or of a gated MLP's gate."""
        nbytes = counts.mlp_inputs(self.job.model) / self.job.model.n_embd * self.activation_bytes / self.layout.tp
        return nbytes * self.place.network.copy_s_per_byte

    @property
    def activation_bytes(self) -> int:
        """Size of all tokens' activations between split layers, in bytes."""
        return self.tokens * self.job.model.n_embd * precision_of(self.job).activation

    def sum_s(self) -> float:
        """Return the seconds to sum activations over tp ranks, or to reduce-scatter them if sequences are split."""
        collective = "reduce_scatter" if self.layout.sequence_parallel else "all_reduce"
        return self.place.tp.seconds(collective, self.activation_bytes)

    def gather_s(self) -> float:
        """Return the seconds to gather activations that are sharded over tp ranks."""
        return self.place.tp.seconds("all_gather", self.activation_bytes) if self.layout.sequence_parallel else 0.0


def empty() -> np.ndarray:
    return np.zeros((len(KINDS), len(PARTS)))


def block(setting: PassContext) -> np.ndarray:
    """Return the costs of one block."""
    costs, model = empty(), setting.job.model
    matrices, attention = setting.compute_s(matrix_flops(model)), setting.compute_s(attention_flops(model))
    seconds = matrices + attention, matrices + 2 * attention, matrices
    costs[:, COMPUTE] = np.maximum(seconds, setting.least_pass_s)
    width, kv_width = counts.widths(model)
    columns = width + 2 * kv_width, counts.mlp_inputs(model)
    costs[FORWARD, TP] = 2 * (setting.gather_s() + setting.sum_s())
    costs[INPUTS, TP] = sum(column_backward_s(setting, outputs) + setting.gather_s() for outputs in columns)
    costs[FORWARD, SP], costs[INPUTS, SP] = sequence_s(setting, attention)
    if model.num_experts:
        costs[[FORWARD, INPUTS], COMPUTE] += 2 * rows_s(setting)
        costs[[FORWARD, INPUTS], EP] = 2 * crossing_s(setting)
    if setting.layout.recompute == "full":
        costs[INPUTS] += costs[FORWARD]
        costs[INPUTS, TP] -= setting.sum_s()  # the last sum is not repeated, as its result is not saved
    if setting.layout.recompute == "selective":
        costs[INPUTS, COMPUTE] += setting.gelu_s()
    return costs


def column_backward_s(setting: PassContext, outputs: int) -> float:
    """Return the exposed seconds of the collectives of a layer split by outputs.

    The sum of x's gradient overlaps with the computation of the weight gradient, unless that is deferred; the second
    gather of a split x overlaps with the computation of its gradient.
    """
    product_s = setting.compute_s(2 * setting.job.model.n_embd * outputs)
    hidden_s = 0.0 if setting.splits else product_s
    return max(0.0, setting.sum_s() - hidden_s) + max(0.0, setting.gather_s() - product_s)


def sequence_s(setting: PassContext, attention_s: float) -> tuple[float, float]:
    """Return the seconds of attention's exchanges between sp ranks, forward and backward.

    Attention hides the ring shifts, except for the last one, which returns gradients to their owner.
    """
    job, layout, place = setting.job, setting.layout, setting.place
    parts = job.head_ranks(layout.sp)
    ring = layout.sp // parts
    width, kv_width = (w * setting.tokens / layout.tp for w in counts.widths(job.model))
    kv_width *= max(1, parts // (job.model.num_kv_heads // layout.tp))
    itemsize = precision_of(job).activation
    exchange_s = 2 * sum(place.heads.seconds("all_to_all", w * itemsize) for w in (width, kv_width))
    if ring == 1:
        return exchange_s, exchange_s
    shift_s, home_s = (place.ring.seconds(2 * kv_width * size) for size in (itemsize, max(4, itemsize)))
    forward_s = (ring - 1) * max(0.0, shift_s - attention_s / ring)
    backward_s = (ring - 1) * max(0.0, shift_s + home_s - 2 * attention_s / ring) + home_s
    return exchange_s + forward_s, exchange_s + backward_s


def rows_s(setting: PassContext) -> float:
    """Return the seconds of the copies in a dispatch or a combine: each token, and its rows for experts."""
    rows = 1 + setting.job.model.experts_per_token
    return rows * setting.activation_bytes * setting.place.network.copy_s_per_byte


def crossing_s(setting: PassContext) -> float:
    """Return the seconds of a dispatch or a combine between ranks: a barrier, and each token's row to each host."""
    ep = setting.place.ep
    if len(ep.nodes) == 1:
        return setting.place.network.meet_s * (ep.size > 1)
    hosts = min(setting.job.model.experts_per_token, len(ep.nodes))
    return setting.place.network.meet_s + ep.seconds("all_to_all", hosts * setting.activation_bytes)


def head(setting: PassContext) -> np.ndarray:
    """Return the costs of the head and the loss, in addition to the last block."""
    costs, model, tp = empty(), setting.job.model, setting.place.tp
    costs[:, COMPUTE] = setting.compute_s(head_flops(model))
    loss_s = sum(tp.seconds("all_reduce", rows * setting.tokens * 4) for rows in (1, 3))
    costs[FORWARD, TP] = setting.gather_s() + loss_s
    costs[INPUTS, TP] = column_backward_s(setting, model.vocab_size) if setting.layout.tp > 1 else 0.0
    return costs


def embedding(setting: PassContext) -> np.ndarray:
    """Return the costs of the embeddings, in addition to the first block."""
    costs = empty()
    costs[FORWARD, TP], costs[INPUTS, TP] = setting.sum_s(), setting.gather_s()
    return costs


def of_stages(setting: PassContext) -> np.ndarray:
    """Return the costs of each stage.  Shapes: (stages, kinds, parts)."""
    layers = stages(setting.job, setting.layout).layers
    costs = np.array([len(part) for part in layers])[:, None, None] * block(setting)
    costs[0] += embedding(setting)
    costs[-1] += head(setting)
    return costs
