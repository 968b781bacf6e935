"""Times of a device's kernels by their shapes: matrix products, attention, and what only moves bytes.

A kernel takes as long as its operations or its bytes, whichever takes longer.  Source: Williams, Waterman, Patterson,
"Roofline: An Insightful Visual Performance Model for Multicore Architectures", 2009.
"""

from __future__ import annotations

from typing import NamedTuple

from parallelism.planner.shape import KernelKinds, ModelShape

ITEM = 2  # bytes of an element, of bfloat16 and float16
# Elements of the residual stream's width that a token's element-wise kernels read and write in a forward pass: of two
# norms, which in float32 take several kernels if they are not compiled, and of two residual sums.
NORMS = {(False, False): 4, (False, True): 4, (True, False): 34, (True, True): 4}  # by RMS norm, and compiled
SUMS = 6
# Likewise of the MLP's width: GELU, or a gate and its product.
ACTIVATION = {(False, False): 2, (False, True): 2, (True, False): 5, (True, True): 3}  # by gate, and compiled
# Of the width of q and k: rotations in float32.
ROTATION = {False: 10, True: 2}  # by compiled
BACKWARD = 2  # times as many in a backward pass
# Bytes of a logit: its cast to float32, the log-softmax, and their gradients.
LOGIT = {False: 28, True: 14}  # by compiled
# Of an element of the scores: mask and softmax, dropout, and reading them, if attention is not fused.
SCORE = 12


class Roofline(NamedTuple):
    """A device's peaks, and the fractions of them that kernels reach.

    `products` is the fraction of large products, of which one with a dimension of `small` takes twice as long, and
    `attention` that of fused attention; `moves` is that of the memory's bandwidth.
    """

    flops_per_s: float
    bytes_per_s: float
    products: float
    attention: float
    moves: float
    small: float = 0.0

    def product_s(self, rows: float, inner: float, columns: float) -> float:
        """Return the seconds of a product of matrices (rows, inner) and (inner, columns)."""
        slower = (1 + self.small / rows) * (1 + self.small / inner) * (1 + self.small / columns)
        computing_s = 2 * rows * inner * columns * slower / (self.flops_per_s * self.products)
        return max(computing_s, self.moving_s(ITEM * (rows * inner + inner * columns + rows * columns)))

    def moving_s(self, nbytes: float) -> float:
        return nbytes / (self.bytes_per_s * self.moves)

    def attention_s(self, kernels: KernelKinds, tokens: float, width: float, heads: float, length: float) -> float:
        """Return the seconds of the attention of `tokens` queries to sequences of `length`, forward.

        Fused attention skips what is masked; otherwise all scores are computed, and pass through memory.
        """
        flops = 4 * tokens * width * length
        if kernels.fused_attention:
            return flops / 2 / (self.flops_per_s * self.attention)
        return flops / (self.flops_per_s * self.products) + self.moving_s(SCORE * heads * tokens * length)

    def block_moves_s(self, kernels: KernelKinds, model: ModelShape, between: float, split: float) -> float:
        """Return the seconds of a block's element-wise kernels in a forward pass.

        `between` are the tokens of a rank between split layers, and `split` its part of the tokens in them.
        """
        elements = (NORMS[model.has_rms_norms, kernels.compiled] + SUMS) * model.n_embd * between
        elements += ACTIVATION[model.is_gated, kernels.compiled] * model.hidden_width * split
        if not model.embeds_positions:
            elements += ROTATION[kernels.compiled] * model.head_size * (model.n_head + model.num_kv_heads) * split
        return self.moving_s(ITEM * elements)

    def loss_s(self, kernels: KernelKinds, logits: float) -> float:
        return self.moving_s(LOGIT[kernels.compiled] * logits)
