"""Muon: orthogonalize the momentum of each matrix, by a few matrix products.

Source: Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024,
kellerjordan.github.io/posts/muon.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from training.optim.optimizer import GroupedOptimizer

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # from the source: they increase small singular values fastest
NEWTON_SCHULZ_STEPS = 5
LEAST_NORM = 1e-7

Function = Callable[[str, Tensor], Tensor]  # takes a matrix's name, and the whole matrix
Apply = Callable[[Function, Mapping[str, Tensor]], Mapping[str, Tensor]]


def locally(function: Function, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Apply a function to matrices that are not sharded."""
    return {name: function(name, tensor) for name, tensor in tensors.items()}


class Muon(GroupedOptimizer):
    """Orthogonalized Nesterov momentum, with decoupled weight decay.

    `matrices` are parameters by name, or shards of them: `apply` then applies a function to the whole matrices, and
    returns the shards of the results.  Stacked matrices, such as those of queries, keys and values, are orthogonalized
    one by one: `rows` has their relative row counts, by name.

    It computes in the parameters' dtype, unlike the source, which uses bfloat16, so that with float32 weights all
    layouts agree up to rounding.
    """

    def __init__(
        self,
        matrices: Mapping[str, nn.Parameter],
        lr: float,
        momentum: float = 0.95,
        weight_decay: float = 0.1,
        rows: Mapping[str, Sequence[int]] | None = None,
        apply: Apply = locally,
    ):
        group = {"params": [*matrices.values()], "weight_decay": weight_decay}
        super().__init__([group], lr=lr, momentum=momentum)
        self.matrices, self.rows, self.apply = matrices, rows or {}, apply

    @torch.no_grad()
    def step(self, skipped: Tensor | None = None) -> None:
        """Update the parameters.  If `apply` is collective, so is this, even on ranks without gradients."""
        (group,) = self.param_groups
        rate, momentum = group["lr"], group["momentum"]
        directions = {}
        for name, param in self.matrices.items():
            if param.grad is not None:
                buffer = self.momentum_buffer(param)
                mean = buffer.lerp(param.grad, 1 - momentum)
                directions[name] = param.grad.lerp(mean, momentum)
                replace(buffer, mean, skipped)
        for name, direction in self.apply(self.direction, directions).items():
            param = self.matrices[name]
            replace(param, param * (1 - rate * group["weight_decay"]) - rate * direction, skipped)

    def direction(self, name: str, matrix: Tensor) -> Tensor:
        """Return the update of a matrix, or a stack of matrices, at a learning rate of 1."""
        lengths, dim = self.rows.get(name, (1,)), 0 if matrix.dim() == 2 else -1  # of outputs
        parts = matrix.split([matrix.shape[dim] * length // sum(lengths) for length in lengths], dim)
        return torch.cat([scaled(part) for part in parts], dim)


def replace(old: Tensor, new: Tensor, skipped: Tensor | None) -> None:
    """Copy `new` to `old`, unless `skipped` is 1."""
    old.copy_(new if skipped is None else torch.where(skipped.bool(), old, new))


def scaled(matrix: Tensor) -> Tensor:
    """Orthogonalize a matrix (out, in), scaled up as in the source if it has more outputs than inputs.

    For a mixture's experts, (experts, in, out), each matrix separately.
    """
    rows, columns = (matrix if matrix.dim() == 2 else matrix.mT).shape[-2:]
    return orthogonal(matrix) * math.sqrt(max(1, rows / columns))


def orthogonal(matrix: Tensor) -> Tensor:
    """Map singular values, except tiny ones, to between about 0.7 and 1.2, by Newton-Schulz iterations.

    Shapes: (..., rows, columns).

    >>> orthogonal(torch.tensor([[3.0, 0.0], [0.0, -0.5]])).diag().abs().sub(1).abs().max() < 0.35
    tensor(True)
    """
    a, b, c = COEFFICIENTS
    is_tall = matrix.shape[-2] > matrix.shape[-1]
    x = matrix.mT if is_tall else matrix
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp(min=LEAST_NORM)
    for _ in range(NEWTON_SCHULZ_STEPS):
        square = x @ x.mT
        x = a * x + (b * square + c * square @ square) @ x
    return (x.mT if is_tall else x).contiguous()
