"""What ranks that train the same part of a model have of it, and how it is updated: whole, or shared by ZeRO."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from models.optimizer import Optimizer
from parallelism.data.buckets import num_bytes
from parallelism.numerics.master_weights import MasterWeights
from parallelism.pipeline.events import Listener
from parallelism.pipeline.local_parameters import LocalParameters
from parallelism.zero.units import FlatParam, ShardGroups

if TYPE_CHECKING:
    from collectives import Communicator, Plan

MakeOptimizer = Callable[[list[nn.Parameter]], Optimizer]


class Replica(Listener):
    """The parameters of a rank, which data-parallel ranks train together; one subclass for each `zero_stage`.

    After a step the gradients are the average over the ranks; `masters.take_gradients()` gives them to what the
    optimizer updates, and `update()` updates all parameters.  `make_optimizer` is given the masters' pieces, parameters
    of as many dims as those that they are pieces of; as a rank may own nothing, it must put them in groups.  Without it
    there is no optimizer, until `optimizer` is set.

    Parameters become of `dtype` and gradients of `grad_dtype`, as in an arena; beside 16-bit parameters a rank has
    float32 ones of its pieces, which are what belongs to the optimizer's states.  Gradients are reduced in buckets of
    about `bucket_mb` MiB; `reduction` are further arguments of that.  Making one is collective.
    """

    zero_stage: int
    every_micro_batch: bool  # whether gradients are reduced in each backward pass, not once a step
    arrays: tuple[Any, Any]  # of the parameters and of the gradients that a rank holds between steps
    masters: MasterWeights
    optimizer: Optimizer

    def __init__(
        self,
        own: LocalParameters,
        ranks: ShardGroups,
        make_optimizer: MakeOptimizer | None = None,
        device: str = "cpu",
        bucket_mb: float = 4.0,
        dtype: torch.dtype | None = None,
        grad_dtype: torch.dtype | None = None,
        **reduction: Any,
    ):
        self.bucket_bytes = num_bytes(bucket_mb)
        self.own, self.ranks, self.params, self.device = own, ranks, own.params, device
        self.dtype, self.grad_dtype, self.reduction = dtype, grad_dtype, {"op": "avg", **reduction}
        self.gathering: list[Plan] = []  # of parameters, after an update
        self.across: list[Plan] = []  # of gradients, over ranks that own the same
        for buffer in own.model.buffers():
            ranks.every.broadcast(buffer, root=0)
        self.build()
        if make_optimizer:
            self.optimizer = make_optimizer(list(self.masters.pieces.values()))

    def build(self) -> None:
        """Make what this rank holds of parameters and gradients, and bind their collectives.  Collective."""
        raise NotImplementedError

    def groups(self, unit: FlatParam) -> ShardGroups:
        """Return the ranks that average a unit's gradients, which are the same for each of its parameters."""
        return self.ranks.averaging(self.params[next(iter(unit.slices))])

    @property
    def shard(self) -> Communicator | None:
        """The ranks that have pieces of the weights each."""
        return self.ranks.shard if self.zero_stage else None

    def step_done(self) -> None:
        with self.waiting():
            self.finish_reducing()
            run(self.across)
        self.own.tied.sum_up()

    def finish_reducing(self) -> None:
        """Wait until the gradients are those of all ranks, but for those `across`."""
        raise NotImplementedError

    def zero_grad(self) -> None:
        """Clear the gradients, in place."""
        raise NotImplementedError

    def update(self) -> None:
        """Update this rank's pieces, and all ranks' parameters.  Collective."""
        self.optimizer.step()
        self.gather()

    def gather(self) -> None:
        """Make parameters what their owners' pieces are.  Collective."""
        self.masters.give_parameters()
        with self.waiting():
            run(self.gathering)

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Hold all parameters in the module while they are read.  Collective."""
        yield


def run(plans: Sequence[Plan]) -> None:
    """Run all plans concurrently."""
    for plan in plans:
        plan.start()
    for plan in plans:
        plan.wait()
