"""What a schedule costs: when each action begins and ends, and how long ranks have nothing to do.

An action begins when its rank is free and what it needs of another rank has come: a message's time after the end of
the action that makes it.  Between stages of one rank nothing travels.  Messages do not get into each other's way.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice, product
from typing import NamedTuple

from parallelism.pipeline.schedule.actions import (
    BACKWARD,
    FORWARD,
    INPUTS,
    KINDS,
    WEIGHTS,
    Action,
    Schedule,
    count_peaks,
    needs,
    result,
)

Seconds = float | Sequence[float]


class Costs(NamedTuple):
    """Seconds of each kind of action, one number or one for each stage; a whole backward pass is inputs and weights.

    A message's are between two ranks, one number or one for each pair of stages in a row.
    """

    forward: Seconds = 1.0
    inputs: Seconds = 1.0
    weights: Seconds = 1.0
    message: Seconds = 0.0

    def of_kinds(self, num_stages: int) -> dict[str, list[float]]:
        """Return the seconds of every stage, by kind of action.

        Raises: ValueError for times below 0, and lists of other lengths.
        """
        forward = spread("forward", self.forward, num_stages)
        inputs, weights = spread("inputs", self.inputs, num_stages), spread("weights", self.weights, num_stages)
        whole = [i + w for i, w in zip(inputs, weights, strict=True)]
        return {FORWARD: forward, BACKWARD: whole, INPUTS: inputs, WEIGHTS: weights}

    def of_messages(self, num_stages: int) -> list[float]:
        """Return the seconds of a message between each stage and the next one."""
        return spread("message", self.message, max(0, num_stages - 1))


EQUAL = Costs()  # as zero-bubble schedules are drawn: a backward pass twice as long as a forward pass


def spread(name: str, times: Seconds, count: int) -> list[float]:
    """Return `count` numbers, from one number for all or from one for each."""
    seconds = [float(times)] * count if isinstance(times, float | int) else [float(second) for second in times]
    if len(seconds) != count:
        raise ValueError(f"{name} has {len(seconds)} times: pass one, or {count}")
    if wrong := [second for second in seconds if not 0 <= second < math.inf]:
        raise ValueError(f"{name} takes {wrong[0]:g} s: pass 0 or more")
    return seconds


class Span(NamedTuple):
    """What a rank does from `begin_s` to `end_s`: an action's text, or something else that takes time."""

    rank: int
    what: str
    begin_s: float
    end_s: float


@dataclass(frozen=True)
class Timeline:
    """When each action of a schedule begins and ends."""

    schedule: Schedule
    begin_s: dict[Action, float]
    end_s: dict[Action, float]

    @cached_property
    def span_s(self) -> float:
        return max(self.end_s.values(), default=0.0)

    @property
    def bubble(self) -> float:
        """The share of all ranks' time in which they have nothing to do."""
        busy_s = sum(end - self.begin_s[action] for action, end in self.end_s.items())
        return 1 - busy_s / (self.schedule.num_ranks * self.span_s) if self.span_s else 0.0

    @property
    def peaks(self) -> tuple[int, ...]:
        """The activations that each rank has alive at most."""
        return count_peaks(self.schedule.orders)

    @property
    def spans(self) -> list[Span]:
        return [
            Span(rank, str(action), self.begin_s[action], self.end_s[action])
            for rank, order in enumerate(self.schedule.orders)
            for action in order
        ]


class ActionGraph(NamedTuple):
    """What actions take, and which wait for which, by numbers: for speed, in the search."""

    num_micro_batches: int
    takes_s: list[float]
    reads: list[int | None]  # the action whose result must have come from another stage, or from the way forward
    writes: list[int]  # the action whose result this one gives
    travels_s: list[float]  # the result

    def number(self, action: Action) -> int:
        stage, kind, micro_batch = action
        return (stage * len(KINDS) + KINDS.index(kind)) * self.num_micro_batches + micro_batch

    def action(self, number: int) -> Action:
        which, micro_batch = divmod(number, self.num_micro_batches)
        return Action(which // len(KINDS), KINDS[which % len(KINDS)], micro_batch)


def rules(home: Mapping[int, int], num_micro_batches: int, costs: Costs) -> ActionGraph:
    """Return the dependencies of all possible actions, with each stage on its rank."""
    num_stages = len(home)
    takes_s, message_s = costs.of_kinds(num_stages), costs.of_messages(num_stages)
    graph = ActionGraph(num_micro_batches, [], [], [], [])
    for stage, kind in product(range(num_stages), KINDS):
        pair = stage if kind == FORWARD else stage - 1
        is_sent = 0 <= pair < num_stages - 1 and home[pair] != home[pair + 1]
        graph.takes_s.extend([takes_s[kind][stage]] * num_micro_batches)
        graph.travels_s.extend([message_s[pair] if is_sent else 0.0] * num_micro_batches)
        action = Action(stage, kind, 0)
        awaited = needs(action, num_stages) if kind != WEIGHTS else []
        read = graph.number(awaited[-1]) if awaited else None
        graph.reads.extend([None] * num_micro_batches if read is None else range(read, read + num_micro_batches))
        write = graph.number(result(action))
        graph.writes.extend(range(write, write + num_micro_batches))
    return graph


class SimulatedTimes(NamedTuple):
    """When each action begins, by its number, and when all have ended."""

    begin_s: list[float]
    span_s: float


def play(orders: Sequence[Sequence[int]], rules: ActionGraph) -> SimulatedTimes:
    """Run all ranks' actions, given by their numbers.

    Raises: ValueError where all ranks wait, as none does in a schedule that is proved.
    """
    _, takes_s, reads, writes, travels_s = rules
    begin_s = [0.0] * len(takes_s)
    came_s: list[float | None] = [None] * len(takes_s)
    waiting: dict[int, int] = {}  # the rank that waits for a result
    num_done, free_s = [0] * len(orders), [0.0] * len(orders)
    ready = list(range(len(orders)))
    while ready:
        rank = ready.pop()
        now_s = free_s[rank]
        for action in islice(orders[rank], num_done[rank], None):
            if (awaited := reads[action]) is not None:
                if (come_s := came_s[awaited]) is None:
                    waiting[awaited] = rank
                    break
                now_s = max(now_s, come_s)
            begin_s[action] = now_s
            now_s += takes_s[action]
            num_done[rank] += 1
            output = writes[action]
            came_s[output] = now_s + travels_s[output]
            if output in waiting:
                ready.append(waiting.pop(output))
        free_s[rank] = now_s
    if waiting:
        stuck = ", ".join(
            f"{rules.action(orders[rank][num_done[rank]])} on rank {rank}" for rank in sorted(waiting.values())
        )
        raise ValueError(f"no rank can proceed; waiting: {stuck}")
    return SimulatedTimes(begin_s, max(free_s, default=0.0))


def price(schedule: Schedule, costs: Costs = EQUAL) -> Timeline:
    """Return when each action of a schedule begins and ends.

    Raises: ValueError for costs that make no sense, and where all ranks wait.
    """
    graph = rules(schedule.home, schedule.num_micro_batches, costs)
    orders = [list(map(graph.number, order)) for order in schedule.orders]
    begin_s = play(orders, graph).begin_s
    spans = {
        action: (begin_s[number], begin_s[number] + graph.takes_s[number])
        for order, numbers in zip(schedule.orders, orders, strict=True)
        for action, number in zip(order, numbers, strict=True)
    }
    return Timeline(schedule, *({action: span[end] for action, span in spans.items()} for end in (0, 1)))
