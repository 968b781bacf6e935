"""The page of the benchmark's results: its numbers, crossovers, and errors for invalid files."""

import json
import re
from argparse import Namespace
from contextlib import nullcontext
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest

from collectives.bench import html, run
from collectives.bench.html import crossing, crossovers
from collectives.bench.trial import PEERS
from collectives.runtime.choose.auto import network_to_json
from collectives.schedule.network import NETWORK
from mpi_tests.helpers.launch import ROOT
from mpi_tests.helpers.pages import Page, check_charts, check_fetches_nothing

RESULTS = ROOT / "benchmarks" / "results"
SIZES = tuple(8 * 4**i for i in range(12))


def row(name="ring", nbytes=1024, seed=0, number=20, **more):
    """Return a row in the format of bench --json."""
    samples = np.random.default_rng(seed).lognormal(3, 0.2, number).round(3) + nbytes * 1e-4
    median = float(np.median(samples))
    times = {"min_us": samples.min(), "median_us": median, "p99_us": np.percentile(samples, 99)}
    return {
        "collective": "all_reduce", "name": name, "algorithm": name, "memory": "symmetric", "device": "cpu",
        "dtype": "float32", "op": "sum", "root": None, "bytes": nbytes, "count": nbytes // 4, "in_place": False,
        "samples_us": samples.tolist(), **times, "cv_percent": 1.0, "algbw_gbps": nbytes / median * 1e-3,
        "busbw_gbps": nbytes / median * 1e-3, "model_us": None if name == "mpi" else 0.9 * median,
        "bound_percent": 50.0, "wrong": 0, **more,
    }  # fmt: skip


def document(rows, **environment):
    return {
        "schema": 1, "command": ["python", "-m", "collectives.bench"], "started": "2026-01-01T00:00:00+00:00",
        "environment": {"mpi": "Open MPI", "hosts": ["a", "a"], **environment}, "ranks": 2, "nodes": [2],
        "times": "medians of 20 calls, slowest rank", "links": network_to_json(NETWORK), "results": rows,
    }  # fmt: skip


ROWS = [row(name, size, seed) for seed, size in enumerate(SIZES) for name in ("ring", "two_shot", "mpi")]


def test_the_table_has_the_numbers_measured():
    page = Page(html.report({"a": document(ROWS)}))
    check_charts(page)
    table = page.tables["t0"]
    assert [(each["size"], each["name"]) for each in table] == [(each["bytes"], each["name"]) for each in ROWS]
    for each, row in zip(table, ROWS, strict=True):
        ordered = sorted(row["samples_us"])
        quartiles = [ordered[i] + 0.25 * f * (ordered[i + 1] - ordered[i]) for i, f in ((4, 3), (14, 1))]  # of 20
        expected = [ordered[0], quartiles[0], (ordered[9] + ordered[10]) / 2, quartiles[1], row["p99_us"]]
        names = ("min", "quartile 1", "median", "quartile 3", "p99")
        assert [each[f"{name}, µs"] for name in names] == pytest.approx(expected, rel=1e-5)
        assert each["limit, µs"] == pytest.approx(row["median_us"] / 2, rel=1e-5)
        assert each["busbw, GB/s"] == pytest.approx(row["busbw_gbps"], rel=1e-5)
        assert each["model, µs"] == (row["model_us"] and pytest.approx(row["model_us"], rel=1e-5))


def test_bandwidth_and_time_are_drawn_with_the_model_and_the_limit():
    page = Page(html.report({"a": document(ROWS)}))
    bandwidth, time = page.charts
    assert [line["name"] for line in time["lines"]][:3] == ["ring", "two_shot", "mpi"]
    assert time["lines"][-1]["column"] == "limit, µs"
    assert all(axis["log"] for chart in (bandwidth, time) for axis in (chart["x"], chart["y"]))
    assert {line["column"] for line in bandwidth["lines"]} == {"median, µs", "model, µs", "limit, µs"}
    at = page.tables["t0"][0]
    assert bandwidth["y"]["rate"]
    assert bandwidth["lines"][0]["rate"] * at["size"] / at["median, µs"] * 1e-3 == pytest.approx(
        at["busbw, GB/s"], rel=1e-4
    )


def test_no_two_lines_look_the_same():
    names = [f"algorithm_{i}" for i in range(28)]
    page = Page(html.report({"a": document([row(name, size) for name in names for size in SIZES])}))
    looks = [(line["color"], line["marker"]) for line in page.charts[0]["lines"] if line["name"] in names]
    assert len({*looks}) == len(looks) == 28


def test_numbers_have_three_digits():
    text = html.report({"a": document([row(median_us=12345.6, min_us=0.0123456, p99_us=2.0, wrong=1234)])})
    cells = re.findall(r"<td[^>]*>([^<]*)", text[text.index("<tbody>") : text.index("</tbody>")])
    assert {"12300", "0.0123", "2", "1234"} <= {*cells}
    assert all(len(re.sub(r"^0\.0*|[.-]", "", cell).rstrip("0")) <= 3 for cell in cells[3:-1]), cells
    assert Page(text).tables["t0"][0]["median, µs"] == 12345.6


