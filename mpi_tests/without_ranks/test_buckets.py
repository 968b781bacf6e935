"""Buckets of gradients: the order in which their reductions start and end."""

import pytest

from parallelism.data.buckets import Bucket, BucketQueue


class PlayedPlan:
    """A plan that records its start and its wait; it is complete once `ends` is set."""

    def __init__(self, name, events):
        self.name, self.events, self.ends = name, events, False

    def start(self):
        self.events.append(f"start {self.name}")
        return self

    def advance(self):
        pass

    def done(self):
        return self.ends

    def wait(self):
        self.ends = True
        self.events.append(f"wait {self.name}")


@pytest.fixture
def played():
    """Return a queue of three buckets, the second without a plan across replicas; their plans; recorded events."""
    events = []
    plans = {name: PlayedPlan(name, events) for name in ("a", "b", "c", "a across", "c across")}
    queue = BucketQueue([Bucket([name], plans[name], plans.get(f"{name} across")) for name in "abc"])
    return queue, plans, events


def test_what_is_reduced_goes_across_while_others_are_reduced(played):
    queue, plans, events = played
    for name in "abc":
        queue.ready(name)
    assert events == ["start a", "start b", "start c"]
    plans["c"].ends = True
    queue.advance()
    assert len(events) == 3, "the first bucket is not reduced yet"
    plans["a"].ends = True
    queue.advance()
    assert events[3:] == ["start a across"]
    plans["b"].ends = True
    queue.advance()
    assert events[4:] == ["start c across"]
    queue.wait()
    assert events[5:] == ["wait a across", "wait c across"]


def test_at_the_end_all_are_waited_for(played):
    queue, _, events = played
    queue.ready("b")
    assert events == [], "bucket a must come first"
    queue.flush()
    queue.wait()
    assert events == [
        *("start a", "start b", "start c"),
        *("wait a", "start a across", "wait b", "wait c", "start c across"),
        *("wait a across", "wait c across"),
    ]
