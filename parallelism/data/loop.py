"""Modules for custom training loops: their passes emit the events of a step, as the pipeline driver does."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import collectives
from parallelism.data.averaging import Replicated
from parallelism.data.replica import Replica
from parallelism.data.units import ShardGroups
from parallelism.step.actions import BACKWARD, FORWARD, Action
from parallelism.step.events import SHARED
from parallelism.step.local_parameters import LocalParameters


class TrainedModule(nn.Module):
    """A module whose gradients are reduced over ranks in each backward pass, by `replica`, which updates it.

    Under `no_sync()` gradients only accumulate, and the next backward pass outside ends the step.  All ranks must run
    their backward passes in the same order; gradients that a pass does not reach count as zero.

    `layers` names modules whose parameters the replica has to be told to provide, in execution order; None if they are
    always there.
    """

    def __init__(
        self,
        module: nn.Module,
        comm: collectives.Communicator,
        make_replica: Callable[[LocalParameters], Replica],
        layers: Sequence[str] | None = None,
    ):
        super().__init__()
        names = layers or ()
        own = LocalParameters(module, {number: (name,) for number, name in enumerate(names)}, comm)
        self.module, self.replica = module, make_replica(own)
        self.sync, self._in_backward, self._micro_batch = True, False, 0
        for param in module.parameters():
            if param.requires_grad:
                param.register_post_accumulate_grad_hook(self._gradient_accumulated)
        for number, name in enumerate(["", *names] if layers is not None else [], SHARED):
            module.get_submodule(name).register_forward_pre_hook(partial(self._before_forward, number))
            module.get_submodule(name).register_forward_hook(partial(self._after_forward, number))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients without ending the step."""
        before, self.sync = self.sync, False
        try:
            yield
        finally:
            self.sync = before

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Clear the gradients in place."""
        self.replica.zero_grad()

    def _gradient_accumulated(self, param: Tensor) -> None:
        if self.sync or self.replica.zero_stage >= 2:  # which reduces gradients in each backward pass
            self._begin_backward()
            self.replica.gradient_ready(param, self._micro_batch)

    def _begin_backward(self) -> None:
        if not self._in_backward:
            self._in_backward = True
            self.replica.before(self._action(BACKWARD), None)
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)

    def _end_backward(self) -> None:
        self.replica.after(self._action(BACKWARD))
        self._in_backward = False
        self._micro_batch += 1
        if self.sync:
            self.replica.step_done()
            self._micro_batch = 0

    def _action(self, kind: str) -> Action:
        return Action(0, kind, self._micro_batch)

    def _before_forward(self, number: int, module: nn.Module, args: Any) -> None:
        if number == SHARED:
            self.replica.before(self._action(FORWARD), self._action(BACKWARD) if torch.is_grad_enabled() else None)
        else:
            self.replica.parameters_needed(number)

    def _after_forward(self, number: int, module: nn.Module, args: Any, output: Any) -> None:
        if self._in_backward:  # activation recomputation of a layer
            return
        for tensor in tensors(output):
            if tensor.requires_grad:
                tensor.register_hook(partial(self._before_backward, number))

    def _before_backward(self, number: int, gradient: Tensor) -> None:
        self._begin_backward()
        self.replica.parameters_needed(number)


class DataParallel(TrainedModule):
    """A module whose gradients are averaged over the ranks of `comm` in each backward pass.

    Parameters are broadcast from rank 0, and each rank holds all of them; `replica.arena` has them and their gradients
    in flat arrays, so that these are to be cleared in place, by `zero_grad()`.  `options` are a `Replica`'s.
    """

    def __init__(self, module: nn.Module, comm: collectives.Communicator, **options: Any):
        ranks = ShardGroups(comm, comm)
        super().__init__(module, comm, lambda own: Replicated(own, ranks, **options))


def tensors(output: Any) -> Iterator[Tensor]:
    """Yield the tensors of a module's output."""
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, Mapping):
        yield from tensors(list(output.values()))
    elif isinstance(output, list | tuple):
        for part in output:
            yield from tensors(part)
