"""A module for custom training loops, trained with ZeRO."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from parallelism.data.averaging import Replicated
from parallelism.data.loop import TrainedModule
from parallelism.data.replica import MakeOptimizer, Replica
from parallelism.data.units import ShardGroups
from parallelism.zero.gradients import ShardedGradients
from parallelism.zero.parameters import ShardedParameters
from parallelism.zero.states import ShardedStates

REPLICAS: tuple[Callable[..., Replica], ...] = (  # by zero_stage
    Replicated,
    ShardedStates,
    ShardedGradients,
    ShardedParameters,
)


class Sharded(TrainedModule):
    """A module that is trained with ZeRO; `replica` holds this rank's pieces of its parameters, and updates them.

    Each rank of `ranks.shard` holds a part of the optimizer states with stage 1, of gradients too with stage 2, and of
    parameters too with stage 3.  `options` are a `Replica`'s.

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
        if zero_stage == 3:
            with ranks.every.agreed("layers"):
                check_layers(module, layers)
        kind = REPLICAS[zero_stage]
        super().__init__(
            module,
            ranks.every,
            lambda own: kind(own, ranks, make_optimizer, **options),
            layers if zero_stage == 3 else None,
        )


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
