"""Local parameters: the parameters of a model that a rank holds, with the layers and stages that use them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

import collectives
from parallelism.buffers.gradients import rounding_of, separate_alias
from parallelism.buffers.tensor_collectives import ExposedTime
from parallelism.step.actions import BACKWARD, FORWARD, Action, Order
from parallelism.step.events import SHARED

Tied = list[tuple[str, ...]]


def tied_names(model: nn.Module) -> Tied:
    """Return the names of each tied parameter, which is used in several places of a model."""
    names: dict[nn.Parameter, list[str]] = defaultdict(list)
    for name, param in model.named_parameters(remove_duplicate=False):
        names[param].append(name)
    return [tuple(group) for group in names.values() if len(group) > 1]


class TiedGradients(ExposedTime):
    """Sums the gradients of parameters that are tied across ranks of `pp`.

    `names` are the tied parameters' names in the whole model; `model` is this rank's part.  `observe`, if set, is
    called before they are summed.  Collective.
    """

    observe: Callable[[], None] | None = None

    def __init__(self, names: Tied, model: nn.Module, pp: collectives.Communicator):
        self.names = names
        self.plans: list[collectives.Plan] = []
        self._groups: list[tuple[str, collectives.Communicator]] = []  # local name, and ranks with the parameter
        params = dict(model.named_parameters())
        for group in names if pp.size > 1 else ():
            own = [name for name in group if name in params]
            if comm := pp.split(0 if own else None):
                self._groups.append((own[0], comm))

    @property
    def across(self) -> set[str]:
        """Local names of the parameters that other ranks hold, too."""
        return {name for name, comm in self._groups if comm.size > 1}

    def bind(self, gradients: Any, slices: Mapping[str, slice]) -> None:
        """Bind the sums of these slices of `gradients`; frozen parameters have none.  Collective."""
        self.plans = [
            comm.plan("all_reduce", gradients[slices[name]])
            for name, comm in self._groups
            if comm.size > 1 and name in slices
        ]

    def sum_up(self) -> None:
        if self.observe:
            self.observe()
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
    use = separate_alias(param)
    parent, _, child = name.rpartition(".")
    module = model.get_submodule(parent)
    delattr(module, child)
    setattr(module, child, use)
    return use


ALONE = Action(0, FORWARD, 0), Action(0, BACKWARD, 0)  # one stage, one micro-batch


class LocalParameters:
    """A rank's part of a model: its parameters by name, and the local layers and stages that use each.

    `modules` names each layer's modules, by layer number, and `stages` the layers of each stage; `order` is the rank's
    sequence of actions.  `comm` allocates memory for collectives.  With `is_cut`, the model has several stages.
    Micro-batches are numbered within the global batch from `first_micro_batch` on.
    """

    def __init__(
        self,
        model: nn.Module,
        modules: Mapping[int, Sequence[str]],
        comm: collectives.Communicator,
        stages: Mapping[int, range] | None = None,
        order: Order = ALONE,
        tied: TiedGradients | None = None,
        is_cut: bool = False,
        first_micro_batch: int = 0,
        most_micro_batches: int = 0,
    ):
        self.model, self.comm, self.is_cut = model, comm, is_cut
        self.stages = stages or {0: range(len(modules))}
        self.tied = tied or TiedGradients([], model, comm)
        self.params = dict(model.named_parameters())
        self.names: dict[Tensor, str] = {param: name for name, param in self.params.items()}
        self.leaves: list[Tensor] = [param for param in self.params.values() if param.requires_grad]  # of the graph
        self.follow(order, first_micro_batch, most_micro_batches)
        self._names = dict(model.named_parameters(remove_duplicate=False))
        self._layers = {  # "" is the whole model
            name: {number for number, owned in modules.items() if any(not m or name.startswith(f"{m}.") for m in owned)}
            for name in self._names
        }
        self.layers: dict[Tensor, set[int]] = defaultdict(set)  # that use each parameter
        for name, param in self._names.items():
            self.layers[param] |= self._layers[name]

    def follow(self, order: Order, first_micro_batch: int, most: int = 0) -> None:
        """Expect another number of micro-batches, from another first one on, in another order of the same stages.

        The replica with most of them has `most`.
        """
        self.num_micro_batches = len({action.micro_batch for action in order})
        self.num_fewer = max(0, most - self.num_micro_batches)  # than that replica
        self.first_micro_batch = first_micro_batch
        self._last = {action.stage: index for index, action in enumerate(order) if action.kind != FORWARD}

    def home(self, param: Tensor) -> int:
        """Return the layer that uses a parameter, or SHARED if there are several or none."""
        layers = self.layers[param]
        return next(iter(layers)) if len(layers) == 1 else SHARED

    def users(self, layers: set[int]) -> set[int]:
        """Return the stages with any of these layers, or all stages if `layers` is empty."""
        return {stage for stage, part in self.stages.items() if not layers or layers.intersection(part)}

    def end(self, name: str) -> int:
        """Return the index, in this rank's order, of the action that completes a parameter's gradient."""
        return max(self._last[stage] for stage in self.users(self.layers[self.params[name]]))

    def num_passes(self, *names: str) -> int:
        """Count the backward passes of a micro-batch that contribute to these parameters."""
        layers = set().union(*(self._layers[name] for name in names))
        return len(self.users(layers))

    def trained(self) -> list[str]:
        """Return the names of the parameters that require gradients, in order."""
        return [name for name, param in self.params.items() if param.requires_grad]

    def separate(self) -> dict[nn.Parameter, dict[Tensor, int]]:
        """Accumulate gradients of tied parameters separately for each use, where the result would depend on the layout.

        Return the additional uses by parameter, each with the number of a micro-batch's backward passes that reach it.
        """
        uses: dict[nn.Parameter, dict[Tensor, int]] = {}
        for group in self.tied.names:
            own = [name for name in group if name in self._names]
            param = self._names[own[0]] if own else None
            several = self.num_passes(*own) * self.num_micro_batches > 1
            if param is not None and param.requires_grad and (rounding_of(param) or several):
                uses[param] = {separate(self.model, name, param): self.num_passes(name) for name in own[1:]}
                self.leaves += uses[param]
                self.names |= dict.fromkeys(uses[param], self.names[param])
        return uses
