"""What a schedule costs: when each action begins and ends, and how long ranks have nothing to do.

An action begins when its rank is free and what it needs of another rank has come: a message's time after the end of
the action that makes it.  Between stages of one rank nothing travels.  Messages do not get into each other's way.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from parallelism.pipeline_schedule.actions import BACKWARD, FORWARD, INPUTS, WEIGHTS, Action, Schedule, num_alive
from parallelism.pipeline_schedule.messages import Message, made, needed

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
        """By kind of action, those of every stage.

        Raises: ValueError for times below 0, and lists of other lengths.
        """
        forward = spread("forward", self.forward, num_stages)
        inputs, weights = spread("inputs", self.inputs, num_stages), spread("weights", self.weights, num_stages)
        whole = [i + w for i, w in zip(inputs, weights, strict=True)]
        return {FORWARD: forward, BACKWARD: whole, INPUTS: inputs, WEIGHTS: weights}

    def of_messages(self, num_stages: int) -> list[float]:
        """Those from each stage to the next one, and back."""
        return spread("message", self.message, max(0, num_stages - 1))


EQUAL = Costs()  # as zero-bubble schedules are drawn: a backward pass twice as long as a forward pass


def spread(name: str, given: Seconds, count: int) -> list[float]:
    """One number for all, or one for each."""
    seconds = [float(given)] * count if isinstance(given, float | int) else [float(second) for second in given]
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
        return tuple(max(num_alive(order), default=0) for order in self.schedule.orders)

    @property
    def spans(self) -> list[Span]:
        return [
            Span(rank, str(action), self.begin_s[action], self.end_s[action])
            for rank, order in enumerate(self.schedule.orders)
            for action in order
        ]


def price(schedule: Schedule, costs: Costs = EQUAL) -> Timeline:
    """Play a schedule.

    Raises: ValueError where all ranks wait, as none does in a schedule that is proved.
    """
    takes_s, message_s = costs.of_kinds(schedule.num_stages), costs.of_messages(schedule.num_stages)
    begin_s: dict[Action, float] = {}
    end_s: dict[Action, float] = {}
    came_s: dict[Message | None, float] = {None: 0.0}
    left = [list(reversed(order)) for order in schedule.orders]
    free_s = [0.0] * schedule.num_ranks
    ready = list(range(schedule.num_ranks))
    waiting: dict[Message | None, int] = {}
    while ready:
        rank = ready.pop()
        while left[rank]:
            action = left[rank][-1]
            awaited = needed(schedule, action)
            if awaited not in came_s:
                waiting[awaited] = rank
                break
            left[rank].pop()
            begin_s[action] = max(free_s[rank], came_s[awaited])
            end_s[action] = free_s[rank] = begin_s[action] + takes_s[action.kind][action.stage]
            if message := made(schedule, action):
                came_s[message] = end_s[action] + message_s[min(action.stage, message.stage)]
                if message in waiting:
                    ready.append(waiting.pop(message))
    if waiting:
        raise ValueError(f"no rank can go on: {', '.join(f'{left[r][-1]} waits for {m}' for m, r in waiting.items())}")
    return Timeline(schedule, begin_s, end_s)
