"""Greedy schedules, built by simulation: an idle rank takes the best action that can begin: INPUTS, FORWARD, WEIGHTS.

Micro-batches are equivalent, so that every stage takes them in order.  Memory cannot run out: a rank begins a forward
pass only if all those of the oldest micro-batch still fit, and backward passes free memory.
"""

import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import heappop, heappush

from parallelism.pipeline.schedule.price import ActionGraph, Costs, rules
from parallelism.step.actions import BACKWARD, FORWARD, INPUTS, WEIGHTS, Action

SHARES = (0.5, 0.625, 0.75, 0.875, 1.0, 1.125, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 1e9)


@dataclass(frozen=True)
class SchedulingProblem:
    """A scheduling problem: the rank of each stage, and each rank's limit of live activations."""

    home: tuple[int, ...]
    num_micro_batches: int
    costs: Costs
    limits: tuple[int, ...]

    @property
    def num_ranks(self) -> int:
        return len(self.limits)

    @cached_property
    def rules(self) -> ActionGraph:
        return rules(self.home, self.num_micro_batches, self.costs)

    @cached_property
    def stages(self) -> list[list[int]]:
        return [[stage for stage, own in enumerate(self.home) if own == rank] for rank in range(self.num_ranks)]

    @cached_property
    def takes_s(self) -> dict[str, list[float]]:
        return self.costs.by_kind(len(self.home))

    @cached_property
    def sent_s(self) -> list[float]:
        return self.costs.message_s(self.home)


def caps_of(job: SchedulingProblem) -> Iterator[tuple[int, ...]]:
    """Yield caps: each rank's maximum of forward passes whose backward passes have not begun.

    They are fractions of those that keep all ranks busy.
    """
    ideal, least = in_flight(job), [*map(len, job.stages)]
    for share in SHARES:
        caps = (math.ceil(min(share * ahead, limit)) for ahead, limit in zip(ideal, job.limits, strict=True))
        yield tuple(map(max, least, caps))


def in_flight(job: SchedulingProblem) -> list[float]:
    """Return the number of forward passes that each rank must be ahead to stay busy, by Little's law.

    That is the time from each of its stages to the end and back, divided by the busiest rank's time per micro-batch.
    """
    takes_s, sent_s = job.takes_s, [*job.sent_s, 0.0]
    away_s = [0.0] * (len(job.home) + 1)
    for stage in reversed(range(len(job.home))):
        away_s[stage] = away_s[stage + 1] + takes_s[FORWARD][stage] + takes_s[INPUTS][stage] + 2 * sent_s[stage]
    turn_s = max(sum(takes_s[FORWARD][stage] + takes_s[BACKWARD][stage] for stage in own) for own in job.stages)
    return [sum(away_s[stage] for stage in own) / turn_s if turn_s else 1.0 for own in job.stages]


class Greedy:
    """State of all ranks of the simulation; `caps` are those of `caps_of`."""

    def __init__(self, job: SchedulingProblem, caps: Sequence[int]):
        self.job, self.caps = job, caps
        self.came_s: dict[str, list[list[float]]] = {kind: [[] for _ in job.home] for kind in (INPUTS, FORWARD)}
        self.came_s[FORWARD][0] = [0.0] * job.num_micro_batches
        self.num_begun = {kind: [0] * len(job.home) for kind in (INPUTS, FORWARD)}
        self.weights: list[deque[Action]] = [deque() for _ in job.stages]  # that could begin, by rank
        self.num_in_flight = [0] * job.num_ranks
        self.oldest = 0  # first micro-batch that has not passed the last stage
        self.free_s = [0.0] * job.num_ranks
        self.wakes = [(0.0, rank) for rank in range(job.num_ranks)]
        self.orders: list[list[Action]] = [[] for _ in job.stages]

    def run(self) -> list[list[Action]]:
        while self.wakes:
            now_s, rank = heappop(self.wakes)
            if self.free_s[rank] <= now_s and (action := self.choose(rank, now_s)):
                self.begin(rank, action, now_s)
        return self.orders

    def choose(self, rank: int, now_s: float) -> Action | None:
        """Return the action that an idle rank begins, if any; of forward passes, that of its last stage."""
        for kind in (INPUTS, FORWARD):
            for stage in self.job.stages[rank][:: -1 if kind == FORWARD else 1]:
                micro_batch, came_s = self.num_begun[kind][stage], self.came_s[kind][stage]
                has_come = micro_batch < len(came_s) and came_s[micro_batch] <= now_s
                if has_come and (kind == INPUTS or self.has_room(rank, micro_batch)):
                    return Action(stage, kind, micro_batch)
        return self.weights[rank][0] if self.weights[rank] else None

    def has_room(self, rank: int, micro_batch: int) -> bool:
        num_begun = self.num_begun[FORWARD]
        reserve = sum(num_begun[stage] <= self.oldest for stage in self.job.stages[rank])  # for the oldest micro-batch
        reserve += micro_batch != self.oldest
        in_flight = self.num_in_flight[rank] + reserve
        return in_flight + len(self.weights[rank]) <= self.job.limits[rank] and in_flight <= self.caps[rank]

    def begin(self, rank: int, action: Action, now_s: float) -> None:
        stage, kind, micro_batch = action
        end_s = now_s + self.job.takes_s[kind][stage]
        self.orders[rank].append(action)
        self.free_s[rank] = end_s
        heappush(self.wakes, (end_s, rank))
        if kind == WEIGHTS:
            self.weights[rank].popleft()
            return
        self.num_begun[kind][stage] += 1
        self.num_in_flight[rank] += 1 if kind == FORWARD else -1
        if kind == INPUTS:
            self.weights[rank].append(action._replace(kind=WEIGHTS))
            if stage:
                self.hand_over(kind, stage, stage - 1, end_s)
        elif stage + 1 < len(self.job.home):
            self.hand_over(kind, stage, stage + 1, end_s)
        else:
            self.came_s[INPUTS][stage].append(end_s)
            self.oldest = micro_batch + 1

    def hand_over(self, kind: str, stage: int, to: int, end_s: float) -> None:
        """Pass a stage's result to its neighbour."""
        home = self.job.home
        come_s = end_s + self.job.sent_s[min(stage, to)]
        self.came_s[kind][to].append(come_s)
        if home[stage] != home[to]:
            heappush(self.wakes, (come_s, home[to]))
