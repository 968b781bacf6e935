"""Peers that split the GPT: tensor parallelism by torch's DTensor, head exchange by DeepSpeed's Ulysses.

Each takes a process group; with torch's "fake" backend, whose collectives return at once and leave the output
unchanged, the same step is its computation alone.
"""

import io
import logging
import os
from contextlib import redirect_stdout
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn import functional as F
from torch.testing._internal.distributed import fake_pg  # noqa: F401  registers the backend

from parallelism import placement

SEQ = 1  # the dim of (batch, seq, n_embd)


def groups() -> tuple[Any, Any]:
    """Return a group of all ranks that communicates, and one that does not."""
    return distributed.new_group(), distributed.new_group(backend="fake")


def tensor_plan(sequence: bool) -> dict[str, Any]:
    between = Shard(SEQ) if sequence else Replicate()  # activations between split layers
    plan = {
        "transformer.wte": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
        "transformer.h.*.attn.c_attn": ColwiseParallel(input_layouts=between),
        "transformer.h.*.attn.c_proj": RowwiseParallel(output_layouts=between),
        "transformer.h.*.mlp.c_fc": ColwiseParallel(input_layouts=between),
        "transformer.h.*.mlp.c_proj": RowwiseParallel(output_layouts=between),
        "lm_head": ColwiseParallel(input_layouts=between, use_local_output=False),
    }
    if sequence:
        positions = PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=Shard(0))
        norms = ("transformer.h.*.ln_1", "transformer.h.*.ln_2", "transformer.ln_f")
        plan |= {"transformer.wpe": positions} | {norm: SequenceParallel() for norm in norms}
    return plan


class TorchTensorParallel:
    """A GPT split by a DTensor plan; embedding and head stay tied, and the loss takes logits split by vocabulary."""

    def __init__(self, model: nn.Module, group: Any, sequence: bool, tokens: Tensor, targets: Tensor):
        mesh = distributed.DeviceMesh.from_group(group, "cpu")
        self.model, self.tokens, self.targets = model, tokens, targets
        for block in model.transformer.h:
            reorder(block.attn.c_attn.weight, block.attn.head_counts, mesh.size())
        parallelize_module(model, mesh, tensor_plan(sequence), src_data_rank=None)
        model.lm_head.weight = model.transformer.wte.weight

    def step(self) -> Tensor:
        with loss_parallel():
            _, loss = self.model(self.tokens, self.targets)
            loss.backward()
        return loss.detach().to_local()

    def gradients(self) -> dict[str, Tensor]:
        """Return the rank's shards of gradients."""
        return {name: local(p.grad, p) for name, p in self.model.named_parameters()}


@torch.no_grad()
def reorder(weight: Tensor, lengths: tuple[int, ...], size: int) -> None:
    """Reorder rows so that each rank's shard is its q, k and v."""
    split = placement.Shard(0, len(weight), lengths)
    weight.copy_(torch.cat([split.local(weight, rank, size) for rank in range(size)]))


def local(gradient: Tensor, parameter: Tensor) -> Tensor:
    """Return a rank's shard of a gradient, placed as its parameter, summing over the ranks where due."""
    if not isinstance(gradient, DTensor):
        return gradient
    return gradient.redistribute(placements=parameter.placements).to_local()


class Ulysses(nn.Module):
    """Replaces a GPT's attention."""

    def __init__(self, group: Any):
        super().__init__()
        from deepspeed.sequence.layer import DistributedAttention

        self.exchanging = DistributedAttention(attend, group, scatter_idx=2, gather_idx=1)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None = None) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # (batch, seq, heads, head_size)
        return self.exchanging(q, k, v, 0).transpose(1, 2)


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute causal attention.  Shapes: (batch, seq, heads, head_size)."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


class DeepSpeedUlysses:
    """A GPT with consecutive tokens on each rank; the mean of the ranks' losses is computed without gradients."""

    def __init__(self, model: nn.Module, group: Any, tokens: Tensor, targets: Tensor):
        size, rank = distributed.get_world_size(group), distributed.get_rank(group)
        self.model, self.group = model, group
        positions = torch.arange(tokens.shape[1]).chunk(size)[rank]
        self.tokens, self.targets, self.positions = tokens[:, positions], targets[:, positions], positions
        for block in model.transformer.h:
            block.attn.attend = Ulysses(group)

    def step(self) -> Tensor:
        _, loss = self.model(self.tokens, self.targets, self.positions)
        loss.backward()
        mean = loss.detach() / distributed.get_world_size(self.group)
        distributed.all_reduce(mean, group=self.group)
        return mean

    def gradients(self) -> dict[str, Tensor]:
        """Return the means of the gradients over the ranks."""
        return {name: mean_over_ranks(p.grad) for name, p in self.model.named_parameters()}


def mean_over_ranks(gradient: Tensor) -> Tensor:
    mean = gradient / distributed.get_world_size()
    distributed.all_reduce(mean)
    return mean


def start_deepspeed() -> bool:
    """Start DeepSpeed on torch's process groups; return whether it is installed."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    logging.disable(logging.WARNING)  # silences warnings about a CPU, and compiler output
    with redirect_stdout(io.StringIO()):
        try:
            import deepspeed
        except ImportError:
            return False
        deepspeed.init_distributed("gloo", verbose=False)
    return True
