"""The search for schedules: within the memory limit, as good as every known schedule, and better in hard cases."""

import random

import pytest

from parallelism.pipeline.schedule.greedy import Greedy, SchedulingProblem, caps_of
from parallelism.pipeline.schedule.improve import improve, timed
from parallelism.pipeline.schedule.price import Costs, price
from parallelism.pipeline.schedule.proof import prove
from parallelism.pipeline.schedule.registry import make_schedule as make
from parallelism.pipeline.schedule.search import bound_s, finished, placements, registered, search

WORK = 300_000  # less than the default


def uneven(count, seed=3):
    draws = random.Random(seed)
    return Costs(*([draws.uniform(0.5, 2) for _ in range(count)] for _ in range(3)), 0.2)


CASES = [
    (1, 3, 1, Costs(), None),
    (2, 1, 1, Costs(), None),
    (2, 4, 1, Costs(1, 1.5, 0.5, 3), 3),
    (3, 5, 2, uneven(6), [6, 5, 3]),
    (4, 8, 1, Costs(), 4),
    (4, 8, 1, Costs(weights=0), 4),
    (4, 8, 2, Costs(), 8),
    (4, 8, 2, Costs(message=0.2), 11),
    (4, 6, 1, uneven(4), 5),
    (2, 3, 2, Costs(0, 0, 0), 4),
    (3, 4, 1, Costs(0, 0, 1, 1), 3),
    (3, 2, 3, Costs(1, 1, 1, [0, 1, 0, 1, 0, 1, 0, 1]), 3),
    (8, 8, 2, Costs(1, 1.1, 0.9, 0.3), 16),
]


@pytest.mark.parametrize(("num_ranks", "num_micro_batches", "virtual_stages", "costs", "limit"), CASES)
def test_at_least_as_good_as_every_known_schedule(num_ranks, num_micro_batches, virtual_stages, costs, limit):
    schedule = search(num_ranks, num_micro_batches, virtual_stages, costs, limit, work=WORK)
    prove(schedule)
    assert (schedule.num_ranks, schedule.num_micro_batches) == (num_ranks, num_micro_batches)
    assert schedule.num_stages == num_ranks * virtual_stages
    timeline = price(schedule, costs)
    limits = limit if isinstance(limit, list) else [limit or 99] * num_ranks
    assert all(peak <= most for peak, most in zip(schedule.peaks, limits, strict=True))
    for other in registered(num_ranks, num_micro_batches, virtual_stages):
        beside = price(other, costs)
        if all(peak <= most for peak, most in zip(other.peaks, limits, strict=True)):
            assert timeline.span_s <= beside.span_s * (1 + 1e-9), other.name


@pytest.mark.parametrize(
    ("shape", "costs", "limit", "gain"),
    [
        ((8, 32, 1), Costs(1, 1.1, 0.9, 2), 16, 0.35),  # slow messages: known schedules do not run far enough ahead
        ((4, 8, 2), uneven(8), 10, 0.05),
        ((4, 8, 2), Costs(), 5, 0.5),  # less memory than all but the naive schedule need
        ((4, 8, 1), Costs(), 2, 0.5),
    ],
)
def test_better_where_it_matters(shape, costs, limit, gain):
    found_s = price(search(*shape, costs, limit, work=WORK), costs).span_s
    fitting = [price(each, costs) for each in registered(*shape) if max(each.peaks) <= limit]
    assert found_s < (1 - gain) * min(timeline.span_s for timeline in fitting)


def test_what_cannot_be_beaten_is_kept():
    assert search(4, 8, 1, Costs(), 4) == make("zb_h1", 4, 8)
    assert search(4, 8, 1, Costs(weights=0), work=WORK) == make("1f1b", 4, 8), (
        "it has fewer live activations than gpipe"
    )


def test_costs_that_depend_on_the_ranks_of_stages():
    """A rank at half speed takes twice as long for each of its stages, wherever a schedule has them: 72 s of work."""

    def costs_of(home):
        times = [2.0 if rank == 1 else 1.0 for rank in home]
        return Costs(times, times, times, 0.1)

    shape, limit = (3, 6, 2), 4
    best = search(*shape, costs_of, limit, work=WORK)
    prove(best)
    assert 72 <= price(best, costs_of(best.placement)).span_s <= 1.05 * 72
    assert search(2, 4, 2, lambda home: Costs(), work=WORK) == search(2, 4, 2, Costs(), work=WORK)


