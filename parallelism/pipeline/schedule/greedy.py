"""Greedy schedules, built by simulation: an idle rank takes the action that a policy prefers.

Micro-batches are equivalent, so that every stage takes them in order.  Memory cannot run out: a rank begins a forward
pass only if all those of the oldest micro-batch still fit, and backward passes free memory.
"""

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from heapq import heappop, heappush
from itertools import pairwise, product
from typing import NamedTuple

from parallelism.pipeline.schedule.actions import BACKWARD, FORWARD, INPUTS, WEIGHTS, Action
from parallelism.pipeline.schedule.price import ActionGraph, Costs, rules

SHARES = (0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 2.5, 3.0, 1e9)
PATIENCES = (0.0, 0.5)


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
        return rules(dict(enumerate(self.home)), self.num_micro_batches, self.costs)

    @cached_property
    def stages(self) -> list[list[int]]:
        """Stages of each rank."""
        return [[stage for stage, own in enumerate(self.home) if own == rank] for rank in range(self.num_ranks)]

    @cached_property
    def takes_s(self) -> dict[str, list[float]]:
        return self.costs.of_kinds(len(self.home))

    @cached_property
    def sent_s(self) -> list[float]:
        """Seconds of a message between each stage and the next one, 0 on the same rank."""
        message_s = self.costs.of_messages(len(self.home))
        return [second * (own != other) for second, (own, other) in zip(message_s, pairwise(self.home), strict=True)]


class Policy(NamedTuple):
    """Preferences among actions."""

    caps: tuple[int, ...]  # each rank's maximum of forward passes whose backward passes have not begun
    forward_first: bool
    deep_first: bool  # prefer forward passes of later stages
    patience: float  # wait for a preferred action that comes within this fraction of the possible action's time


def policies(job: SchedulingProblem) -> Iterator[Policy]:
    """Yield policies whose caps are fractions of those that keep all ranks busy."""
    is_deep = (True, False) if len(job.home) > job.num_ranks else (True,)
    ideal = under_way(job)
    for share, forward_first, deep_first, patience in product(SHARES, (True, False), is_deep, PATIENCES):
        caps = (math.ceil(min(share * ahead, limit)) for ahead, limit in zip(ideal, job.limits, strict=True))
        least = map(len, job.stages)
        yield Policy(tuple(map(max, least, caps)), forward_first, deep_first, patience)


def under_way(job: SchedulingProblem) -> list[float]:
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
    """State of all ranks of the simulation."""

    def __init__(self, job: SchedulingProblem, policy: Policy):
        num_stages, ranks = len(job.home), range(job.num_ranks)
        self.job, self.policy, self.takes_s, self.stages = job, policy, job.takes_s, job.stages
        deep = [own[::-1] for own in self.stages]
        self.liked = {FORWARD: deep if policy.deep_first else self.stages, INPUTS: self.stages}
        self.came_s: dict[str, list[list[float]]] = {kind: [[] for _ in job.home] for kind in (FORWARD, INPUTS)}
        self.came_s[FORWARD][0] = [0.0] * job.num_micro_batches
        self.num_begun = {kind: [0] * num_stages for kind in (FORWARD, INPUTS)}
        self.weights: list[deque[Action]] = [deque() for _ in ranks]  # that could begin, by rank
        self.num_alive, self.num_under_way = [0] * job.num_ranks, [0] * job.num_ranks
        self.oldest = 0  # first micro-batch that has not passed the last stage
        self.free_s = [0.0] * job.num_ranks
        self.wakes = [(0.0, rank) for rank in ranks]
        self.orders: list[list[Action]] = [[] for _ in ranks]

    def run(self) -> list[list[Action]]:
        while self.wakes:
            now_s, rank = heappop(self.wakes)
            if self.free_s[rank] <= now_s and (action := self.choose(rank, now_s)):
                self.do(rank, action, now_s)
        return self.orders

    def choose(self, rank: int, now_s: float) -> Action | None:
        """Return the action that an idle rank begins, if any."""
        kinds = (FORWARD, INPUTS) if self.policy.forward_first else (INPUTS, FORWARD)
        best_s = math.inf
        for kind in kinds:
            come_s, action = self.offer(rank, kind, now_s)
            if action and come_s <= now_s:
                return self.unless(action, best_s, now_s)
            best_s = min(best_s, come_s)
        return self.unless(self.weights[rank][0], best_s, now_s) if self.weights[rank] else None

    def unless(self, action: Action, better_s: float, now_s: float) -> Action | None:
        """Return the action, or None if it pays to wait for a better one."""
        waits = better_s < now_s + self.policy.patience * self.takes_s[action.kind][action.stage]
        return None if waits else action

    def offer(self, rank: int, kind: str, now_s: float) -> tuple[float, Action | None]:
        """Return the preferred action of a kind that could begin now, or else the earliest one, and its time."""
        soonest: tuple[float, Action | None] = (math.inf, None)
        for stage in self.liked[kind][rank]:
            micro_batch, came_s = self.num_begun[kind][stage], self.came_s[kind][stage]
            if micro_batch == len(came_s) or (kind == FORWARD and not self.has_room(rank, micro_batch)):
                continue
            if came_s[micro_batch] <= now_s:
                return came_s[micro_batch], Action(stage, kind, micro_batch)
            if came_s[micro_batch] < soonest[0]:
                soonest = came_s[micro_batch], Action(stage, kind, micro_batch)
        return soonest

    def has_room(self, rank: int, micro_batch: int) -> bool:
        num_begun = self.num_begun[FORWARD]
        reserve = sum(num_begun[stage] <= self.oldest for stage in self.stages[rank])  # for the oldest micro-batch
        reserve += micro_batch != self.oldest
        is_alive, is_under_way = self.num_alive[rank] + reserve, self.num_under_way[rank] + reserve
        return is_alive <= self.job.limits[rank] and is_under_way <= self.policy.caps[rank]

    def do(self, rank: int, action: Action, now_s: float) -> None:
        end_s = now_s + self.takes_s[action.kind][action.stage]
        self.orders[rank].append(action)
        self.free_s[rank] = end_s
        heappush(self.wakes, (end_s, rank))
        if action.kind == FORWARD:
            self.forward(rank, action, end_s)
        elif action.kind == INPUTS:
            self.inputs(rank, action, end_s)
        else:
            self.weights[rank].popleft()
            self.num_alive[rank] -= 1

    def forward(self, rank: int, action: Action, end_s: float) -> None:
        self.num_begun[FORWARD][action.stage] += 1
        self.num_alive[rank] += 1
        self.num_under_way[rank] += 1
        if action.stage + 1 < len(self.job.home):
            self.hand_over(FORWARD, action.stage, action.stage + 1, end_s)
        else:
            self.came_s[INPUTS][action.stage].append(end_s)
            self.oldest = action.micro_batch + 1

    def inputs(self, rank: int, action: Action, end_s: float) -> None:
        self.num_begun[INPUTS][action.stage] += 1
        self.num_under_way[rank] -= 1
        self.weights[rank].append(action._replace(kind=WEIGHTS))
        if action.stage:
            self.hand_over(INPUTS, action.stage, action.stage - 1, end_s)

    def hand_over(self, kind: str, stage: int, to: int, end_s: float) -> None:
        """Pass a stage's result to its neighbour."""
        home = self.job.home
        come_s = end_s + self.job.sent_s[min(stage, to)]
        self.came_s[kind][to].append(come_s)
        if home[stage] != home[to]:
            heappush(self.wakes, (come_s, home[to]))
