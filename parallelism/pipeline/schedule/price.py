"""Schedule simulation: the begin and end of each action, and the ranks' idle time.

An action begins when its rank is free and its input has arrived: a message's time after the end of the sending action,
or at once from a stage of the same rank.  Messages do not contend for bandwidth.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice, product
from typing import NamedTuple

from parallelism.pipeline.schedule import actions
from parallelism.pipeline.schedule.actions import Schedule
from parallelism.step.actions import BACKWARD, FORWARD, INPUTS, KINDS, WEIGHTS, Action

Seconds = float | Sequence[float]
Home = Mapping[int, int] | Sequence[int]  # the rank of each stage


class Costs(NamedTuple):
    """Seconds of each kind of action, one number or one per stage; a whole backward pass takes inputs plus weights.

    Those of a message apply between ranks: one number, or one per pair of consecutive stages.
    """

    forward: Seconds = 1.0
    inputs: Seconds = 1.0
    weights: Seconds = 1.0
    message: Seconds = 0.0

    def by_kind(self, num_stages: int) -> dict[str, list[float]]:
        """Return the seconds of every stage, by kind of action.

        Raises: ValueError for negative times, and lists of the wrong length.
        """
        forward = one_each("forward", self.forward, num_stages)
        inputs, weights = one_each("inputs", self.inputs, num_stages), one_each("weights", self.weights, num_stages)
        whole = [i + w for i, w in zip(inputs, weights, strict=True)]
        return {FORWARD: forward, BACKWARD: whole, INPUTS: inputs, WEIGHTS: weights}

    def message_s(self, home: Home) -> list[float]:
        """Return the seconds of a message between each stage and the next one, 0 on the same rank."""
        seconds = one_each("message", self.message, max(0, len(home) - 1))
        return [second * (home[stage] != home[stage + 1]) for stage, second in enumerate(seconds)]


EQUAL = Costs()  # as in zero-bubble papers: a backward pass takes twice as long as a forward pass


def one_each(name: str, times: Seconds, count: int) -> list[float]:
    """Return `count` numbers, given one number for all or one for each."""
    seconds = [float(second) for second in ([times] if isinstance(times, float | int) else times)]
    seconds *= count if len(seconds) == 1 else 1
    if len(seconds) != count:
        raise ValueError(f"{name} has {len(seconds)} times: pass one, or {count}")
    if wrong := [second for second in seconds if not 0 <= second < math.inf]:
        raise ValueError(f"{name} takes {wrong[0]:g} s: pass 0 or more")
    return seconds


class Span(NamedTuple):
    """A rank's activity from `begin_s` to `end_s`: an action's text, or another label."""

    rank: int
    what: str
    begin_s: float
    end_s: float


class Timeline(NamedTuple):
    """The spans of a schedule's actions, by rank and in order."""

    schedule: Schedule
    spans: list[Span]
    span_s: float  # end of the last

    @property
    def bubble(self) -> float:
        """Idle fraction of all ranks' time, 0 to 1."""
        return bubble(self.spans, self.schedule.num_ranks, self.span_s)


def bubble(spans: Iterable[Span], num_ranks: int, span_s: float) -> float:
    """Return the fraction of `span_s` in which ranks have none of these spans, 0 to 1."""
    busy_s = sum(span.end_s - span.begin_s for span in spans)
    return 1 - busy_s / (num_ranks * span_s) if span_s else 0.0


class ActionGraph(NamedTuple):
    """Times and dependencies of actions, which are numbered, for a fast search."""

    num_micro_batches: int
    takes_s: list[float]
    reads: list[int | None]  # the action whose result it needs, of another stage or of its own forward pass
    writes: list[int]  # the action that names its result
    travels_s: list[float]  # transfer time of the result

    def number(self, action: Action) -> int:
        stage, kind, micro_batch = action
        return (stage * len(KINDS) + KINDS.index(kind)) * self.num_micro_batches + micro_batch

    def action(self, number: int) -> Action:
        which, micro_batch = divmod(number, self.num_micro_batches)
        return Action(which // len(KINDS), KINDS[which % len(KINDS)], micro_batch)


def rules(home: Home, num_micro_batches: int, costs: Costs) -> ActionGraph:
    """Return the dependencies of all possible actions, given the rank of each stage."""
    num_stages = len(home)
    takes_s, sent_s = costs.by_kind(num_stages), costs.message_s(home)
    graph = ActionGraph(num_micro_batches, [], [], [], [])
    for stage, kind in product(range(num_stages), KINDS):
        pair = stage if kind == FORWARD else stage - 1
        graph.takes_s.extend([takes_s[kind][stage]] * num_micro_batches)
        graph.travels_s.extend([sent_s[pair] if 0 <= pair < num_stages - 1 else 0.0] * num_micro_batches)
        action = Action(stage, kind, 0)
        awaited = actions.needs(action, num_stages) if kind != WEIGHTS else []
        read = graph.number(awaited[-1]) if awaited else None
        graph.reads.extend([None] * num_micro_batches if read is None else range(read, read + num_micro_batches))
        write = graph.number(actions.result(action))
        graph.writes.extend(range(write, write + num_micro_batches))
    return graph


def play(orders: Sequence[Sequence[int]], rules: ActionGraph) -> tuple[list[float], float]:
    """Simulate all ranks' actions, given by their numbers: return the begin of each, and the end of the last.

    Raises: ValueError if all ranks wait, which is impossible in a proved schedule.
    """
    _, takes_s, reads, writes, travels_s = rules
    begin_s = [0.0] * len(takes_s)
    came_s: list[float | None] = [None] * len(takes_s)
    waiting: dict[int, int] = {}  # the rank that waits, by result
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
        stuck = {rank: rules.action(orders[rank][num_done[rank]]) for rank in sorted(waiting.values())}
        named = ", ".join(f"{action} on rank {rank}" for rank, action in stuck.items())
        raise ValueError(f"no rank can proceed; waiting: {named}")
    return begin_s, max(free_s, default=0.0)


def price(schedule: Schedule, costs: Costs = EQUAL) -> Timeline:
    """Return the begin and end of each action of a schedule.

    Raises: ValueError for invalid costs, and if all ranks wait.
    """
    graph = rules(schedule.home, schedule.num_micro_batches, costs)
    orders = [list(map(graph.number, order)) for order in schedule.orders]
    begin_s, span_s = play(orders, graph)
    spans = [
        Span(rank, str(graph.action(number)), begin_s[number], begin_s[number] + graph.takes_s[number])
        for rank, order in enumerate(orders)
        for number in order
    ]
    return Timeline(schedule, spans, span_s)