def test_overlap_and_messages_have_charts():
    more = {"overall_us": 3.0, "compute_us": 2.0, "overlap_percent": 40.0}
    rows = [row(name, size, collective="iall_reduce", **more) for name in ("ring", "mpi") for size in SIZES]
    rows += [row("auto", size, collective="message_rate", op=None, messages_per_s=5e5) for size in SIZES]
    page = Page(html.report({"a": document([*ROWS, *rows])}))
    check_charts(page)
    titles = [(chart["table"], chart["title"]) for chart in page.charts[2:]]
    assert titles[2:3] + titles[5:] == [("t1", "Overlap with computation"), ("t2", "Messages at all links")]
    assert (page.tables["t1"][0]["overlap, %"], page.tables["t2"][0]["messages/s"]) == (40, 5e5)
    assert "overlap, %" not in page.tables["t0"][0].keys() | page.tables["t2"][0].keys()
    assert {line["column"] for line in page.charts[4]["lines"]} == {"overlap, %"}


@pytest.mark.parametrize("file", sorted(RESULTS.glob("rig-*[!g].json")), ids=lambda file: file.stem)
def test_results_of_the_rig_are_read(file):
    rows, page = json.loads(file.read_text())["results"], Page(html.report({"a": html.read(file)}))
    check_charts(page)
    check_numbers(page, [(each["bytes"], each["name"], each["median_us"]) for each in rows])


@pytest.mark.parametrize("file", sorted(RESULTS.glob("peers-*.json")), ids=lambda file: file.stem)
def test_results_of_peers_are_read(file):
    data, page = json.loads(file.read_text()), Page(html.report({"a": html.read(file)}))
    check_charts(page)
    expected = [
        (each["bytes"], name, seconds * 1e6)
        for each in data["results"]
        for name, seconds in each["seconds"].items()
        if name != "copy"
    ]
    check_numbers(page, expected)
    first, at = data["results"][0], page.tables["t0"][0]
    assert at["limit, µs"] == pytest.approx(first["seconds"]["copy"] * 1e6, rel=1e-5)
    factor = 2 * (data["ranks"] - 1) / data["ranks"]  # of all_reduce
    assert at["busbw, GB/s"] == pytest.approx(factor * at["size"] / at["median, µs"] * 1e-3, rel=1e-4)


def check_numbers(page: Page, expected: list[tuple[int, str, float]]) -> None:
    """Check sizes, names and medians, in the order of the page's sections."""
    tables = [rows for key, rows in page.tables.items() if key.startswith("t")]
    shown = sorted((each["size"], each["name"], each["median, µs"]) for rows in tables for each in rows)
    assert len(shown) == len(expected) > 0
    for ours, theirs in zip(shown, sorted(expected), strict=True):
        assert ours[:2] == theirs[:2]
        assert ours[2] == pytest.approx(theirs[2], rel=1e-5)


def test_lines_cross_where_both_take_the_same_time():
    times = {"tree": {8: 1.0, 64: 3.0, 512: 30.0}, "ring": {8: 4.0, 64: 5.0, 512: 10.0}}
    (first, second) = crossovers(times)
    assert (first.name, first.begin, second.name, second.end) == ("tree", 8, "ring", 512)
    at = (np.log(first.end) - np.log(64)) / (np.log(512) - np.log(64))
    of = {name: np.exp((1 - at) * np.log(each[64]) + at * np.log(each[512])) for name, each in times.items()}
    assert of["tree"] == pytest.approx(of["ring"])
    assert 64 < first.end == second.begin < 512


def test_a_contestant_that_lacks_a_size_crosses_half_way():
    assert crossing({8: 1.0}, {32: 1.0}, 8, 32) == 16
    assert crossovers({}) == []


def test_who_is_fastest_is_drawn_over_the_sizes():
    page = Page(html.report({"a": document(ROWS)}))
    strip, table = page.charts[0]["ranges"], page.tables["f0"]
    assert [each["name"] for each in strip] == [each["fastest"] for each in table]
    assert (strip[0]["from"], strip[-1]["to"]) == (SIZES[0], SIZES[-1])
    for before, after in pairwise(strip):
        assert before["to"] == after["from"]
        assert before["name"] != after["name"]


def test_a_peer_may_be_the_fastest():
    for peer in PEERS:
        rows = [row(name, size, 1) | {"median_us": us} for name, us in ((peer, 1.0), ("ring", 2.0)) for size in SIZES]
        page = Page(html.report({"a": document(rows)}))
        assert [(each["name"], each["to"]) for each in page.charts[0]["ranges"]] == [(peer, SIZES[-1])]


