"""Profiles of runs: one file with a process for each rank, its passes, collectives and operations, and its memory."""

import json
import re
from collections import defaultdict
from itertools import pairwise

import pytest

from mpi_tests.helpers.folders import shared_folder
from mpi_tests.helpers.trained import check_same, on

LAYOUTS = {
    "dp": {},
    "tp": {"tp": 2},
    "ZeRO 1": {"zero_stage": 1},
    "pp": {"pp": 2, "num_micro_batches": 2},
}
SECOND = 1e6  # microseconds


@pytest.fixture
def folder(mpi_comm):
    with shared_folder(mpi_comm) as folder:
        yield folder


def check_nesting(events):
    """Check that events of a thread follow or enclose each other, as viewers need it."""
    threads = defaultdict(list)
    for event in events:
        threads[event["pid"], event["tid"]].append((event["ts"], -event["dur"], event["ts"] + event["dur"]))
    for spans in threads.values():
        open_ends = []
        for begin, _, end in sorted(spans):
            while open_ends and open_ends[-1] <= begin + 1e-3:
                open_ends.pop()
            assert not open_ends or end <= open_ends[-1] + 1e-3
            open_ends.append(end)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.sizes(2)
def test_a_profile_has_all_ranks_passes_collectives_and_operations(comm, folder, capsys, layout):
    path = folder / "profile.json"
    check_same(on(comm, profile=str(path), max_iters=5, **layout), on(comm, max_iters=5, **layout))
    printed = capsys.readouterr().out
    assert printed.count("memory in the profiled steps: MiB, mean of 2 ranks; most on a rank\n") == (comm.rank == 0)
    if comm.rank:
        return
    document = json.loads(path.read_text())
    events = [event for event in document["traceEvents"] if event["ph"] == "X"]
    named = [event for event in document["traceEvents"] if event["name"] == "process_name"]
    assert sorted((event["pid"], event["args"]["name"]) for event in named) == [(0, "rank 0"), (1, "rank 1")]
    assert min(event["ts"] for event in document["traceEvents"] if "ts" in event) == 0
    assert max(event["ts"] + event["dur"] for event in events) < 60 * SECOND
    check_nesting(events)
    for rank in range(2):
        own = [event for event in events if event["pid"] == rank]
        check_rank(own, layout)
    assert (folder / "profile.png").exists() == ("pp" in layout)


def check_rank(events, layout):
    """Check a rank's events in two steps: its passes enclose torch's operations, and collectives name their axis."""
    passes = [event for event in events if re.fullmatch(r"\d+[FB]\d+", event["name"])]
    assert len(passes) == 2 * 2 * layout.get("num_micro_batches", 1)
    for kind, operation in (("F", "aten::native_layer_norm"), ("B", "aten::native_layer_norm_backward")):
        own = [event for event in passes if kind in event["name"]]
        operations = [event for event in events if event["name"] == operation]
        assert operations
        for event in operations:
            assert any(is_within(event, each) for each in own)
    runs = [event for event in events if event["cat"] == "collective"]
    expected = {"tp": "all_reduce .* over tp", "zero_stage": "reduce_scatter .* over dp", "pp": "send|recv"}
    pattern = next((expected[name] for name in layout if name in expected), "all_reduce .* over dp")
    assert any(re.match(pattern, event["name"]) for event in runs), {event["name"] for event in runs}
    rounds = [event for event in events if event["cat"] == "round"]
    assert rounds
    assert all(any(is_within(each, run) for run in runs if run["tid"] == each["tid"]) for each in rounds)


def is_within(event, outer):
    slack_us = 200  # of clocks that are compared
    begin, end = outer["ts"] - slack_us, outer["ts"] + outer["dur"] + slack_us
    return begin <= event["ts"] and event["ts"] + event["dur"] <= end


SIZES = {
    "dp": ({}, (1, 1, 2)),
    "ZeRO 1": ({"zero_stage": 1}, (1, 1, 1)),
    "16 bits": ({"dtype": "bfloat16", "master_weights": True}, (0.5, 1, 3)),
}


@pytest.mark.parametrize(("settings", "factors"), SIZES.values(), ids=SIZES)
@pytest.mark.sizes(2)
def test_the_memory_of_a_rank_is_that_of_its_arrays(comm, folder, settings, factors):
    """AdamW has two states for each parameter, and float32 masters beside 16 bits; ZeRO shards them over both ranks.

    Gradients are float32.
    """
    path = folder / "profile.json"
    outcome = on(comm, profile=str(path), max_iters=3, bias=True, **settings)
    if comm.rank:
        return
    nbytes = 4 * sum(weight.size for weight in outcome.weights.values())
    uses = json.loads(path.read_text())["memory"]
    assert len(uses) == 2
    for use in uses:
        for kind, factor in zip(("parameters", "gradients", "optimizer states"), factors, strict=True):
            assert use[kind] == pytest.approx(factor * nbytes, rel=0.05), kind
        logits = 12 * 16 * 256 * 4  # of a micro-batch, in float32
        assert logits < use["activations, peak"] < 40 * logits
        assert use["communication"] > 0
        assert use["in all, peak"] > sum(use.values()) - use["in all, peak"]


@pytest.mark.sizes(1)
def test_a_counter_has_the_bytes_that_torch_allocates(comm, folder):
    path = folder / "profile.json"
    on(comm, profile=str(path), max_iters=3)
    document = json.loads(path.read_text())
    counts = [event for event in document["traceEvents"] if event["ph"] == "C"]
    assert all(first["ts"] <= second["ts"] for first, second in pairwise(counts))
    most = max(event["args"]["MiB"] for event in counts) * 2**20
    assert most == pytest.approx(document["memory"][0]["activations, peak"])
    assert most > 24 * 16 * 256 * 4  # the logits of a batch