def test_known_schedules_are_there_for_any_number_of_stages_a_rank():
    for virtual_stages in (1, 2, 3):
        schedules = list(registered(4, 8, virtual_stages))
        for each in schedules:
            prove(each)
            assert each.num_stages == 4 * virtual_stages
        assert {"naive", "gpipe", "1f1b", "zb_h1"} <= {each.name for each in schedules}
    thirds = {each.name: price(each, Costs(1 / 3, 1 / 3, 1 / 3)).span_s for each in registered(4, 8, 3)}
    assert thirds["1f1b"] == pytest.approx(33)


def test_the_same_arguments_give_the_same_schedule():
    arguments = 4, 8, 2, uneven(8), 9
    assert search(*arguments, work=WORK) == search(*arguments, work=WORK)


def test_no_greedy_schedule_runs_out_of_memory():
    """All caps complete a valid schedule, from the least possible memory up to an ample limit."""
    for num_ranks, num_micro_batches, virtual_stages in ((1, 2, 1), (2, 3, 2), (3, 4, 3), (4, 6, 2)):
        costs = uneven(num_ranks * virtual_stages)
        for home in placements(num_ranks, virtual_stages):
            for limit in (virtual_stages, virtual_stages + 1, 3 * virtual_stages):
                job = SchedulingProblem(home, num_micro_batches, costs, (limit,) * num_ranks)
                for caps in caps_of(job):
                    schedule = finished(timed(job, Greedy(job, caps).run()))
                    assert max(schedule.peaks) <= limit
                    prove(schedule)


def test_nothing_is_faster_than_the_bound():
    for num_ranks, num_micro_batches, virtual_stages, costs, _ in CASES:
        limits = (99,) * num_ranks
        for schedule in registered(num_ranks, num_micro_batches, virtual_stages):
            home = tuple(schedule.home[stage] for stage in range(schedule.num_stages))
            least_s = bound_s(SchedulingProblem(home, num_micro_batches, costs, limits))
            assert least_s <= price(schedule, costs).span_s * (1 + 1e-9)
    assert bound_s(SchedulingProblem((0, 1, 2, 3), 8, Costs(), (4,) * 4)) == price(make("zb_h1", 4, 8)).span_s


def test_moving_actions_improves_a_schedule_and_keeps_its_limit():
    costs = Costs(1, 1, 1, 0.5)
    slow = make("1f1b", 4, 8)
    job = SchedulingProblem((0, 1, 2, 3), 8, costs, (5, 5, 5, 5))
    start = timed(job, slow.orders)
    better = improve(start, random.Random(0), 200_000, 0)
    assert better.span_s < 0.95 * start.span_s <= 0.95 * price(slow, costs).span_s
    schedule = finished(better)
    prove(schedule)
    assert price(schedule, costs).span_s <= better.span_s * (1 + 1e-9)
    assert max(schedule.peaks) <= 5


def test_backward_passes_are_whole_where_parts_gain_nothing():
    for name in ("1f1b", "gpipe"):
        schedule, costs = make(name, 2, 3), Costs(weights=0)
        parts = timed(SchedulingProblem((0, 1), 3, costs, (3, 3)), schedule.orders)
        assert sum(map(len, parts.orders)) == 3 * 2 * 3
        assert finished(parts).orders == schedule.orders


@pytest.mark.parametrize(
    ("limit", "message"),
    [
        (1, "a limit of 1 activations: a rank has one alive for each of its stages, use 2 or more"),
        ([4, 4], "2 limits for 3 ranks: pass one, or 3"),
        ([4, 0, 4], "a limit of 0 activations"),
    ],
)
def test_limits_that_nothing_keeps_are_refused(limit, message):
    with pytest.raises(ValueError, match=message):
        search(3, 4, 2, Costs(), limit)


def test_a_pipeline_has_one_of_each_at_least():
    for counts in ((0, 4, 1), (3, 0, 1), (3, 4, 0)):
        with pytest.raises(ValueError, match=f"a pipeline of {counts[0]} ranks, .*: use 1 or more of each"):
            search(*counts, Costs())
