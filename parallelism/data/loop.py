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
from parallelism.data.replica import MakeOptimizer, Replica
from parallelism.data.units import ShardGroups
from parallelism.step.actions import BACKWARD, FORWARD, Action
from parallelism.step.events import SHARED
from parallelism.step.local_parameters import LocalParameters
from parallelism.zero.gradients import ShardedGradients
from parallelism.zero.parameters import ShardedParameters
from parallelism.zero.states import ShardedStates

REPLICAS: tuple[Callable[..., Replica], ...] = (  # by zero_stage
    Replicated,
    ShardedStates,
    ShardedGradients,
    ShardedParameters,
)


class Sharded(nn.Module):
    """A module that is trained with ZeRO; `replica` holds this rank's pieces of its parameters, and updates them.

    Gradients are reduced over the ranks in each backward pass.  Under `no_sync()` they only accumulate, and the next
    backward pass outside ends the step.  All ranks must run their backward passes in the same order; gradients that a
    pass does not reach count as zero.

    With stage 3, `layers` names modules, in execution order; a layer's parameters are gathered before its forward pass,
    and again before its backward pass, while the previous layer computes; otherwise each is a NaN of the same shape.
    Parameters outside of `layers` stay gathered from the beginning of the forward pass to the end of the backward pass.
    The layers' outputs must be tensors, alone or in tuples, lists or dicts, through which all their gradients flow.

    Raises: InputError for a layer that does not exist, has no parameters, or has some in common with another.
    """

    def __init__(
        self,
        module: nn.Module,
        ranks: ShardGroups,
        make_optimizer: MakeOptimizer | None = None,
        zero_stage: int = 0,
        layers: Sequence[str] = (),
        **options: Any,
    ):
        super().__init__()
        layers = layers if zero_stage == 3 else ()
        with ranks.every.agreed("layers"):
            check_layers(module, layers)
        own = LocalParameters(module, {number: (name,) for number, name in enumerate(layers)}, ranks.every)
        self.module, self.replica = module, REPLICAS[zero_stage](own, ranks, make_optimizer, **options)
        self.sync, self._in_backward, self._micro_batch = True, False, 0
        for param in module.parameters():
            if param.requires_grad:
                param.register_post_accumulate_grad_hook(self._gradient_appeared)
        for number, name in enumerate(["", *layers] if zero_stage == 3 else [], SHARED):
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

    def _gradient_appeared(self, param: Tensor) -> None:
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


class DataParallel(Sharded):
    """A module whose gradients are averaged over the ranks of `comm` in each backward pass.

    Parameters are broadcast from rank 0; `replica.arena` holds them and their gradients.  `options` are a `Replica`'s.
    """

    def __init__(self, module: nn.Module, comm: collectives.Communicator, **options: Any):
        super().__init__(module, ShardGroups(comm, comm), **options)


def tensors(output: Any) -> Iterator[Tensor]:
    """Yield the tensors of a module's output."""
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, Mapping):
        yield from tensors(list(output.values()))
    elif isinstance(output, list | tuple):
        for part in output:
            yield from tensors(part)


def check_layers(module: nn.Module, layers: Sequence[str]) -> None:
    """Raise ValueError for layers that cannot be sharded."""
    names = [name for name, _ in module.named_modules() if name]
    if missing := [layer for layer in layers if layer not in names]:
        raise ValueError(f"layer {missing[0]!r} is not a module of the model: it has {', '.join(names)}")
    owners: dict[nn.Parameter, str] = {}
    for name, param in module.named_parameters(remove_duplicate=False):
        inside = [layer for layer in layers if name.startswith(f"{layer}.")]
        for owner in inside or [""]:
            if owners.setdefault(param, owner) != owner:
                rivals = " and ".join(f"layer {rival!r}" if rival else "no layer" for rival in (owners[param], owner))
                raise ValueError(f"{name} is in {rivals}: leave what they share to the whole model, or name one layer")
    if empty := [layer for layer in layers if layer not in owners.values()]:
        raise ValueError(f"layer {empty[0]!r} has no parameters: omit it")
