"""Timelines of steps: gathered from different clocks, written as traces, drawn beside the plan."""

import time

import pytest

from parallelism.pipeline import trace
from parallelism.pipeline.schedule.price import Span

AHEAD_S = 1000.0


@pytest.mark.sizes(1, 2, 3)
def test_spans_are_gathered_by_one_clock(comm, monkeypatch):
    """Each rank is on a host of its own, whose clock is far ahead of the previous one's."""
    clock = time.perf_counter
    monkeypatch.setattr(comm, "host_names", lambda: [f"host {rank}" for rank in range(comm.size)])
    monkeypatch.setattr(time, "perf_counter", lambda: clock() + AHEAD_S * comm.rank)
    comm.barrier()
    now_s = time.perf_counter()
    mine = [Span(comm.rank, "0F0", now_s + 5 + number, now_s + 6 + number) for number in range(comm.rank + 1)]
    gathered = trace.gather(comm, mine)
    if comm.rank:
        assert gathered == []
        return
    assert [span.rank for span in gathered] == [rank for rank in range(comm.size) for _ in range(rank + 1)]
    assert min(span.begin_s for span in gathered) == 0
    for span in gathered:
        assert span.end_s - span.begin_s == pytest.approx(1)
        assert span.begin_s < AHEAD_S / 2


@pytest.mark.sizes(3)
def test_ranks_of_a_host_have_one_clock(comm, monkeypatch):
    """The clock of the first rank stands for its host and is ahead; the second rank's clock is not read."""
    clock = time.perf_counter
    monkeypatch.setattr(comm, "host_names", lambda: ["a", "b", "b"])
    monkeypatch.setattr(time, "perf_counter", lambda: clock() + AHEAD_S * (0, 1, 5)[comm.rank])
    ahead_s = trace.clocks_ahead_s(comm)
    if comm.rank == 0:
        assert ahead_s == [0, pytest.approx(AHEAD_S, abs=AHEAD_S / 2), ahead_s[1]]


@pytest.mark.sizes(2)
def test_nothing_to_gather(comm):
    assert trace.gather(comm, []) == []
    mine = [Span(1, "wait for gradient", 7.0, 8.0)] if comm.rank else []
    assert trace.gather(comm, mine) == ([Span(1, "wait for gradient", 0, 1)] if comm.rank == 0 else [])
