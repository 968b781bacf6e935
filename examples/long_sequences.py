"""Divide sequences over ranks, by ring attention and by exchange of heads.

mpirun -n 2 python examples/long_sequences.py
"""

import torch
from torch.nn import functional as F

import collectives
from parallelism import SequenceAttention, SequenceParallel

comm = collectives.world()
torch.manual_seed(0)
q, k, v = torch.randn(3, 2, 4, 64, 16, requires_grad=True)  # (batch, heads, seq, head size) each
y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
gradients = torch.autograd.grad(y.square().sum(), (q, k, v))

for mode in ("ring", "ulysses"):
    ranks = SequenceParallel(comm, mode)
    own = ranks.positions(64)  # of this rank's tokens in the sequence
    parts = [x.detach()[:, :, own].requires_grad_() for x in (q, k, v)]
    own_y = SequenceAttention(ranks)(*parts)
    own_y.square().sum().backward()
    torch.testing.assert_close(own_y, y[:, :, own])
    for part, gradient in zip(parts, gradients, strict=True):
        torch.testing.assert_close(part.grad, gradient[:, :, own])
    print(f"rank {comm.rank}, {mode}: {len(own)} of 64 tokens, from {own[0]} to {own[-1]}; output and gradients agree")
    ranks.free()
