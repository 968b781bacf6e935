"""Tied parameters: used in several places of a model, on one rank or on several."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

import collectives
from parallelism.buffers.exposed_time import ExposedTime
from parallelism.buffers.gradients import with_gradients_apart

Tied = list[tuple[str, ...]]


def tied_names(model: nn.Module) -> Tied:
    """Return the names of each tied parameter."""
    names: dict[nn.Parameter, list[str]] = defaultdict(list)
    for name, param in model.named_parameters(remove_duplicate=False):
        names[param].append(name)
    return [tuple(group) for group in names.values() if len(group) > 1]


class TiedGradients(ExposedTime):
    """Sums the gradients of parameters that are tied across ranks of `pp`.

    `names` are the tied parameters' names in the whole model; `model` is this rank's part.  Collective.
    """

    def __init__(self, names: Tied, model: nn.Module, pp: collectives.Communicator):
        self.names = names
        self.plans: list[collectives.Plan] = []
        self._groups: list[tuple[str, collectives.Communicator]] = []  # local name, and ranks with the parameter
        params = dict(model.named_parameters())
        for group in names if pp.size > 1 else ():
            own = [name for name in group if name in params]
            comm = pp.split(0 if own else None)
            if comm is not None:
                self._groups.append((own[0], comm))

    @property
    def across(self) -> set[str]:
        """Local names of the parameters that other ranks hold, too."""
        return {name for name, comm in self._groups if comm.size > 1}

    def bind(self, gradients: Any, places: Mapping[str, slice]) -> None:
        """Bind the sums of the slices `places` of `gradients`; frozen parameters have none.  Collective."""
        self.plans = [
            comm.plan("all_reduce", gradients[places[name]])
            for name, comm in self._groups
            if comm.size > 1 and name in places
        ]

    def sum_up(self) -> None:
        with self.waiting():
            for plan in self.plans:
                plan()

    def free(self) -> None:
        """Free its communicators.  Collective."""
        self.plans.clear()
        for _, comm in self._groups:
            comm.free()


def separate(model: nn.Module, name: str, param: nn.Parameter) -> Tensor:
    """Replace another use of a parameter by an alias of its memory, whose gradients accumulate separately.

    The alias is not a parameter of the model; the hooks on the parameter's gradients run for it, too.
    """
    use = with_gradients_apart(param)
    parent, _, child = name.rpartition(".")
    module = model.get_submodule(parent)
    delattr(module, child)
    setattr(module, child, use)
    return use
