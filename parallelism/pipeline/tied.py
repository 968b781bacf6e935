"""Parameters that are tied: used in several places of a model, be they on one rank or on several."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from parallelism.buffers.exposed_time import ExposedTime
from parallelism.buffers.gradients import with_gradients_apart

if TYPE_CHECKING:
    from collectives import Communicator, Plan

Tied = list[tuple[str, ...]]


def tied_names(model: nn.Module) -> Tied:
    """Return the names of each parameter that has several."""
    names: dict[nn.Parameter, list[str]] = defaultdict(list)
    for name, param in model.named_parameters(remove_duplicate=False):
        names[param].append(name)
    return [tuple(group) for group in names.values() if len(group) > 1]


class TiedGradients(ExposedTime):
    """Sums up the gradients of parameters that are tied in the whole model, but lie on several ranks of `pp`.

    `names` are theirs in the whole model, `model` is what this rank has of it.  Collective.
    """

    def __init__(self, names: Tied, model: nn.Module, pp: Communicator):
        self.names = names
        self.plans: list[Plan] = []
        self._groups: list[tuple[str, Communicator]] = []  # the name here, and the ranks that have it
        params = dict(model.named_parameters())
        for group in names if pp.size > 1 else ():
            own = [name for name in group if name in params]
            comm = pp.split(0 if own else None)
            if comm is not None:
                self._groups.append((own[0], comm))

    @property
    def across(self) -> set[str]:
        """The names here of those that other ranks have, too."""
        return {name for name, comm in self._groups if comm.size > 1}

    def bind(self, gradients: Any, places: Mapping[str, slice]) -> None:
        """Sum up what lies in `gradients` at `places`: trained parameters have some.  Collective."""
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
        """Give its communicators back to MPI.  Collective."""
        self.plans.clear()
        for _, comm in self._groups:
            comm.free()


def separate(model: nn.Module, name: str, param: nn.Parameter) -> Tensor:
    """Put a tensor of the same memory, whose gradients are added up apart, in the place of a parameter's further use.

    It is no parameter of the model, and watched by whoever watches the parameter's gradients.
    """
    use = with_gradients_apart(param)
    parent, _, child = name.rpartition(".")
    module = model.get_submodule(parent)
    delattr(module, child)
    setattr(module, child, use)
    return use
