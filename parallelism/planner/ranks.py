"""Best layout for a running job, from a short measurement of its ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import collectives
from collectives.job import system
from parallelism.pipeline.layer_times import now
from parallelism.planner.layout import TrainingJob
from parallelism.planner.place import SPARE, Machine
from parallelism.planner.search import PlannedLayout, best
from parallelism.planner.shape import ModelShape

LEAST_S = 0.1
MOST_ROWS = 4096


def best_layout(
    comm: collectives.Communicator, job: TrainingJob, fixed: Mapping[str, Any] = {}, device: str = "cpu"
) -> PlannedLayout:
    """Return the best layout for the ranks of `comm` with the `fixed` values, computed on rank 0.  Collective.

    Raises: InputError on every rank if no layout fits, or the model cannot be divided.
    """
    hardware = machine(comm, job, device)
    with comm.agreed("best_layout"):
        planned = best(job, hardware, fixed) if comm.rank == 0 else None
    return comm.broadcast_object(planned)


def machine(comm: collectives.Communicator, job: TrainingJob, device: str = "cpu") -> Machine:
    """Measure the ranks of `comm` while all compute at once; link speeds are those that `comm` uses.  Collective."""
    ranks = max(map(len, comm.topology.nodes))
    mine = np.array([flops_per_s(job, device), memory_bytes(device, ranks), -least_pass_s(job, device)])
    rate, memory, least = comm.all_reduce(mine, op="min").tolist()
    return Machine(comm.topology.nodes, comm.network, rate, memory * (1 - SPARE), -least)


def flops_per_s(job: TrainingJob, device: str = "cpu") -> float:
    """Measure the speed of matrix products of the model's block sizes, in floating-point operations per second."""
    width, rows = job.model.n_embd, job.model.block_size * max(1, MOST_ROWS // job.model.block_size)
    x = torch.ones(rows, width, dtype=getattr(torch, job.dtype), device=device)
    weight = x.new_ones(4 * width, width)
    return 2 * x.numel() * len(weight) / seconds(lambda: F.linear(x, weight), device)


def least_pass_s(job: TrainingJob, device: str = "cpu") -> float:
    """Measure the time of a minimal block of the model's kind, which is launch overhead."""
    block = MinimalBlock(job.model).to(device)
    x = torch.ones(1, 2, MinimalBlock.WIDTH, device=device)
    return seconds(lambda: block(x), device)


class MinimalBlock(nn.Module):
    """The operations of a pre-norm block, on as few elements as possible.

    It has as many experts as the model, and grouped heads, gates and rotations if the model has them.

    Shapes: x and result (batch, seq, 4).
    """

    WIDTH, HIDDEN, HEADS, HEAD_SIZE = 4, 8, 2, 2

    def __init__(self, model: ModelShape):
        super().__init__()
        kv = 1 if model.num_kv_heads < model.n_head else self.HEADS
        self.heads, self.model = [self.HEADS, kv, kv], model
        norm = nn.RMSNorm if model.has_rms_norms else nn.LayerNorm
        self.norms = nn.ModuleList(norm(self.WIDTH) for _ in range(2))
        self.qkv = nn.Linear(self.WIDTH, sum(self.heads) * self.HEAD_SIZE, bias=model.bias)
        self.out = nn.Linear(self.WIDTH, self.WIDTH, bias=model.bias)
        num_mlps, columns = model.num_experts or 1, self.HIDDEN * (2 if model.is_gated else 1)
        bias = model.bias and not model.num_experts
        self.first = nn.ModuleList(nn.Linear(self.WIDTH, columns, bias=bias) for _ in range(num_mlps))
        self.second = nn.ModuleList(nn.Linear(self.HIDDEN, self.WIDTH, bias=bias) for _ in range(num_mlps))
        self.router = nn.Linear(self.WIDTH, model.num_experts, bias=False) if model.num_experts else None
        self.drop = nn.Dropout(model.dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.norms[0](x))
        normed = self.norms[1](x)
        return x + self.drop(self.mix(normed) if self.router else self.mlp(0, normed))

    def attend(self, x: Tensor) -> Tensor:
        heads = self.qkv(x).unflatten(-1, (-1, self.HEAD_SIZE)).transpose(1, 2)  # (batch, heads, seq, head_size)
        q, k, v = heads.split(self.heads, dim=1)
        if not self.model.embeds_positions:
            angles = torch.arange(q.shape[2], device=q.device)[:, None, None] * 0.5  # (seq, 1, 1)
            turns = angles.cos(), angles.sin()
            q, k, v = rotate(q, *turns), rotate(k, *turns), v.clone()
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=k.shape[1] < q.shape[1])
        return self.drop(self.out(y.transpose(1, 2).flatten(2)))  # (batch, seq, width)

    def mlp(self, number: int, x: Tensor) -> Tensor:
        x = self.first[number](x)
        if self.model.is_gated:
            gate, up = x.chunk(2, dim=-1)
            return self.second[number](F.silu(gate) * up)
        return self.second[number](F.gelu(x, approximate="tanh"))

    def mix(self, x: Tensor) -> Tensor:
        assert self.router
        scores, num_choices = self.router(x.flatten(0, 1)).sigmoid(), self.model.experts_per_token  # (tokens, experts)
        experts = scores.topk(num_choices).indices  # (tokens, choices)
        weights = scores.gather(-1, experts)
        weights = weights / weights.sum(-1, keepdim=True)
        order = experts.flatten().argsort(stable=True)
        counts = experts.flatten().bincount(minlength=self.model.num_experts).tolist()
        rows = x.flatten(0, 1).index_select(0, order // num_choices)  # (rows, width), by expert
        y = torch.cat([self.mlp(number, part) for number, part in enumerate(rows.split(counts))])
        y = y * weights.index_select(0, order // num_choices).gather(1, (order % num_choices)[:, None])
        return torch.zeros_like(x).flatten(0, 1).index_add(0, order // num_choices, y).view(x.shape)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.transpose(1, 2).chunk(2, dim=-1)  # (batch, seq, heads, head_size/2)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).transpose(1, 2)


def seconds(act: Callable[[], object], device: str) -> float:
    """Return the mean seconds per call, over at least LEAST_S."""
    act()
    number, begin = 0, now(device)
    while (elapsed_s := now(device) - begin) < LEAST_S:
        act()
        number += 1
    return elapsed_s / number


def memory_bytes(device: str = "cpu", ranks: int = 1) -> float:
    """Return the bytes of a device's memory, or a rank's part of its host's free memory."""
    if device != "cpu":
        return float(torch.cuda.get_device_properties(device).total_memory)
    return system.available_memory_bytes() / ranks
