"""The ways to train in data parallelism that benchmarks/data_parallel.py compares, with formulas for their bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import torch
from helpers.traffic import MessageCommunicator
from helpers.zero_bytes import HeldBytes, expected_held_bytes, expected_sent_bytes, held
from torch import Tensor, nn

from collectives import Communicator
from models.decoder import Decoder
from parallelism.buffers.arena import Arena
from parallelism.data.loop import DataParallel
from parallelism.data.units import ShardGroups
from parallelism.step.optimizer import Optimizer
from parallelism.zero.sharded import Sharded
from training.optim.optimizer import AdamW

EVERYTHING_MB = 1e6  # size of a bucket that holds any model
LR, EPS, WEIGHT_DECAY = 1e-3, 1e-3, 1e-2


def adamw(params: Iterable[nn.Parameter]) -> AdamW:
    """Make an AdamW with a large `eps`, for which the scale of gradients matters and noise in small ones does not."""
    return AdamW([{"params": list(params), "weight_decay": WEIGHT_DECAY}], lr=LR, eps=EPS)


class Way:
    """Training of a GPT on one rank.  A step is the rank's forward and backward pass, and the update."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, update: Callable[[], Any], arrays: Any = ()):
        self.model, self.optimizer, self.update, self.arrays = model, optimizer, update, arrays
        self.batch: tuple[Tensor, Tensor]

    def step(self) -> Tensor:
        _, loss = self.model(*self.batch)
        loss.backward()
        self.update()
        return loss.detach()

    def held(self) -> HeldBytes:
        return held(*self.arrays, self.optimizer)


class ParameterServer(nn.Module):
    """Rank 0 gathers the gradients of all ranks, updates the parameters alone, and broadcasts them.

    Source: Li et al., "Scaling Distributed Machine Learning with the Parameter Server", 2014.
    """

    def __init__(self, module: nn.Module, comm: MessageCommunicator, arena: Arena):
        super().__init__()
        self.module, self.arena = module, arena
        self.optimizer = adamw(module.parameters())
        self.gather = comm.plan("gather", arena.gradients)
        self.broadcast = comm.plan("broadcast", arena.parameters)
        self.is_server, self.size = comm.rank == 0, comm.size
        comm.broadcast(arena.parameters)

    def forward(self, *batch: Tensor) -> Any:
        return self.module(*batch)

    def update(self) -> None:
        gathered = self.gather()
        if self.is_server:
            torch.mean(gathered.view(self.size, -1), 0, out=self.arena.gradients)
            self.optimizer.step()
        self.broadcast()

    def zero_grad(self, set_to_none: bool = False) -> None:
        self.arena.zero_grad()


def parameter_server(gpt: Decoder, comm: MessageCommunicator, bucket_mb: float) -> Way:
    arena = Arena(gpt, comm)
    model = ParameterServer(gpt, comm, arena)
    return Way(model, model.optimizer, model.update, (arena.parameters, arena.gradients))


def data_parallel(
    gpt: Decoder, comm: MessageCommunicator | Communicator, bucket_mb: float = 4.0, **reduction: Any
) -> Way:
    model = DataParallel(gpt, comm, bucket_mb=bucket_mb, **reduction)
    optimizer = adamw(gpt.parameters())
    return Way(model, optimizer, optimizer.step, model.replica.arrays)


def all_reduce_at_the_end(gpt: Decoder, comm: MessageCommunicator, bucket_mb: float) -> Way:
    """Reduce a single bucket, which is complete with the last gradient."""
    return data_parallel(gpt, comm, EVERYTHING_MB)


def hierarchical(gpt: Decoder, comm: MessageCommunicator, bucket_mb: float) -> Way:
    return data_parallel(gpt, comm, bucket_mb, algorithm="hierarchical")


def zero(gpt: Decoder, comm: MessageCommunicator | Communicator, bucket_mb: float = 4.0, zero_stage: int = 1) -> Way:
    layers = [f"transformer.h.{number}" for number in range(gpt.config.n_layer)]
    model = Sharded(gpt, ShardGroups(comm, comm), adamw, zero_stage, layers, bucket_mb=bucket_mb)
    return Way(model, model.replica.optimizer, model.replica.update, model.replica.arrays)


class Kind(NamedTuple):
    """Constructor of a way, the formula of its busiest rank's bytes, and its ZeRO stage.

    The formula takes the bytes of the parameters and the number of ranks.
    """

    make: Callable[..., Way]
    through: Callable[[float, int], float]
    zero_stage: int = 0

    def held(self, num_params: int, num_ranks: int) -> HeldBytes:
        return expected_held_bytes(self.zero_stage, num_params, num_ranks)


def through_server(num_bytes: float, num_ranks: int) -> float:
    """Return the server's bytes: gradients of all others, and parameters to the children of a binomial tree's root."""
    return (num_ranks - 1 + (num_ranks - 1).bit_length()) * num_bytes


def through_each(zero_stage: int, num_bytes: float, num_ranks: int) -> float:
    """Return the bytes that each rank sends and receives."""
    return 2 * expected_sent_bytes(zero_stage, num_bytes, num_ranks)


def kind(zero_stage: int, make: Callable[..., Way]) -> Kind:
    return Kind(make, partial(through_each, zero_stage), zero_stage)


WAYS = {
    "parameter server": Kind(parameter_server, through_server),
    "all-reduce at the end": kind(0, all_reduce_at_the_end),
    "in buckets, overlapped": kind(0, data_parallel),
    "hierarchical": kind(0, hierarchical),
    **{f"ZeRO stage {stage}": kind(stage, partial(zero, zero_stage=stage)) for stage in (1, 2, 3)},
}
