"""Timelines of steps: gathered from different clocks, written as traces, drawn beside the plan."""

import json
from itertools import pairwise

import pytest

from parallelism.pipeline import trace
from parallelism.pipeline.schedule.picture import planned
from parallelism.pipeline.schedule.price import Costs, Span, price
from parallelism.pipeline.schedule.registry import make_schedule as make

COSTS = Costs(forward=[1, 2, 3], inputs=[3, 1, 2], weights=[1, 2, 1], message=[0.5, 0.25])


def played(name="1f1b", costs=COSTS):
    timeline = price(make(name, 3, 4), costs)
    others = [Span(0, "wait for gradient", 4, 11), Span(2, "all_reduce", 20, 23)]
    return timeline, [*timeline.spans, *others]


def test_a_trace_has_an_event_for_each_span():
    _, spans = played()
    events = json.loads(json.dumps(trace.trace_events(spans)))
    complete = [event for event in events if event["ph"] == "X"]
    assert [(e["pid"], e["name"]) for e in complete] == [span[:2] for span in spans]
    assert [e["ts"] for e in complete] == pytest.approx([1e6 * span.begin_s for span in spans])
    assert [e["ts"] + e["dur"] for e in complete] == pytest.approx([1e6 * span.end_s for span in spans])
    assert {e["cat"] for e in complete} == {"forward", "backward", "wait", "all_reduce"}
    assert next(e for e in complete if e["name"] == "1B3")["args"] == {"stage": 1, "micro-batch": 3}


def test_processes_and_threads_have_names(tmp_path):
    _, spans = played()
    named = [(e["name"], e["pid"], e.get("tid"), e["args"]) for e in trace.names(spans)]
    assert [("process_name", rank, None, {"name": f"rank {rank}"}) for rank in range(3)] == [
        each for each in named if each[0] == "process_name"
    ]
    threads = [each for each in named if each[0] == "thread_name"]
    assert threads == [
        *(("thread_name", rank, 0, {"name": "passes"}) for rank in range(3)),
        ("thread_name", 2, 1, {"name": "all-reduce"}),
    ]


def test_events_of_a_thread_do_not_overlap():
    """Viewers would nest overlapping events of a thread."""
    lanes = {}
    for event in trace.events([*played()[1], Span(2, "all_reduce", 0, 2.5)]):
        lanes.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
    assert sorted(lanes) == [(0, 0), (1, 0), (2, 0), (2, 1)]
    for lane in lanes.values():
        assert all(end <= begin + 1e-6 for (_, end), (begin, _) in pairwise(sorted(lane)))


def test_an_arrow_for_each_message():
    timeline, spans = played("zb_h1")
    arrows = list(trace.arrows(spans))
    begins = {e["id"]: e for e in arrows if e["ph"] == "s"}
    ends = {e["id"]: e for e in arrows if e["ph"] == "f"}
    assert len(begins) == len(ends) == 2 * 2 * 4  # pairs of stages, directions, micro-batches
    pairs = set()
    for number, begin in begins.items():
        pairs.add((action_at(begin, timeline), action_at(ends[number], timeline)))
    assert ("0F2", "1F2") in pairs
    assert ("2I3", "1I3") in pairs
    assert not any("W" in word for pair in pairs for word in pair)


def action_at(event, timeline):
    """Return the action of the event's rank at its time."""
    return next(
        span.what
        for span in timeline.spans
        if span.rank == event["pid"] and 1e6 * span.begin_s <= event["ts"] < 1e6 * span.end_s
    )


@pytest.mark.parametrize("name", ["1f1b", "gpipe", "zb_h1"])
def test_costs_are_measured(name):
    """Measuring a simulated step yields its costs, although ranks waited for messages."""
    timeline, spans = played(name)
    costs = trace.measured(spans)
    assert costs.forward == pytest.approx(COSTS.forward)
    is_split = name == "zb_h1"
    whole = [inputs + weights for inputs, weights in zip(COSTS.inputs, COSTS.weights, strict=True)]
    assert costs.inputs == pytest.approx(COSTS.inputs if is_split else whole)
    assert costs.weights == pytest.approx(COSTS.weights if is_split else [0, 0, 0])
    assert costs.message == pytest.approx(COSTS.message)
    assert price(timeline.schedule, costs).span_s == pytest.approx(timeline.span_s)


def test_costs_of_one_stage_and_of_none():
    both = [
        Span(0, "0F0", 0, 2),
        Span(0, "0B0", 3, 8),
        Span(0, "0F1", 8, 10),
        Span(0, "0I1", 10, 13),
        Span(0, "0W1", 13, 15),
    ]
    assert trace.measured(both) == Costs([2], [3], [2], [])
    assert trace.measured([Span(0, "0F0", 0, 2), Span(0, "0B0", 3, 6)]) == Costs([2], [3], [0], [])
    assert trace.measured([]) == Costs([], [], [], [])


def test_a_picture_of_what_happened_beside_the_plan(tmp_path, monkeypatch):
    timeline, spans = played()
    late = [span._replace(begin_s=2 * span.begin_s, end_s=2 * span.end_s) for span in spans]
    figure = trace.figure([planned(timeline), trace.happened("1f1b", 3, late)])
    above, below = figure.axes
    assert above.get_xlim() == below.get_xlim()
    assert above.get_title().startswith("1f1b: ")
    assert below.get_title() == f"1f1b, as it happened: {2 * timeline.span_s:.4g} s, bubble {timeline.bubble:.1%}"
    colors = [axes.containers[0][0].get_facecolor() for axes in (above, below)]
    assert colors[0] == colors[1]
    trace.save_picture(str(tmp_path / "a.png"), timeline, late)
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
