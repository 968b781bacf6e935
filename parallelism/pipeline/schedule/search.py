"""Schedule search: find a schedule for given costs and a memory limit, at least as good as every known one.

Known schedules within the limit, and greedy ones with many caps (see `greedy`), are simulated; the best of them are
improved by moving actions that only their rank's order delays.  The same arguments give the same schedule on every
machine, because the search ends after an amount of work, not of time.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, chain
from operator import add, attrgetter

from parallelism.pipeline.schedule import registry
from parallelism.pipeline.schedule.actions import Schedule, count_peaks
from parallelism.pipeline.schedule.greedy import Greedy, SchedulingProblem, caps_of
from parallelism.pipeline.schedule.improve import LEAST_GAIN, TimedOrders, improve, timed
from parallelism.pipeline.schedule.price import Costs, play, price
from parallelism.pipeline.schedule.proof import prove
from parallelism.pipeline.schedule.zero_bubble import in_turn
from parallelism.step.actions import BACKWARD, FORWARD, INPUTS, WEIGHTS, Action

WORK = 3_000_000  # actions to simulate; about 2 s at most
GREEDY_WORK = 10  # relative cost of an action of a greedy schedule
NUM_IMPROVED = 3


def search(
    num_ranks: int,
    num_micro_batches: int,
    virtual_stages: int,
    costs: Costs | Callable[[tuple[int, ...]], Costs],
    limit: int | Sequence[int] | None = None,
    *,
    work: int = WORK,
) -> Schedule:
    """Search for the best schedule with at most `limit` live activations: one number, or one per rank.

    Where ranks differ, `costs` is a function that returns those of stages from the rank of each.

    Raises: ValueError for a limit that is too low, with one that is not.
    """
    limits = limits_of(limit, num_ranks, num_micro_batches, virtual_stages)
    costs_of = costs if callable(costs) else lambda home: costs
    homes = placements(num_ranks, virtual_stages)
    jobs = [SchedulingProblem(home, num_micro_batches, costs_of(home), limits) for home in homes]
    least_s = (1 + LEAST_GAIN) * min(map(bound_s, jobs))
    fitting = [each for each in registered(num_ranks, num_micro_batches, virtual_stages) if keeps(each, limits)]
    problems = [replace(jobs[0], home=each.placement, costs=costs_of(each.placement)) for each in fitting]
    baselines = (timed(problem, each.orders) for problem, each in zip(problems, fitting, strict=True))
    draws = random.Random(0)
    starts = []
    for start in chain(baselines, by_caps(jobs, draws, work // 2)):
        starts.append(start)
        if start.span_s <= least_s:  # it cannot be improved
            break
    starts.sort(key=attrgetter("span_s"))
    improved = [improve(start, draws, work // 2 // NUM_IMPROVED, least_s) for start in starts[:NUM_IMPROVED]]
    best = chosen([*fitting, finished(min(improved, key=attrgetter("span_s")))], costs_of)
    prove(best)
    return best


def chosen(schedules: Sequence[Schedule], costs_of: Callable[[tuple[int, ...]], Costs]) -> Schedule:
    """Choose the fastest, then the one with fewest live activations, then the first."""
    times_s = [price(each, costs_of(each.placement)).span_s for each in schedules]
    best = [each for each, s in zip(schedules, times_s, strict=True) if s <= (1 + LEAST_GAIN) * min(times_s)]
    return min(best, key=lambda each: sum(each.peaks))


def limits_of(
    limit: int | Sequence[int] | None, num_ranks: int, num_micro_batches: int, virtual_stages: int
) -> tuple[int, ...]:
    """Return a limit per rank, which defaults to the number of all activations."""
    if min(num_ranks, num_micro_batches, virtual_stages) < 1:
        counts = f"{num_ranks} ranks, {num_micro_batches} micro-batches and {virtual_stages} stages a rank"
        raise ValueError(f"a pipeline of {counts}: use 1 or more of each")
    limit = num_micro_batches * virtual_stages if limit is None else limit
    limits = [limit] if isinstance(limit, int) else [*limit]
    limits *= num_ranks if len(limits) == 1 else 1
    if len(limits) != num_ranks:
        raise ValueError(f"{len(limits)} limits for {num_ranks} ranks: pass one, or {num_ranks}")
    if min(limits) < virtual_stages:
        why = f"a rank has one alive for each of its stages, use {virtual_stages} or more"
        raise ValueError(f"a limit of {min(limits)} activations: {why}")
    return tuple(limits)


def placements(num_ranks: int, virtual_stages: int) -> list[tuple[int, ...]]:
    """Return candidate placements of stages on ranks: consecutive, round-robin, and zigzag.

    >>> placements(2, 2)
    [(0, 0, 1, 1), (0, 1, 0, 1), (0, 1, 1, 0)]
    """
    stages = range(num_ranks * virtual_stages)
    row = tuple(stage // virtual_stages for stage in stages)
    looped = tuple(stage % num_ranks for stage in stages)
    zigzag = tuple(r if s // num_ranks % 2 == 0 else num_ranks - 1 - r for s, r in enumerate(looped))
    return list(dict.fromkeys([row, looped, zigzag]))


def registered(num_ranks: int, num_micro_batches: int, virtual_stages: int) -> Iterator[Schedule]:
    """Yield every registered schedule; one for a single stage per rank runs a rank's stages consecutively."""
    for name, row in registry.REGISTRY.items():
        if row.fits(virtual_stages):
            yield registry.make_schedule(name, num_ranks, num_micro_batches, virtual_stages)
        elif row.fits(1):
            yield finer(registry.make_schedule(name, num_ranks, num_micro_batches, 1), virtual_stages)


