"""Events of torch's profiler, in Chrome's trace event format and in the clock of `time.perf_counter`."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

Event = dict[str, Any]  # times in microseconds
CLOCK, MARKS = "clock", 5  # events of torch's that are compared with our clock; the first ones set up
MEMORY, ALLOCATED = "[memory]", "allocated by torch"
DEVICE_TYPES = {"cpu": 0, "cuda": 1}  # torch's numbers
LONGEST_HISTORY = 100_000  # allocations in a snapshot of a GPU's memory


@contextmanager
def torch_events(device: str, snapshot: str = "") -> Iterator[list[Event]]:
    """Profile this process in this context; its events are in the list afterwards.

    On a GPU, the file `snapshot` has the allocations, for https://pytorch.org/memory_viz.
    """
    kinds, events = [torch.profiler.ProfilerActivity.CPU], list[Event]()
    if device != "cpu":
        kinds.append(torch.profiler.ProfilerActivity.CUDA)
        torch.cuda.memory._record_memory_history(max_entries=LONGEST_HISTORY)
    with torch.profiler.profile(activities=kinds, profile_memory=True, acc_events=True) as profiler:
        begins_s = marks()
        yield events
    if device != "cpu":
        torch.cuda.memory._dump_snapshot(snapshot)
        torch.cuda.memory._record_memory_history(enabled=None)
    with TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(path))
        events += in_clock(json.loads(path.read_text(encoding="utf-8"))["traceEvents"], begins_s)


def marks() -> list[float]:
    """Make events by which the profiler's clock is compared with ours; return their beginnings in seconds."""
    begins_s = []
    for _ in range(MARKS):
        begins_s.append(time.perf_counter())
        with torch.profiler.record_function(CLOCK):
            pass
    return begins_s


def in_clock(events: Sequence[Mapping[str, Any]], begins_s: Sequence[float]) -> list[Event]:
    """Return the operations, launches and allocations, without the marks.

    A mark's event begins just after we have looked at our clock: the smallest difference is that of the clocks.
    """
    begins_us = sorted(event["ts"] for event in events if event.get("name") == CLOCK)
    ahead_us = min(begin_us - 1e6 * begin_s for begin_us, begin_s in zip(begins_us, begins_s, strict=True))
    own = [event for event in events if isinstance(event.get("pid"), int) and event["ph"] != "M"]
    return [{**event, "ts": event["ts"] - ahead_us} for event in own if event.get("name") != CLOCK]


def with_counter(events: Sequence[Event], device: str) -> tuple[list[Event], int]:
    """Replace allocations by a counter of the device's bytes since the first one; return the most of it, too."""
    kind, in_use, most = DEVICE_TYPES[torch.device(device).type], 0, 0
    counts = []
    for event in sorted((event for event in events if event.get("name") == MEMORY), key=lambda event: event["ts"]):
        if event["args"]["Device Type"] == kind:
            in_use += event["args"]["Bytes"]
            most = max(most, in_use)
            counts.append({"ph": "C", "name": ALLOCATED, "tid": 0, "ts": event["ts"], "args": {"MiB": in_use / 2**20}})
    return [*(event for event in events if event.get("name") != MEMORY), *counts], most
