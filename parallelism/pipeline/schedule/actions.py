"""Pipeline schedules as data: each rank's actions in order.

Each stage belongs to one rank, and a rank may have several.  An action begins once its rank's previous action is done,
and the results that it needs have arrived.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from parallelism.step.actions import BACKWARD, FORWARD, INPUTS, WEIGHTS, Action, Order


@dataclass(frozen=True)
class Schedule:
    """Each rank's actions in order, and the peak number of live activations that the schedule states for each rank.

    An activation is one stage's saved state of one micro-batch, from its forward pass to the end of its backward pass,
    or of the part for weights.
    """

    name: str
    orders: tuple[Order, ...]
    peaks: tuple[int, ...]

    @property
    def num_ranks(self) -> int:
        return len(self.orders)

    @cached_property
    def num_stages(self) -> int:
        return 1 + max((a.stage for order in self.orders for a in order), default=-1)

    @cached_property
    def num_micro_batches(self) -> int:
        return 1 + max((a.micro_batch for order in self.orders for a in order), default=-1)

    @cached_property
    def home(self) -> dict[int, int]:
        """The rank of each stage."""
        return {a.stage: rank for rank, order in enumerate(self.orders) for a in order}

    @cached_property
    def placement(self) -> tuple[int, ...]:
        """The ranks of the stages, first to last."""
        return tuple(self.home[stage] for stage in range(self.num_stages))

    def stages(self, rank: int) -> tuple[int, ...]:
        """Return a rank's stages, first to last."""
        return tuple(sorted({a.stage for a in self.orders[rank]}))


def num_alive(order: Iterable[Action]) -> list[int]:
    """Count a rank's live activations during each of its actions.

    >>> from parallelism.step.actions import parse
    >>> num_alive(map(parse, "0F0 0F1 0B0 0I1 0W1".split()))
    [1, 2, 2, 1, 1]
    """
    alive, during = 0, []
    for action in order:
        alive += action.kind == FORWARD
        during.append(alive)
        alive -= action.kind in (BACKWARD, WEIGHTS)
    return during


def count_peaks(orders: Iterable[Iterable[Action]]) -> tuple[int, ...]:
    """Return the peak number of live activations on each rank."""
    return tuple(max(num_alive(order), default=0) for order in orders)


def result(action: Action) -> Action:
    """Return an action's result for other stages; a whole backward pass has the result of its INPUTS part."""
    return Action(action.stage, INPUTS, action.micro_batch) if action.kind == BACKWARD else action


def needs(action: Action, num_stages: int) -> list[Action]:
    """Return the results that an action needs before it begins.

    >>> from parallelism.step.actions import parse
    >>> [str(need) for need in needs(parse("1B0"), num_stages=3)]
    ['1F0', '2I0']
    """
    stage, kind, micro_batch = action
    if kind == FORWARD:
        return [Action(stage - 1, FORWARD, micro_batch)] if stage else []
    if kind == WEIGHTS:
        return [Action(stage, INPUTS, micro_batch)]
    after = [Action(stage + 1, INPUTS, micro_batch)] if stage + 1 < num_stages else []
    return [Action(stage, FORWARD, micro_batch), *after]