def finer(schedule: Schedule, parts: int) -> Schedule:
    """Split each stage of a schedule into parts."""

    def cut(action: Action) -> list[Action]:
        stages = range(action.stage * parts, (action.stage + 1) * parts)
        return [action._replace(stage=stage) for stage in (stages if action.kind == FORWARD else stages[::-1])]

    orders = tuple(tuple(chain.from_iterable(map(cut, order))) for order in schedule.orders)
    return Schedule(schedule.name, orders, count_peaks(orders))


def keeps(schedule: Schedule, limits: Sequence[int]) -> bool:
    return all(peak <= limit for peak, limit in zip(schedule.peaks, limits, strict=True))


def by_caps(jobs: Sequence[SchedulingProblem], draws: random.Random, work: int) -> Iterator[TimedOrders]:
    """Yield greedy schedules with some random caps, or with all of them if `work` suffices."""
    each = [(job, caps) for job in jobs for caps in caps_of(job)]
    draws.shuffle(each)
    size = 3 * len(jobs[0].home) * jobs[0].num_micro_batches
    for job, caps in each[: max(1, work // (GREEDY_WORK * size))]:
        yield timed(job, Greedy(job, caps).run())


def bound_s(job: SchedulingProblem) -> float:
    """Return a lower bound in seconds: a rank's work after its first message, or a micro-batch's way there and back."""
    takes_s, sent_s = job.takes_s, job.sent_s
    comes_s = [0.0, *accumulate(map(add, takes_s[FORWARD], sent_s))]
    each_s = list(map(add, takes_s[FORWARD], takes_s[BACKWARD]))
    busy_s = [comes_s[own[0]] + job.num_micro_batches * sum(each_s[stage] for stage in own) for own in job.stages]
    return max(*busy_s, sum(takes_s[FORWARD]) + sum(takes_s[INPUTS]) + 2 * sum(sent_s) + takes_s[WEIGHTS][0])


def finished(best: TimedOrders) -> Schedule:
    """Return the schedule with micro-batches renumbered in order, and backward passes joined where that costs nothing.

    Neither delays the end.
    """
    action, count = best.job.rules.action, best.job.num_micro_batches
    orders = tuple(in_turn((action(number)[:2] for number in order), count) for order in best.orders)
    for stage in range(len(best.job.home)):
        whole = tuple(tuple(joined(order, stage)) for order in orders)
        numbers = [list(map(best.job.rules.number, order)) for order in whole]
        orders = whole if play(numbers, best.job.rules)[1] <= (1 + LEAST_GAIN) * best.span_s else orders
    return Schedule("searched", orders, count_peaks(orders))


def joined(order: Sequence[Action], stage: int) -> Iterator[Action]:
    """Join adjacent INPUTS and WEIGHTS actions of a stage into one backward pass."""
    pairs = iter(zip(order, [*order[1:], None], strict=True))
    for action, following in pairs:
        if action.stage == stage and action.kind == INPUTS and following == action._replace(kind=WEIGHTS):
            next(pairs)
            yield action._replace(kind=BACKWARD)
        else:
            yield action
