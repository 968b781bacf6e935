"""The recorder's files compared with PyTorch's, and their entries of runs that are only counted."""

import os
import pickle
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from collectives.job import environment
from collectives.runtime.progress import Progress
from collectives.runtime.reports.call_log import LENGTH, Calls, LogEntry, Record
from collectives.runtime.reports.recorder import Recorder

OF_TORCH = """
import os, sys
os.environ["TORCH_FR_BUFFER_SIZE"] = "9"
import torch.distributed as dist
from torch._C._distributed_c10d import _dump_fr_trace
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
import torch
dist.all_reduce(torch.ones(4))
open(sys.argv[1], "wb").write(_dump_fr_trace())
"""


def recorder(record: Record, folder: Path | None = None) -> Recorder:
    return Recorder(0, record, Progress(oversubscribed=False), folder)


def make_call(calls: Calls, name: str, length: int = 0) -> LogEntry:
    """Return a completed call of a collective."""
    call = LogEntry(calls, name)
    if length:
        call.describe(name, name, np.zeros(length, "float32"), [length])
    with call:
        return call


def test_files_have_the_fields_of_pytorchs(tmp_path):
    pytest.importorskip("torch")
    result = subprocess.run([sys.executable, "-c", OF_TORCH, str(tmp_path / "torch")], timeout=100, capture_output=True)
    if b"_dump_fr_trace" in result.stderr:
        pytest.skip("this torch has a flight recorder only for NCCL")
    assert result.returncode == 0, result.stderr
    record = Record()
    make_call(Calls(record, "", range(1)), "all_reduce", 4)
    assert recorder(record, tmp_path / "own").write() == ""
    theirs, ours = (pickle.loads((tmp_path / name).read_bytes()) for name in ("torch", "own/rank_0"))
    assert {name: type(value) for name, value in theirs.items()}.items() <= {
        name: type(value) for name, value in ours.items()
    }.items()
    assert ours["version"] == theirs["version"]
    (their_group,), (our_group,) = (dump["pg_config"].values() for dump in (theirs, ours))
    assert our_group.keys() == their_group.keys()
    assert our_group["ranks"] == their_group["ranks"]
    (their_status,), (our_status,) = (dump["pg_status"].values() for dump in (theirs, ours))
    assert our_status.keys() == their_status.keys()
    (their_entry,), (our_entry,) = (dump["entries"] for dump in (theirs, ours))
    assert {name: type(value) for name, value in our_entry.items()} == {
        name: type(value) for name, value in their_entry.items()
    }
    for name in ("record_id", "collective_seq_id", "p2p_seq_id", "input_sizes", "output_sizes", "is_p2p"):
        assert our_entry[name] == their_entry[name], name
    (frame, *_) = their_entry["frames"]
    assert our_entry["frames"][0].keys() == frame.keys()


def numbers(trace) -> list[tuple[str, int, int, str]]:
    return [(e["process_group"][0], e["record_id"], e["collective_seq_id"], e["state"]) for e in trace["entries"]]


def test_a_file_begins_after_the_last_run_that_is_not_known():
    record = Record()
    world = Calls(record, "", range(4))
    plan = LogEntry(world, "all_reduce one_shot")
    record.expect_short_runs(plan)
    make_call(world, "broadcast ring", 3)
    for _ in range(5):
        plan.number = world.number = world.number + 1  # like a plan
    part = world.part(1, [1, 3])
    make_call(part, "barrier")
    waiting = LogEntry(world, "scan")
    waiting.enter()
    own = recorder(record)
    assert own.begins() == {"": 6, " of split(color=1) #6": 1}
    of_part = "split(color=1) #6"
    assert numbers(own.trace(None)) == [
        (of_part, 5, 1, "completed"),
        ("all ranks", 6, 6, "completed"),
        ("all ranks", 7, 7, "started"),
    ]
    assert numbers(own.trace({"": 7, " of split(color=1) #6": 2})) == [("all ranks", 0, 7, "started")]
    assert own.trace(None)["pg_config"][of_part]["ranks"] == "[1, 3]"


def test_ids_count_calls_of_freed_communicators_and_lost_ones():
    record = Record()
    world = Calls(record, "", range(2))
    part = world.part(0, [0, 1])
    for _ in range(3):
        make_call(part, "barrier")
    part.close()
    for _ in range(LENGTH + 5):
        make_call(world, "barrier")
    trace = recorder(record).trace(None)
    assert [entry["record_id"] for entry in trace["entries"]] == list(range(8, 8 + LENGTH))
    assert [entry["collective_seq_id"] for entry in trace["entries"]] == list(range(6, 6 + LENGTH))


def test_a_signal_that_the_program_uses_is_left_to_it(tmp_path):
    before = signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    try:
        first = recorder(Record(), tmp_path / "first")
        os.kill(os.getpid(), signal.SIGUSR2)
        assert not [*tmp_path.iterdir()]
        signal.signal(signal.SIGUSR2, signal.SIG_DFL)
        second, third = (recorder(Record(), tmp_path / name) for name in ("second", "third"))
        os.kill(os.getpid(), signal.SIGUSR2)
        assert {path.name for path in tmp_path.iterdir()} == {"second", "third"}
        del first, second, third
    finally:
        signal.signal(signal.SIGUSR2, before)


def test_nothing_is_written_to_nowhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLLECTIVES_CALLS", "0")
    assert recorder(Record(), environment.calls_folder()).write() == ""
    assert not [*tmp_path.iterdir()]
    monkeypatch.setenv("COLLECTIVES_CALLS", "")
    assert environment.calls_folder() == Path("collectives-calls")
