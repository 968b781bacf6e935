"""Two runs compared by their hashes: what is printed, the exit status, and what cannot be compared."""

import json
import re
import sys

import pytest
import torch

from mpi_tests.helpers.trained import facts
from parallelism.checkpoint import Extent, StateHash, TensorShard
from parallelism.checkpoint.checkpoints import commit
from parallelism.checkpoint.reading import Index
from parallelism.checkpoint.shards import write_shard
from training import compare
from training.reports.facts import on_ranks
from training.reports.jsonl import JSONLines
from training.reports.log import RunLog
from training.reports.metrics import Validation

WHOLE = {"wte": {"parameter": "0a", "exp_avg": "0b"}, "wpe": {"parameter": "0c", "exp_avg": "0d"}}


def hashed(folder, steps, first=1, **changes):
    """Write the hashes of a run whose tensors change in some steps, as its log does."""
    folder.mkdir(exist_ok=True)
    with RunLog(facts(first=first, hash_interval=1), [JSONLines(str(folder))]) as log:
        log.open()
        for step in steps:
            tensors = changes.get(f"step{step}", WHOLE)
            log.hashed(step, StateHash(str(tensors), tensors))
    return folder


def program(monkeypatch, capsys, *runs):
    """Return the exit status of the program, and what it prints."""
    monkeypatch.setattr(sys, "argv", ["compare", *map(str, runs)])
    status = compare.main()
    captured = capsys.readouterr()
    return status, (captured.err if status == 2 else captured.out).splitlines()


def test_equal_runs_are_one_line(tmp_path, monkeypatch, capsys):
    """Only the steps that both have hashed count."""
    runs = hashed(tmp_path / "a", range(2, 14, 2)), hashed(tmp_path / "b", range(3, 14, 3), step3={})
    assert program(monkeypatch, capsys, *runs) == (0, ["equal in 2 hashed steps, up to step 12"])


DIFFERENT = {
    "a weight": ({"wpe": {"parameter": "11"}}, "wpe", "parameter", "1 of 2"),
    "a state": ({"wpe": {"exp_avg": "11"}}, "wpe", "exp_avg", "1 of 2"),
    "all": ({name: {"parameter": "11", "exp_avg": "12"} for name in WHOLE}, "wte", "parameter, exp_avg", "2 of 2"),
    "a state of its own": ({"wte": {"momentum_buffer": "11"}}, "wte", "momentum_buffer", "1 of 2"),
    "a parameter of its own": ({"lm_head": {"parameter": "11"}}, "lm_head", "parameter", "1 of 3"),
}


@pytest.mark.parametrize(("change", "name", "kinds", "count"), DIFFERENT.values(), ids=DIFFERENT)
def test_the_first_difference_is_named(tmp_path, monkeypatch, capsys, change, name, kinds, count):
    changed = {each: {**WHOLE.get(each, {}), **change.get(each, {})} for each in {**WHOLE, **change}}
    runs = hashed(tmp_path / "a", [1, 2, 3, 4]), hashed(tmp_path / "b", [1, 3, 4], step3=changed, step4=changed)
    status, lines = program(monkeypatch, capsys, *runs)
    assert (status, lines[:2]) == (
        1,
        [
            "step 3 differs; step 1 is equal",
            f"{name} is the first parameter that differs, in {kinds}; {count} differ",
        ],
    )
    assert lines[2].startswith("no checkpoint of step 3 or a later one is there of both runs")
    assert program(monkeypatch, capsys, *runs[::-1])[1][0] == lines[0]


def test_a_repeated_step_counts_as_it_was_last(tmp_path, monkeypatch, capsys):
    """A run died after step 4, and another resumed it from step 2; the last line of the first is not finished."""
    a = hashed(tmp_path / "a", [1, 2, 3, 4])
    b = hashed(tmp_path / "b", [1, 2, 3], step3={})
    with (b / "hashes.jsonl").open("a") as file:
        file.write('{"step": 4, "hash": "01\n')
    hashed(b, [3, 4], first=3)
    assert program(monkeypatch, capsys, a, b) == (0, ["equal in 4 hashed steps, up to step 4"])
    hashed(b, [1, 2])  # a new run starts a new file
    assert program(monkeypatch, capsys, a, b) == (0, ["equal in 2 hashed steps, up to step 2"])


def checkpoint(directory, step, state_hash, **tensors):
    """Write a checkpoint with whole tensors."""
    folder = directory / f"{step:05}-step-{step}.unfinished"
    folder.mkdir(parents=True)
    parts = [TensorShard("wpe", kind, Extent(tuple(x.shape), 0, x.numel()), x) for kind, x in tensors.items()]
    entry = write_shard(folder / "rank-0.safetensors", [(part, part.compact()) for part in parts])
    commit(folder, Index(step, {"hash": state_hash}, [entry]))


CHANGED = {**WHOLE, "wpe": {"parameter": "11", "exp_avg": "0d"}}
ELEMENTS = {
    "float32": (torch.float32, 1.5, 0x3FC00001, "1.5 (0x3fc00000) and 1.50000012 (0x3fc00001)"),
    "bfloat16": (torch.bfloat16, -2.0, -0x4000 + 2, "-2 (0xc000) and -2.03125 (0xc002)"),
    "float64": (torch.float64, 0.0, 1 << 63, "0 (0x0000000000000000) and -0 (0x8000000000000000)"),
}


