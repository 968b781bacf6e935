"""The page of a training run: its points, its times, two runs side by side, and errors for invalid files."""

import errno
import json
import math
import os
import re

import pytest

from mpi_tests.helpers.pages import Page, check_charts, check_fetches_nothing
from parallelism.pipeline.schedule.basic import one_f_one_b
from parallelism.pipeline.schedule.price import Costs, Span, price
from training import report
from training.reports.html import conditions_section
from training.reports.measured_sections import pipeline_section, times_section
from training.reports.profile import KINDS, ProfiledStep
from training.reports.time_table import time_table

ROW = re.compile(r"  (\w.*\w) +([\d.]+) +([\d.]+)% +([\d.]+) on rank 1")


def records(number, val_every=4, loss=3.0):
    """Return records in the format of metrics.jsonl."""
    lines = []
    for step in range(1, number + 1):
        numbers = {"loss": loss / step, "grad_norm": 1.0, "lr": 1e-3, "tokens_per_s": 1000.0 + step}
        times = {"compute_ms": 10.0, "comm_ms": 2.0, "memory_mib": 100.0, "bubble": None, "mfu": None}
        lines.append({"iter": step, "max_iters": number, **numbers, **times})
        if step % val_every == 0:
            lines.append({"iter": step, "val_loss": 2 * loss / step})
    return lines


def test_every_record_is_a_point():
    page = Page(report.report({"run": records(12)}))
    check_charts(page)
    rows = page.tables["records"]
    assert [row["step"] for row in rows] == list(range(1, 13))
    assert [row["loss"] for row in rows] == pytest.approx([3 / step for step in range(1, 13)], rel=1e-5)
    assert [row["validation loss"] for row in rows if row["validation loss"]] == pytest.approx([1.5, 0.75, 0.5])
    assert "bubble" not in rows[0]


def test_the_page_begins_with_a_summary():
    page = Page(report.report({"a": records(8), "b": records(6, val_every=9)}))
    assert next(iter(page.tables)) == "summary"
    rows = {row["what"]: (row["a"], row["b"]) for row in page.tables["summary"]}
    assert rows["final loss"] == ("0.3750 at step 8", "0.5000 at step 6")
    assert rows["best validation loss"] == ("0.7500 at step 8", None)


def test_files_of_a_validation_are_listed():
    fields = {"val_loss/a.txt": 1.0, "val_loss/b.txt": 2.0, "val_perplexity/a.txt": 3.0, "val_perplexity/b.txt": 7.0}
    page = Page(report.report({"run": [*records(2), {"iter": 2, "val_loss": 1.5, **fields}]}))
    assert [tuple(row.values()) for row in page.tables["validation"]] == [(2, "a.txt", 1, 3), (2, "b.txt", 2, 7)]


def test_many_records_are_thinned_but_for_validations_and_the_last():
    rows = records(5003, val_every=1250)
    text = report.report({"run": rows})
    steps = [row["step"] for row in Page(text).tables["records"]]
    assert {1250, 2500, 3750, 5000, 5003} < {*steps}
    assert 800 < len(steps) <= 1010
    assert "every 6th of 5003 records" in text
    assert len(text.encode()) < 500_000
    check_fetches_nothing(text)


def test_a_resumed_run_s_records_come_instead_of_those_before():
    rows = Page(report.report({"run": [*records(6), *records(4, loss=6.0)]})).tables["records"]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert [row["loss"] for row in rows] == pytest.approx([6, 3, 2, 1.5, 0.6, 0.5])


def test_losses_that_are_no_numbers_have_no_place():
    rows = Page(report.report({"run": [*records(2), {"iter": 3, "loss": math.nan}]})).tables["records"]
    assert math.isnan(rows[-1]["loss"])


def test_two_runs_are_side_by_side():
    page = Page(report.report({"a": records(8), "b": records(6, loss=6.0)}))
    check_charts(page)
    assert [row["run"] for row in page.tables["records"]] == ["a"] * 8 + ["b"] * 6
    both = page.tables["comparison"]
    assert [(row["step"], row["loss"]) for row in both if row["step"] == 4] == [(4, "training"), (4, "validation")]
    assert [row["difference"] for row in both if row["loss"] == "training"] == pytest.approx(
        [3 / s for s in range(1, 7)]
    )


def profiled(iteration, rank):
    seconds = {kind: 1e-3 * (i + rank + iteration) for i, kind in enumerate(KINDS)} | {"ep": 0.0}
    return ProfiledStep(iteration, rank, sum(seconds.values()), seconds, 100.0 + rank)


def test_means_by_kind_add_up_to_the_step_and_unused_axes_are_left_out():
    section = times_section([profiled(iteration, rank) for iteration in (4, 5) for rank in (0, 1)])
    page = Page(report.report({"run": records(3)}, [section]))
    check_charts(page)
    bars = next(chart for chart in page.charts if chart["title"] == "Time by kind")
    for rank, row in enumerate(page.tables["times"]):
        parts = [row[part["column"]] for part in bars["parts"]]
        assert sum(parts) == pytest.approx(row["step, ms"], rel=1e-5)
        assert row["forward"] == pytest.approx(4.5 + rank)
        assert row["backward"] == pytest.approx(5.5 + rank)
        assert "ep, exposed" not in row
    assert "2 steps alone, 4 to 5" in section.texts[0]


