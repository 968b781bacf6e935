"""Local search: improve a schedule by moving actions on its critical path.

The path leads back from the action that ends last to the start: each of its actions begins when the previous one has
ended, on the same rank or with a message.  The end can be earlier only if two of them on one rank change places.
"""

import random
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import NamedTuple

from parallelism.pipeline.schedule.greedy import SchedulingProblem
from parallelism.pipeline.schedule.price import ActionGraph, play
from parallelism.step.actions import BACKWARD, FORWARD, INPUTS, KINDS, WEIGHTS, Action

DISTANCES = (1, 1, 1, 2, 3, 4, 6)  # by which an action is moved
TOLERANCE = 0.02  # by which a schedule may be longer at first
LEAST_GAIN = 1e-9  # relative


class TimedOrders(NamedTuple):
    """Orders of numbered actions, with split backward passes, and their duration."""

    span_s: float
    job: SchedulingProblem
    orders: list[list[int]]


def timed(job: SchedulingProblem, orders: Iterable[Iterable[Action]]) -> TimedOrders:
    """Split backward passes, which delays no action, and return the orders with their duration."""
    parts = {BACKWARD: (INPUTS, WEIGHTS)}
    split = [[a._replace(kind=kind) for a in order for kind in parts.get(a.kind, (a.kind,))] for order in orders]
    numbered = [list(map(job.rules.number, order)) for order in split]
    return TimedOrders(play(numbered, job.rules)[1], job, numbered)


def improve(start: TimedOrders, draws: random.Random, work: int, least_s: float) -> TimedOrders:
    """Move random actions of the critical path, and keep moves that do not lengthen the schedule.

    At first slightly longer schedules are accepted, with decreasing tolerance, to leave local minima.  Ends when `work`
    actions have been simulated, or the schedule takes no longer than `least_s`.
    """
    best, now_s, orders = start, start.span_s, [*start.orders]
    job, budget, size = start.job, work, sum(map(len, orders))
    pairs = critical(orders, play(orders, job.rules)[0], job.rules)
    while budget > 0 and pairs and best.span_s > least_s:
        rank, position = draws.choice(pairs)
        before, orders[rank] = orders[rank], moved(orders[rank], position, draws)
        played = play_legal(orders, rank, job)
        budget -= size if played else len(before)
        if played and played[1] <= now_s * (1 + TOLERANCE * max(0, budget) / work * draws.random() ** 2):
            begin_s, now_s = played
            pairs = critical(orders, begin_s, job.rules)
            if now_s < best.span_s:
                best = TimedOrders(now_s, job, [*orders])
        else:
            orders[rank] = before
    return best


def moved(order: list[int], position: int, draws: random.Random) -> list[int]:
    """Move the action at a position some positions earlier, or the one before it some positions later."""
    distance, is_later = draws.choice(DISTANCES), draws.random() < 0.5
    source = position - 1 if is_later else position
    rest = order[:source] + order[source + 1 :]
    dest = max(0, source + distance if is_later else source - distance)
    return [*rest[:dest], order[source], *rest[dest:]]


def play_legal(orders: list[list[int]], rank: int, job: SchedulingProblem) -> tuple[list[float], float] | None:
    """Simulate the orders; return None if the rank exceeds its limit, has WEIGHTS before INPUTS, or ranks deadlock."""
    num_alive, earlier = 0, set()
    for action in orders[rank]:
        kind = KINDS[action // job.num_micro_batches % len(KINDS)]
        num_alive += kind == FORWARD
        if num_alive > job.limits[rank] or (kind == WEIGHTS and action - job.num_micro_batches not in earlier):
            return None
        num_alive -= kind == WEIGHTS
        earlier.add(action)
    with suppress(ValueError):
        return play(orders, job.rules)
    return None


def critical(orders: Sequence[Sequence[int]], begin_s: Sequence[float], graph: ActionGraph) -> list[tuple[int, int]]:
    """Return the ranks and positions at which the critical path goes from an action to its rank's next one."""
    at = {action: (rank, position) for rank, order in enumerate(orders) for position, action in enumerate(order)}
    pairs = []
    action = max(at, key=lambda action: begin_s[action] + graph.takes_s[action])
    while True:
        rank, position = at[action]
        previous = orders[rank][position - 1] if position else None
        if previous is not None and begin_s[previous] + graph.takes_s[previous] == begin_s[action]:
            pairs.append((rank, position))
            action = previous
        elif (awaited := graph.reads[action]) is not None:
            action = awaited
        else:
            return pairs
