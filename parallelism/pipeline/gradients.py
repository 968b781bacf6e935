"""Gradients of a pipeline's stages: averaged over data-parallel ranks, and summed up over tied parameters."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from torch import nn

from parallelism.data.exposed_time import ExposedTime
from parallelism.pipeline.schedule.actions import FORWARD, Action, Order

if TYPE_CHECKING:
    from collectives import Communicator, Plan


Parts = list[tuple[Action, dict[str, slice]]]


class StageReducer(ExposedTime):
    """Reduces each stage's gradients, from the end of its last backward pass on.

    `plans` do so, each after an action; those of `across` follow when all have ended.
    """

    def __init__(self, actions: Iterable[Action], plans: Iterable[Plan], across: Sequence[Plan] = ()):
        self.across = across
        self.plans: dict[Action, list[Plan]] = defaultdict(list)
        for action, plan in zip(actions, plans, strict=True):
            self.plans[action].append(plan)

    def begin(self, action: Action, following: Action | None) -> None:
        """Before an action there is nothing to do."""

    def end(self, action: Action) -> None:
        """After an action: start with what is whole by it."""
        for plan in self.plans.get(action, ()):
            plan.start()

    def wait(self) -> None:
        with self.waiting():
            for plans in self.plans.values():
                for plan in plans:
                    plan.wait()
            for plan in self.across:
                plan()


def runs(
    model: nn.Module,
    modules: Mapping[int, Sequence[str]],
    order: Order,
    slices: Mapping[str, slice],
    alone: Collection[str] = (),
) -> Parts:
    """Neighbours in an arena whose gradients are whole after the same action, and where they lie.

    `order` are a rank's actions; `modules` are the names of those of `model` that each of its stages has.  A parameter
    of two stages is whole after the later one.  Those `alone` have no neighbours.
    """
    last = {action.stage: action for action in order if action.kind != FORWARD}
    ends = {
        param: last[stage]
        for stage in sorted(modules, key=lambda stage: order.index(last[stage]))
        for name in modules[stage]
        for param in model.get_submodule(name).parameters()
    }
    params = dict(model.named_parameters())
    trained = [name for name in slices if params[name].requires_grad]
    groups = groupby(trained, key=lambda name: (ends[params[name]], name if name in alone else None))
    return [(action, {name: slices[name] for name in names}) for (action, _), names in groups]


Tied = list[tuple[str, ...]]


def tied_names(model: nn.Module) -> Tied:
    """The names of each parameter that has several."""
    names: dict[nn.Parameter, list[str]] = defaultdict(list)
    for name, param in model.named_parameters(remove_duplicate=False):
        names[param].append(name)
    return [tuple(group) for group in names.values() if len(group) > 1]


class TiedGradients:
    """Sums up the gradients of parameters that are tied in the whole model, but lie on several ranks of `pp`.

    `tied` are their names there, `model` what this rank has of it, `slices` where their gradients lie.  Collective.
    """

    def __init__(self, tied: Tied, model: nn.Module, gradients: Any, slices: Mapping[str, slice], pp: Communicator):
        self.plans: list[Plan] = []
        self.comms: list[Communicator] = []
        params = dict(model.named_parameters())
        for names in tied:
            own = [name for name in names if name in params]
            comm = pp.split(0 if own else None)
            self.comms += [comm] if comm else []
            if comm is not None and comm.size > 1 and params[own[0]].requires_grad:
                self.plans.append(comm.plan("all_reduce", gradients[slices[own[0]]]))

    def sum_up(self) -> None:
        for plan in self.plans:
            plan()

    def free(self) -> None:
        """Give its communicators back to MPI.  Collective."""
        self.plans.clear()
        for comm in self.comms:
            comm.free()