@pytest.mark.parametrize(("dtype", "value", "bits", "values"), ELEMENTS.values(), ids=ELEMENTS)
def test_the_first_element_is_named_with_its_bits(tmp_path, monkeypatch, capsys, dtype, value, bits, values):
    """In the first checkpoint of both from that step on, of those that are the runs' own."""
    runs = hashed(tmp_path / "a", [1, 2, 3, 4]), hashed(tmp_path / "b", [1, 2, 3, 4], step2=CHANGED, step3=CHANGED)
    x = torch.ones(3, 4, dtype=dtype)
    x[1, 2] = value
    y = x.clone()
    width = 8 * x.element_size()
    number = bits - (1 << width) if bits >> (width - 1) == 1 else bits
    y.view({16: torch.int16, 32: torch.int32, 64: torch.int64}[width])[1, 2] = number
    y[2, 0] = 7
    for run, weights, own in ((runs[0], x, WHOLE), (runs[1], y, CHANGED)):
        saved = tmp_path / f"{run.name}-saved"
        (run / "config.toml").write_text(f'checkpoint_dir = "{saved}"\n')
        checkpoint(saved, 1, str(WHOLE), parameter=weights * 5)
        checkpoint(saved, 2, "another run's", parameter=weights * 3)
        checkpoint(saved, 3, str(own), parameter=weights)
        checkpoint(saved, 4, str(WHOLE), parameter=weights)
    _, lines = program(monkeypatch, capsys, *runs)
    assert lines[2] == f"parameter of wpe in the checkpoints of step 3: element [1, 2] is {values}; 2 of 12 differ"
    (tmp_path / "b-saved" / "00003-step-3" / "rank-0.safetensors").write_bytes(b"damaged")
    status, lines = program(monkeypatch, capsys, *runs)
    assert (status, len(lines)) == (1, 3)
    assert re.match("no element can be named: .*rank-0.safetensors: of 7 bytes, but", lines[2])


BAD = {
    "no folder": (lambda runs: [runs[0], runs[0] / "none"], "none/hashes.jsonl: No such file or directory: pass the"),
    "twice": (lambda runs: [runs[0], runs[0] / ".." / "a"], "a is given twice: pass two runs"),
    "no common step": (
        lambda runs: runs,
        r"steps 2, 4, 6, ... of .*a and steps 3, 9 of .*b are hashed, none in common",
    ),
    "a damaged file": (
        lambda runs: [runs[0], damaged(runs[1])],
        "step 4 has two hashes, but the same tensors: a hashes",
    ),
    "another file": (lambda runs: [runs[0], record(runs[1])], "has a line that is not a hash of a run: pass another"),
}


def damaged(run):
    line = json.dumps({"step": 4, "hash": "0", "tensors": WHOLE})
    (run / "hashes.jsonl").write_text(f"{line}\n")
    return run


def record(run):
    (run / "hashes.jsonl").write_text(json.dumps({"iter": 1}) + "\n")
    return run


@pytest.mark.parametrize(("choose", "words"), BAD.values(), ids=BAD)
def test_what_cannot_be_compared(tmp_path, monkeypatch, capsys, choose, words):
    runs = [hashed(tmp_path / "a", range(2, 12, 2)), hashed(tmp_path / "b", [3, 9])]
    status, (line,) = program(monkeypatch, capsys, *choose(runs))
    assert status == 2
    assert line.startswith("error: ")
    assert re.search(words, line)


def test_a_run_says_what_its_bits_depend_on_and_marks_a_change(tmp_path):
    now, before = {"cpu": "A", "threads": 1, "torch": "2.13"}, {"cpu": "A", "threads": 2, "torch": "2.12"}
    of_run = facts(hash_interval=5)._replace(conditions=now, conditions_before=before)
    assert "need the same data and settings, and cpu A, threads 1, torch 2.13\n" in of_run.announcement
    assert "resumed with threads 1, before 2; torch 2.13, before 2.12: " in of_run.announcement
    with RunLog(of_run, [JSONLines(str(tmp_path))]) as log:
        log.open()
        log.validation(1, Validation(2.0))
        log.validation(2, Validation(2.0))
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert records[0] == {"iter": 1, "val_loss": 2.0, "resumed_with": {"threads": 1, "torch": "2.13"}}
    assert records[1] == {"iter": 2, "val_loss": 2.0}


@pytest.mark.parametrize("before", [{}, {"cpu": "A", "threads": 1}], ids=["an older checkpoint", "the same"])
def test_without_a_change_nothing_is_marked(before):
    of_run = facts(hash_interval=5)._replace(conditions={"cpu": "A", "threads": 1}, conditions_before=before)
    assert of_run.resumed_with == {}
    assert "resumed with" not in of_run.announcement


def test_only_runs_with_hashes_say_it():
    of_run = facts()._replace(conditions={"cpu": "A"}, conditions_before={"cpu": "B"})
    assert of_run.resumed_with == {}
    assert "cpu" not in of_run.announcement


def test_ranks_of_several_kinds_are_named():
    assert on_ranks(["A", "B", "A", "C"]) == "A on rank 0, 2 and B on rank 1 and C on rank 3"