def test_the_lines_of_the_table_add_up_to_the_step():
    heading, *lines = time_table([profiled(iteration, rank) for iteration in (4, 5) for rank in (0, 1)])
    assert heading == "time of steps 4 to 5: ms, mean of 2 ranks; part of the step; most on a rank"
    rows = {match[1]: [*map(float, match.groups()[1:])] for match in map(ROW.fullmatch, lines)}
    assert "ep, exposed" not in rows
    assert rows["tp, exposed"] == [7.0, pytest.approx(7.0 / rows["step"][0] * 100, abs=0.06), 7.5]
    whole = rows.pop("step")
    for column, total in enumerate((whole[0], 100.0, whole[2])):
        assert sum(row[column] for row in rows.values()) == pytest.approx(total, abs=0.05 * len(rows))


def test_the_table_of_one_rank_and_of_no_steps():
    heading, *lines = time_table([ProfiledStep(3, 0, 0.5, {**dict.fromkeys(KINDS, 0.0), "forward": 0.5}, 1.0)])
    assert (heading, lines[0].split()) == ("time of step 3: ms; part of the step", ["forward", "500.0", "100.0%"])
    assert [*map(str.split, lines[1:])] == [["step", "500.0", "100.0%"]]
    assert time_table([]) == []


class Profiler:
    planned = price(one_f_one_b(2, 2), Costs(1.0, 1.0, 1.0))
    happened = [Span(0, "0F0", 0.0, 0.5), Span(1, "wait for 0F0", 0.0, 0.5), Span(1, "1F0", 0.5, 1.0)]  # noqa: RUF012


def test_a_pipeline_is_drawn_as_predicted_and_as_it_happened():
    section = pipeline_section(Profiler)
    page = Page(report.report({"run": records(3)}, [section]))
    rows = page.tables["pipeline"]
    predicted = [row for row in rows if row["timeline"] == "predicted"]
    assert len(predicted) == 8  # forward and backward, of 2 micro-batches, on 2 ranks
    assert [(row["rank"], row["kind"], row["end, ms"]) for row in rows if row["timeline"] == "happened"] == [
        (0, "forward", 500), (1, "wait", 500), (1, "forward", 1000)
    ]  # fmt: skip
    lanes = [chart for chart in page.charts if chart["kind"] == "lanes"]
    assert {lane["end"] for lane in lanes} == {max(row["end, ms"] for row in rows)}
    assert {row["kind"] for row in rows} == {kind["name"] for kind in lanes[0]["kinds"]}
    assert "with 50.0%" in section.texts[0]


def test_texts_are_escaped():
    evil = "<script>alert(1)</script>"
    page = Page(report.report({evil: records(2)}, [conditions_section({"data": [evil]}, {"hosts": [evil]}, evil)]))
    assert page.tags.count("script") == 1
    assert {row["what"]: row["value"] for row in page.tables["machine"]}["run"] == evil


def main(monkeypatch, capsys, *words):
    monkeypatch.setattr("sys.argv", ["report", *map(str, words)])
    return report.main(), capsys.readouterr().err


def leave(folder, lines):
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))


def test_folders_become_a_page(monkeypatch, capsys, tmp_path):
    for name in "ab":
        leave(tmp_path / name, records(3))
    (tmp_path / "a" / "config.toml").write_text('lr = 0.5\ndata = ["x = y"]\n')
    words = tmp_path / "a", tmp_path / "b", "--html", tmp_path / "both.html"
    assert main(monkeypatch, capsys, *words) == (0, "")
    page = Page((tmp_path / "both.html").read_text())
    assert len(page.tables["records"]) == 6
    assert [row["value"] for row in page.tables["settings0"]] == ["0.5", '["x = y"]']


def test_a_page_that_does_not_fit_the_disk_is_refused_by_the_path_that_was_given(monkeypatch, capsys, tmp_path):
    def full(path, text):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), f"{path}.1.tmp")

    leave(tmp_path / "a", records(3))
    monkeypatch.setattr(report, "write", full)
    path = tmp_path / "a.html"
    expected = f"error: --html {path} can't be written (No space left on device): pass another path\n"
    assert main(monkeypatch, capsys, tmp_path / "a", "--html", path) == (2, expected)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["none"], "none/metrics.jsonl: No such file or directory: pass the folder that a run has written to"),
        (["text"], "text/metrics.jsonl: has a line that is not a record of a run: pass another folder"),
        (["numbers"], "numbers/metrics.jsonl: has a line that is not a record of a run"),
        (["empty"], "empty/metrics.jsonl: has no record"),
        (["a", "./a"], "a is given twice: pass one run, or two to compare"),
        (["a", "b", "c"], "3 runs can't be compared: pass one, or two"),
        (
            ["a", "--html", "none/x.html"],
            "--html none/x.html can't be written (No such file or directory): pass a path",
        ),
    ],
)
def test_bad_input_is_one_line(monkeypatch, capsys, tmp_path, words, message):
    monkeypatch.chdir(tmp_path)
    leave(tmp_path / "a", records(3))
    leave(tmp_path / "numbers", [1, 2])
    leave(tmp_path / "empty", [])
    leave(tmp_path / "text", [])
    (tmp_path / "text" / "metrics.jsonl").write_text("hello\n")
    status, error = main(monkeypatch, capsys, "--html", "x.html", *words)
    assert status == 2
    assert error.startswith(f"error: {message}")
    assert error.count("\n") == 1
    assert not (tmp_path / "x.html").exists()