def test_two_documents_are_side_by_side():
    others = [row(each["name"], each["bytes"], 100 + i) for i, each in enumerate(ROWS[:-1])]
    page = Page(html.report({"a": document(ROWS), "b": document(others)}))
    check_charts(page)
    assert len(page.tables["t0"]) == len(ROWS) + len(others)
    assert {line["where"].get("run") for line in page.charts[0]["lines"]} == {"a", "b"}
    both, last = page.tables["c0"], ROWS[-1]
    for each, a, b in zip(both, ROWS, others, strict=False):
        assert (each["a, µs"], each["b, µs"]) == pytest.approx((a["median_us"], b["median_us"]), rel=1e-5)
        assert each["ratio"] == pytest.approx(b["median_us"] / a["median_us"], rel=1e-5)
    assert (both[-1]["size"], both[-1]["b, µs"], both[-1]["ratio"]) == (last["bytes"], None, None)


def test_bandwidths_are_by_each_run_s_own_ranks():
    page = Page(html.report({"two": document(ROWS), "four": {**document(ROWS), "ranks": 4, "nodes": [4]}}))
    rates = {line["where"]["run"]: line["rate"] for line in page.charts[0]["lines"]}
    assert rates == {"two": 1.0, "four": 1.5}


def test_barriers_have_a_table_alone():
    page = Page(html.report({"a": document([row("direct", 0, collective="barrier", op=None, bound_percent=None)])}))
    assert page.charts == []
    assert "limit, µs" not in page.tables["t0"][0]


def test_all_of_a_large_run_is_below_half_a_megabyte():
    rows = [row(f"algorithm_{i}", size) for size in SIZES for i in range(10)]
    several = [{**each, "collective": f"collective_{i}"} for i in range(12) for each in rows]
    text = html.report({"a": document(several)})
    assert len(text.encode()) < 500_000
    check_fetches_nothing(text)


def test_names_are_escaped():
    evil = "<script>alert(1)</script>\"'&"
    page = Page(html.report({evil: document([row(evil)], hosts=[evil])}))
    assert page.tags.count("script") == 1
    assert page.tables["t0"][0]["name"] == evil
    assert page.charts[0]["lines"][0]["name"] == evil
    assert evil in dict(each.values() for each in page.tables["m0"])["hosts"].replace('\\"', '"')


def main(monkeypatch, capsys, *words):
    monkeypatch.setattr("sys.argv", ["html", *map(str, words)])
    return html.main(), capsys.readouterr().err


def test_files_become_a_page(monkeypatch, capsys, tmp_path):
    for name in "ab":
        (tmp_path / f"{name}.json").write_text(json.dumps(document(ROWS)))
    words = tmp_path / "a.json", tmp_path / "b.json", "--html", tmp_path / "both.html"
    assert main(monkeypatch, capsys, *words) == (0, "")
    assert {each["run"] for each in Page((tmp_path / "both.html").read_text()).tables["t0"]} == {"a", "b"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["none.json"], "none.json: No such file or directory: pass a file that collectives.bench --json has written"),
        (
            ["text"],
            "text: no results of collectives.bench: pass a file that its --json or benchmarks/peers.py has written",
        ),
        (["list.json"], "list.json: no results of collectives.bench"),
        (["half.json"], "half.json: no results of collectives.bench"),
        (["a.json", "a.json"], "a.json is named twice"),
        (["a.json", "half.json", "text"], "3 files: pass one, or two to compare"),
        (
            ["a.json", "--html", "none/x.html"],
            "--html none/x.html can't be written (No such file or directory): pass a path in an existing, writable",
        ),
    ],
)
def test_bad_input_is_one_line(monkeypatch, capsys, tmp_path, words, message):
    monkeypatch.chdir(tmp_path)
    half = document([{"collective": "all_reduce"}])
    texts = {"text": "no JSON", "list.json": "[]", "half.json": json.dumps(half), "a.json": json.dumps(document(ROWS))}
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    status, error = main(monkeypatch, capsys, "--html", "x.html", *words)
    assert status == 2
    assert error.startswith(f"error: {message}")
    assert error.count("\n") == 1
    assert not (tmp_path / "x.html").exists()


def test_an_interrupt_leaves_what_was_measured(monkeypatch, tmp_path):
    def results(*_):
        yield ROWS[:3]
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "results", results)
    flags = Namespace(
        json=tmp_path / "r.json",
        html=tmp_path / "r.html",
        tune=None,
        wide=False,
        run_cycles=1,
        per_iter_timing=False,
        report_timestamps=False,
    )
    with pytest.raises(KeyboardInterrupt):
        run.measured(SimpleNamespace(rank=0, agreed=nullcontext), flags, NETWORK, {}, document([]))
    assert json.loads(flags.json.read_text())["results"] == ROWS[:3]
    assert len(Page(flags.html.read_text()).tables["t0"]) == 3
