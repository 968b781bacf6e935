"""A block's MLP, whose first layer may have gates.

Source: Shazeer, "GLU Variants Improve Transformer", 2020, arXiv 2002.05202.
"""

from collections.abc import Callable
from functools import partial

from torch import nn

from models.config import ModelConfig

ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "gelu_tanh": partial(nn.GELU, approximate="tanh"),
    "gelu": nn.GELU,
    "silu": nn.SiLU,
    "relu": nn.ReLU,
}


class Gate(nn.Module):
    """Multiplies one half of x by the activation of the other.  Shapes: x (..., 2 width), result (..., width)."""

    def __init__(self, activation: nn.Module):
        super().__init__()
        self.activation = activation

    def forward(self, x):
        gate, up = x.chunk(2, dim=-1)
        return self.activation(gate) * up


def make_activation(config: ModelConfig) -> nn.Module:
    activation = ACTIVATIONS[config.activation]()
    return Gate(activation) if config.is_gated else activation


class MLP(nn.Module):
    def __init__(self, config: ModelConfig):
        super().__init__()
        columns, bias = config.hidden_width * (2 if config.is_gated else 1), config.bias or config.mlp_bias
        self.c_fc = nn.Linear(config.n_embd, columns, bias=bias)  # of gates and values, if gated
        self.activation = make_activation(config)
        self.c_proj = nn.Linear(config.hidden_width, config.n_embd, bias=bias)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x):
        x = self.c_fc(x)  # (batch, seq, hidden_width), twice that if gated
        return self.dropout(self.project(x))  # (batch, seq, n_embd)

    def project(self, x):
        return self.c_proj(self.activation(x))
