"""Reference for Muon: torch.optim.Muon in the dtype of the parameters, with torch's AdamW for the others."""

from contextlib import contextmanager

import torch

from models.decoder import Decoder
from training.optim.optimizer import BETAS, decay_groups


@contextmanager
def in_full_precision():
    """Disable torch.optim.Muon's rounding to bfloat16."""
    bfloat16 = torch.Tensor.bfloat16
    torch.Tensor.bfloat16 = lambda x: x.clone()
    try:
        yield
    finally:
        torch.Tensor.bfloat16 = bfloat16


class PlainMuon:
    """Muon for the matrices of a GPT's blocks, queries, keys and values as three, and AdamW for other parameters."""

    def __init__(self, model: Decoder, lr_factor: float = 1.0):
        named = {name: p for name, p in model.named_parameters() if name.startswith("transformer.h.") and p.dim() == 2}
        self.stacks = [(p, p.data.chunk(3) if "c_attn" in name else [p.data]) for name, p in named.items()]
        self.matrices = [[torch.nn.Parameter(part) for part in parts] for _, parts in self.stacks]
        rest = [p for p in model.parameters() if all(p is not matrix for matrix in named.values())]
        self.muon = torch.optim.Muon([matrix for matrices in self.matrices for matrix in matrices])
        self.adamw = torch.optim.AdamW(decay_groups(rest, 0.1), betas=BETAS)
        self.lr_factor, self.param_groups = lr_factor, self.adamw.param_groups

    def step(self) -> None:
        for (param, parts), matrices in zip(self.stacks, self.matrices, strict=True):
            for matrix, gradient in zip(matrices, param.grad.chunk(len(parts)), strict=True):
                matrix.grad = gradient
        for group in self.muon.param_groups:
            group["lr"] = self.param_groups[0]["lr"] * self.lr_factor
        with in_full_precision():
            self.muon.step()
        self.adamw.step()
