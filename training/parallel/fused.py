"""Fuse a model's GELUs, gates and rotations on the CPU: one pass each, forward and backward."""

from __future__ import annotations

from torch import Tensor, nn

from models.llama import Gate, RotaryHeads, rotations
from parallelism.numerics.pointwise import GateFunction, GELUFunction, RotationFunction, takes


def fuse(model: nn.Module) -> None:
    """Fuse a model's operations in place; parameters and their names do not change."""
    for module in list(model.modules()):
        if isinstance(module, nn.GELU) and module.approximate == "tanh":
            module.__class__ = FusedGELU
        elif type(module) is Gate:
            module.__class__ = FusedGate
        elif type(module) is RotaryHeads:
            module.__class__ = FusedRotaryHeads


class FusedGELU(nn.GELU):
    def forward(self, x: Tensor) -> Tensor:
        return GELUFunction.apply(x) if takes(x) else super().forward(x)


class FusedGate(Gate):
    def forward(self, x: Tensor) -> Tensor:
        return GateFunction.apply(x)


class FusedRotaryHeads(RotaryHeads):
    def forward(self, qkv: Tensor, positions: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        if not takes(qkv):
            return super().forward(qkv, positions)
        heads = qkv.unflatten(-1, (-1, self.head_size))  # (batch, seq, heads, head_size)
        cos, sin = rotations(heads.transpose(1, 2), positions, self.speeds)
        counts = [heads.shape[2] * count // sum(self.head_counts) for count in self.head_counts]
        q, k, v = RotationFunction.apply(heads, cos, sin, counts)
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
