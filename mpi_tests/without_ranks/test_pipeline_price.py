"""The times of schedules, compared with published formulas and with small schedules simulated by hand."""

import pytest

from parallelism.pipeline.schedule.actions import Schedule
from parallelism.pipeline.schedule.basic import breadth_first, gpipe, interleaved, naive, one_f_one_b
from parallelism.pipeline.schedule.price import Costs, price
from parallelism.pipeline.schedule.zero_bubble import zb_h1, zb_v
from parallelism.step.actions import parse

SIZES = [(p, m) for p in (1, 2, 3, 4, 7, 16) for m in (1, 2, 3, 4, 8, 15, 64)]


def parse_schedule(*orders):
    return Schedule("written", tuple(tuple(map(parse, order.split())) for order in orders), (99,) * len(orders))


@pytest.mark.parametrize("make", [gpipe, one_f_one_b])
@pytest.mark.parametrize("costs", [Costs(), Costs(2.5, 0.5, 3)], ids=["equal", "unequal"])
def test_bubble_as_published(make, costs):
    for p, m in SIZES:
        timeline = price(make(p, m), costs)
        assert timeline.bubble == pytest.approx((p - 1) / (m + p - 1))
        assert timeline.span_s == pytest.approx((m + p - 1) * sum(costs[:3]))


@pytest.mark.parametrize("virtual_stages", [2, 3, 4])
def test_bubble_of_interleaved_as_published(virtual_stages):
    """The bubble is (p-1)/(v m) of the ideal time if p divides the number of micro-batches."""
    for p in (1, 2, 3, 4, 8, 16):
        for m in (p, 2 * p, 4 * p):
            ideal = 3 * virtual_stages * m
            for make in (interleaved, breadth_first):
                timeline = price(make(p, m, virtual_stages))
                assert timeline.span_s == pytest.approx(ideal * (1 + (p - 1) / (virtual_stages * m)))
                assert timeline.bubble == pytest.approx(1 - ideal / timeline.span_s)


def test_bubble_of_zero_bubble_schedules_as_published():
    """ZB-H1's is a third of 1F1B's if each part of a backward pass takes as long as a forward pass."""
    for p in (1, 2, 3, 4, 8, 16):
        for m in (2 * p, 4 * p):
            assert price(zb_h1(p, m)).span_s == pytest.approx(3 * m + p - 1)
            assert price(zb_v(p, m)).span_s == pytest.approx(6 * m + p - 1)


def test_a_naive_pipeline_has_one_rank_at_work():
    for p, m in SIZES:
        timeline = price(naive(p, m), Costs(message=0.5))
        assert timeline.span_s == pytest.approx(m * (3 * p + (p - 1)))
        assert timeline.bubble == pytest.approx(1 - 3 * p * m / (p * timeline.span_s))


def test_played_by_hand():
    """Two ranks, two micro-batches, and backward passes in parts; a message takes 10 units."""
    timeline = price(
        parse_schedule("0F0 0F1 0B0 0B1", "1F0 1I0 1F1 1W0 1B1"),
        Costs(forward=[1, 2], inputs=[3, 4], weights=[5, 6], message=10),
    )
    begins = {span.what: span.begin_s for span in timeline.spans}
    assert begins == {
        "0F0": 0,
        "0F1": 1,
        "1F0": 11,  # 0F0 ends at 1
        "1I0": 13,
        "1F1": 17,
        "1W0": 19,
        "1B1": 25,
        "0B0": 27,  # 1I0 ends at 17
        "0B1": 45,  # 1B1 ends at 35
    }
    assert timeline.span_s == 53
    assert timeline.bubble == pytest.approx(1 - (2 * (1 + 3 + 5) + 2 * (2 + 4 + 6)) / (2 * 53))
    assert [str(span.what) for span in timeline.spans] == [
        "0F0",
        "0F1",
        "0B0",
        "0B1",
        "1F0",
        "1I0",
        "1F1",
        "1W0",
        "1B1",
    ]
    assert timeline.spans[4] == (1, "1F0", 11, 13)


def test_a_message_has_the_time_of_its_pair_of_stages():
    timeline = price(parse_schedule("0F0 0B0", "1F0 1B0", "2F0 2B0"), Costs(message=[10, 100]))
    assert timeline.span_s == 3 * (1 + 2) + 2 * (10 + 100)


def test_nothing_travels_between_stages_of_a_rank():
    assert price(parse_schedule("0F0 1F0 1B0 0B0"), Costs(message=10)).span_s == 6


def test_nothing_to_do():
    timeline = price(Schedule("idle", ((), ()), (0, 0)))
    assert (timeline.span_s, timeline.bubble) == (0, 0)


@pytest.mark.parametrize(
    ("costs", "message"),
    [
        (Costs(forward=[1, 2]), "forward has 2 times: pass one, or 3"),
        (Costs(message=[1, 2, 3]), "message has 3 times: pass one, or 2"),
        (Costs(weights=-1), "weights takes -1 s: pass 0 or more"),
        (Costs(inputs=[1, float("nan"), 1]), "inputs takes nan s: pass 0 or more"),
    ],
)
def test_times_that_make_no_sense_are_refused(costs, message):
    with pytest.raises(ValueError, match=message):
        price(gpipe(3, 2), costs)


def test_ranks_that_wait_for_ever_are_named():
    with pytest.raises(ValueError, match="no rank can proceed; waiting: 0B0 on rank 0, 1F0 on rank 1"):
        price(parse_schedule("0B0 0F0", "1F0 1B0"))
