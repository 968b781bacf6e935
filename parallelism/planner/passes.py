"""Pass times: computation and exposed communication of a stage's passes of a micro-batch.

Source: those of `parallelism.tensor.layers`, `ring_attention`, `sequence_parallel` and `experts.exchange`, whose
collectives are modelled, with the computation that hides each.
"""

from itertools import accumulate
from typing import NamedTuple

import numpy as np

from parallelism.planner import counts
from parallelism.planner.counts import ParamCounts, param_counts
from parallelism.planner.flops import attention_flops, head_flops, matrix_flops
from parallelism.planner.layout import ParallelLayout, TrainingJob
from parallelism.planner.memory import Stages, stages
from parallelism.planner.place import RankPlacement
from parallelism.planner.roofline import BACKWARD, Roofline

# A pass is an array of seconds, (kinds, parts).
FORWARD, INPUTS, WEIGHTS = KINDS = range(3)
COMPUTE, TP, SP, EP, ZERO = PARTS = range(5)


class PassContext(NamedTuple):
    """A job, its layout, and the machine it is placed on; the passes are of a replica whose pp ranks have `speeds`.

    They are 1 by default.
    """

    job: TrainingJob
    layout: ParallelLayout
    placement: RankPlacement
    speeds: tuple[float, ...] = ()

    @property
    def cut(self) -> Stages:
        return stages(self.job, self.layout, self.cut_by)

    @property
    def cut_by(self) -> tuple[float, ...]:
        """The speeds of pp ranks by which layers are assigned to them, if these are unequal."""
        return self.placement.stage_speeds if len({*self.placement.stage_speeds}) > 1 else ()

    @property
    def overlaps(self) -> bool:
        return self.placement.machine.overlaps

    @property
    def params(self) -> ParamCounts:
        return param_counts(self.job.model, self.layout.tp, self.layout.ep)

    @property
    def tokens(self) -> int:
        return counts.tokens(self.job, self.layout)

    @property
    def activation_bytes(self) -> int:
        """Size of all tokens' activations between split layers, in bytes."""
        return self.tokens * self.job.model.n_embd * self.job.precision.activation

    def compute_s(self, flops_per_token: float) -> float:
        return flops_per_token * self.tokens / self.layout.tp / self.placement.machine.flops_per_s

    def copy_s(self, nbytes: float) -> float:
        return nbytes * self.placement.network.copy_s_per_byte

    def sum_s(self) -> float:
        """Return the seconds to sum activations over tp ranks, or to reduce-scatter them if sequences are split."""
        collective = "reduce_scatter" if self.layout.sequence_parallel else "all_reduce"
        return self.placement.tp.seconds(collective, self.activation_bytes)

    def gather_s(self) -> float:
        """Return the seconds to gather activations that are sharded over tp ranks."""
        return self.placement.tp.seconds("all_gather", self.activation_bytes) if self.layout.sequence_parallel else 0.0

    def block(self) -> np.ndarray:
        """Return the costs of one block."""
        costs, model = np.zeros((len(KINDS), len(PARTS))), self.job.model
        computing_s, attention = self.block_s()
        least_s = self.placement.machine.least_pass_s
        costs[:, COMPUTE] = np.maximum(computing_s, least_s) if self.overlaps else computing_s + least_s
        width, kv_width = counts.widths(model)
        columns = width + 2 * kv_width, counts.mlp_inputs(model)
        costs[FORWARD, TP] = 2 * (self.gather_s() + self.sum_s())
        costs[INPUTS, TP] = sum(self.column_backward_s(outputs) + self.gather_s() for outputs in columns)
        costs[FORWARD, SP], costs[INPUTS, SP] = self.sequence_s(attention)
        if model.num_experts:  # a dispatch or a combine copies each token and its rows for experts
            costs[[FORWARD, INPUTS], COMPUTE] += 2 * self.copy_s((1 + model.experts_per_token) * self.activation_bytes)
            costs[[FORWARD, INPUTS], EP] = 2 * self.crossing_s()
        if self.layout.recompute == "full":
            costs[INPUTS] += costs[FORWARD]
            costs[INPUTS, TP] -= self.sum_s()  # the last sum is not repeated, as its result is not saved
        if self.layout.recompute == "selective" and self.placement.machine.roofline is None:
            relative = counts.mlp_inputs(model) / model.n_embd  # GELU, or a gate, reads and writes so many activations
            costs[INPUTS, COMPUTE] += self.copy_s(relative * self.activation_bytes / self.layout.tp)
        return costs

    def block_s(self) -> tuple[np.ndarray, float]:
        """Return the seconds of a block's computation by kind of pass, and of its attention in a forward pass."""
        model, roofline = self.job.model, self.placement.machine.roofline
        if roofline is None:
            matrices, attention = self.compute_s(matrix_flops(model)), self.compute_s(attention_flops(model))
            return np.array((matrices + attention, matrices + 2 * attention, matrices)), attention
        kernels, tp, (width, kv_width) = self.job.kernels, self.layout.tp, counts.widths(model)
        rows = self.tokens * counts.fullest_rows(model, self.layout.ep)
        layers: list[tuple[float, float, float]] = [
            (self.tokens, model.n_embd, (width + 2 * kv_width) / tp),
            (self.tokens, width / tp, model.n_embd),
        ]
        layers += [(rows, model.n_embd, counts.mlp_inputs(model) / tp), (rows, model.hidden_width / tp, model.n_embd)]
        products = np.array([self.product_passes(roofline, *layer) for layer in layers]).sum(0)
        length = attention_flops(model) / (4 * width)  # with windows, the mean of the layers
        attention = roofline.attention_s(kernels, self.tokens, width / tp, model.n_head / tp, length)
        moves = roofline.block_moves_s(kernels, model, self.tokens / counts.between_tp(self.layout), self.tokens / tp)
        return products + attention * np.array((1, 2.5, 0)) + moves * np.array((1, BACKWARD, 0)), attention

    def product_passes(self, roofline: Roofline, rows: float, inner: float, columns: float) -> list[float]:
        """Return the seconds of a linear layer's products: of the forward pass, and of both gradients."""
        forward, inputs, weights = (rows, inner, columns), (rows, columns, inner), (inner, rows, columns)
        return [roofline.product_s(*each) for each in (forward, inputs, weights)]

    def column_backward_s(self, outputs: int) -> float:
        """Return the exposed seconds of the collectives of a layer split by outputs.

        The sum of x's gradient overlaps with the computation of the weight gradient, unless that is deferred; the
        second gather of a split x overlaps with the computation of its gradient.
        """
        product_s = self.compute_s(2 * self.job.model.n_embd * outputs) * self.overlaps
        hidden_s = 0.0 if self.cut.splits else product_s
        return max(0.0, self.sum_s() - hidden_s) + max(0.0, self.gather_s() - product_s)

    def sequence_s(self, attention_s: float) -> tuple[float, float]:
        """Return the seconds of attention's exchanges between sp ranks, forward and backward.

        Attention hides the ring shifts, except for the last one, which returns gradients to their owner.
        """
        job, layout, placement, itemsize = self.job, self.layout, self.placement, self.job.precision.activation
        parts = job.head_ranks(layout.sp)
        ring = layout.sp // parts
        width, kv_width = (w * self.tokens / layout.tp for w in counts.widths(job.model))
        kv_width *= max(1, parts // (job.model.num_kv_heads // layout.tp))
        exchange_s = 2 * sum(placement.heads.seconds("all_to_all", w * itemsize) for w in (width, kv_width))
        if ring == 1:
            return exchange_s, exchange_s
        shift_s, home_s = (placement.ring.seconds(2 * kv_width * size) for size in (itemsize, max(4, itemsize)))
        attention_s *= self.overlaps
        forward_s = (ring - 1) * max(0.0, shift_s - attention_s / ring)
        backward_s = (ring - 1) * max(0.0, shift_s + home_s - 2 * attention_s / ring) + home_s
        return exchange_s + forward_s, exchange_s + backward_s

    def crossing_s(self) -> float:
        """Return the seconds of a dispatch or a combine between ranks: a barrier, and each token's row to each host."""
        ep, meet_s = self.placement.ep, self.placement.network.meet_s
        if len(ep.nodes) == 1:
            return meet_s * (ep.size > 1)
        hosts = min(self.job.model.experts_per_token, len(ep.nodes))
        return meet_s + ep.seconds("all_to_all", hosts * self.activation_bytes)

    def head(self) -> np.ndarray:
        """Return the costs of the head and the loss, in addition to the last block."""
        costs, model, tp = np.zeros((len(KINDS), len(PARTS))), self.job.model, self.placement.tp
        roofline = self.placement.machine.roofline
        if roofline is None:
            costs[:, COMPUTE] = self.compute_s(head_flops(model))
        else:
            columns = model.vocab_size / self.layout.tp
            costs[:, COMPUTE] = self.product_passes(roofline, self.tokens, model.n_embd, columns)
            costs[[FORWARD, INPUTS], COMPUTE] += roofline.loss_s(self.job.kernels, self.tokens * columns) / 2
        loss_s = sum(tp.seconds("all_reduce", rows * self.tokens * 4) for rows in (1, 3))
        costs[FORWARD, TP] = self.gather_s() + loss_s
        costs[INPUTS, TP] = self.column_backward_s(model.vocab_size) if self.layout.tp > 1 else 0.0
        return costs

    def stage_costs(self) -> np.ndarray:
        """Return the costs of each stage of the replica.  Shapes: (stages, kinds, parts)."""
        costs = np.array(self.cut.blocks)[:, None, None] * self.block()
        costs[0, FORWARD, TP] += self.sum_s()  # of the embeddings
        costs[0, INPUTS, TP] += self.gather_s()
        costs[-1] += self.head()
        if self.job.reproducible:  # each gradient is read, and the integers are read and written
            params = np.array([self.params.stages(layers) for layers in self.cut.layers])
            nbytes = params * (self.job.precision.parameter + 2 * self.job.precision.gradient)
            costs[:, WEIGHTS, COMPUTE] += self.copy_s(1) * nbytes / 2
        for rank, speed in enumerate(self.speeds if {*self.speeds} != {1.0} else ()):
            costs[list(self.cut.of_rank[rank]), :, COMPUTE] /= speed
        return costs

    def least_s(self, costs: np.ndarray) -> float:
        """Return a lower bound of a step: each rank's passes, forward passes before them, and backward passes after.

        With split backward passes, a rank computes weight gradients while it waits for the last backward passes.
        """
        kinds, number = costs.sum(2), self.layout.num_micro_batches
        backward = (kinds[:, INPUTS] + kinds[:, WEIGHTS]) * (not self.cut.splits)
        before, after = ([0.0, *accumulate(passes.tolist())] for passes in (kinds[:, FORWARD], backward))
        own_s = (number * float(kinds[list(own)].sum()) + before[own[0]] + after[own[0]] for own in self.cut.of_rank)
        return max(own_s)
