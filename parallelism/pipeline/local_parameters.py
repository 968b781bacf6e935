"""Local parameters: the parameters of a model that a rank holds, with the layers and stages that use them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby

from torch import Tensor, nn

import collectives
from parallelism.pipeline.events import SHARED
from parallelism.pipeline.schedule.actions import BACKWARD, FORWARD, Action, Order
from parallelism.pipeline.tied import TiedGradients, separate

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
    ):
        self.model, self.comm, self.order, self.is_cut = model, comm, order, is_cut
        self.first_micro_batch = first_micro_batch
        self.stages = stages or {0: range(len(modules))}
        self.tied = tied or TiedGradients([], model, comm)
        self.params = dict(model.named_parameters())
        self.names: dict[Tensor, str] = {param: name for name, param in self.params.items()}
        self.leaves: list[Tensor] = [param for param in self.params.values() if param.requires_grad]  # of the graph
        self.num_micro_batches = len({action.micro_batch for action in order})
        self._names = dict(model.named_parameters(remove_duplicate=False))
        self._layers = {name: {n for n, owned in modules.items() if is_inside(name, owned)} for name in self._names}
        self._users: dict[Tensor, set[int]] = {}  # layers that use each parameter
        for name, param in self._names.items():
            self._users.setdefault(param, set()).update(self._layers[name])
        self._last = {action.stage: index for index, action in enumerate(order) if action.kind != FORWARD}

    def layers(self, param: Tensor) -> set[int]:
        """Return the numbers of the layers that use a parameter."""
        return self._users[param]

    def home(self, param: Tensor) -> int:
        """Return the layer that uses a parameter, or SHARED if there are several or none."""
        layers = self.layers(param)
        return next(iter(layers)) if len(layers) == 1 else SHARED

    def users(self, layers: set[int]) -> set[int]:
        """Return the stages with any of these layers, or all stages if `layers` is empty."""
        return {stage for stage, part in self.stages.items() if not layers or layers.intersection(part)}

    def end(self, name: str) -> int:
        """Return the index, in this rank's order, of the action that completes a parameter's gradient."""
        return max(self._last[stage] for stage in self.users(self.layers(self.params[name])))

    def num_passes(self, *names: str) -> int:
        """Count the backward passes of a step that contribute to these parameters."""
        layers = set().union(*(self._layers[name] for name in names))
        return len(self.users(layers)) * self.num_micro_batches

    def trained(self, names: Iterable[str] | None = None) -> list[str]:
        """Return the names of the parameters that require gradients, in order."""
        return [name for name in (self.params if names is None else names) if self.params[name].requires_grad]

    def runs(self, slices: Mapping[str, slice], key: Callable[[str], object]) -> list[dict[str, slice]]:
        """Group neighbours with the same key, all trained or all frozen; a parameter tied across ranks is alone."""
        across = self.tied.across

        def kind(name: str) -> tuple[object, ...]:
            return key(name), self.params[name].requires_grad, name if name in across else ""

        return [{name: slices[name] for name in names} for _, names in groupby(slices, kind)]

    def separate(self) -> dict[nn.Parameter, dict[Tensor, int]]:
        """Accumulate gradients of tied parameters separately for each use, where the summation order would differ.

        Return the additional uses by parameter, each with the number of a step's backward passes that reach it.
        """
        uses: dict[nn.Parameter, dict[Tensor, int]] = {}
        for group in self.tied.names:
            own = [name for name in group if name in self._names]
            param = self._names[own[0]] if own else None
            if param is not None and param.requires_grad and self.num_passes(*own) > 1:
                uses[param] = {separate(self.model, name, param): self.num_passes(name) for name in own[1:]}
                self.leaves += uses[param]
                self.names |= dict.fromkeys(uses[param], self.names[param])
        return uses


def is_inside(name: str, modules: Sequence[str]) -> bool:
    """Return whether a parameter belongs to one of the modules; "" is the whole model."""
    return any(not module or name.startswith(f"{module}.") for module in modules)
