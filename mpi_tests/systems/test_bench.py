"""Complete runs of the benchmark of collectives."""

import json
import re
from datetime import datetime

import numpy as np
import pytest

from collectives.bench.report import bus_factor
from collectives.bench.trial import in_place_choices
from collectives.schedule.spec import COLLECTIVES
from mpi_tests.helpers.launch import launch, refusal
from mpi_tests.helpers.pages import Page, check_charts
from mpi_tests.helpers.reference import MOVES, ROOTED

CASES = [(collective, in_place) for collective in COLLECTIVES for in_place in in_place_choices(collective)]
TINY = ("-b", 64, "-e", "1K", "-f", 16, "-n", 3, "-w", 1)


@pytest.fixture(scope="module")
def run_of_all(tmp_path_factory):
    """Run every collective with `auto` and its competitors, with a root other than 0; return output and document."""
    folder = tmp_path_factory.mktemp("bench")
    files = "--json", folder / "r.json"
    result = bench(3, "all", *TINY, "-r", 2, "--peers", "mpi,gloo,nccl", "-d", "float64", "-o", "max", *files)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout, json.loads((folder / "r.json").read_text())


def bench(num_ranks: int, *words, **more):
    return launch(num_ranks, "python", "-m", "collectives.bench", *words, **more)


def test_a_document_says_all(run_of_all):
    _, data = run_of_all
    assert list(data) == [
        "schema", "command", "started", "environment", "ranks", "nodes", "times", "links", "results",
        "average_busbw_gbps",
    ]  # fmt: skip
    assert (data["schema"], data["ranks"], data["nodes"]) == (1, 3, [3])
    around = data["environment"]
    assert len(around["hosts"]) == len(around["binding"]) == 3
    assert around["numpy"] == np.__version__
    assert {"mpi", "python", "mpi4py", "torch", "cores", "devices", "env", "git"} <= set(around)
    assert "-d" in data["command"]
    assert data["links"]["within"]["alpha_s"] > 0


def test_results_are_complete_and_right(run_of_all):
    _, data = run_of_all
    rows = data["results"]
    assert {(r["collective"], r["in_place"]) for r in rows if r["name"] == "auto"} == {*CASES}
    assert {r["name"] for r in rows} == {"auto", "mpi", "gloo"}
    for r in rows:
        assert r["wrong"] == 0
        assert len(r["samples_us"]) == 3
        assert r["median_us"] == pytest.approx(np.median(r["samples_us"]), abs=1e-3)
        assert (r["op"], r["root"]) == (
            "max" if r["collective"] not in (*MOVES, "barrier") else None,
            2 if r["collective"] in ROOTED else None,
        )
        assert (r["model_us"] is None) == (r["name"] != "auto")
        assert r["bytes"] == 8 * r["count"] or r["collective"] == "barrier"
        factor = bus_factor(r["collective"], 3)
        assert r["busbw_gbps"] == pytest.approx(r["bytes"] * factor / r["median_us"] * 1e-3, rel=1e-2, abs=1e-5)
    assert sorted({r["bytes"] for r in rows if r["collective"] == "all_reduce"}) == [64, 1024]


def test_the_table_has_a_line_for_each_contestant_and_size(run_of_all):
    output, data = run_of_all
    lines = [line.split() for line in output.splitlines() if not line.startswith(("#", "--peers"))]
    assert len(lines) == len({(r["collective"], r["bytes"], r["name"]) for r in data["results"]})
    first = lines[0]
    assert first[:5] == ["64", "8", "float64", "max", "-1"]
    assert (first[8], first[12]) == ("0", "0")
    assert first[13].endswith("*")
    assert "# all_reduce, symmetric memory\n" in output
    assert "# time: medians of 3 calls, slowest rank\n" in output
    assert "--peers nccl: left out: it is not for --device cpu" in output
    assert "# Wrong elements    : 0 OK" in output
    assert max(len(line) for line in output.splitlines() if " does no " not in line) <= 125
    assert "\x1b" not in output  # no bar, and no colors, off a terminal


def test_a_table_may_be_wide_and_of_calls_in_a_row():
    flags = "-N", 2, "-I", 1, "-K", 1, "-S", 1, "-M", 1, "-u", 1, "-R", 0
    result = bench(2, *TINY, "--wide", "-z", 0, "-m", 2, "-a", 1, "-A", "ring", "mpi", *flags)
    assert result.returncode == 0, result.stderr
    assert "# time: means of 3 groups of 2 calls in a row, mean of ranks\n" in result.stdout
    assert "# all_reduce, ordinary memory\n" in result.stdout
    assert re.search(
        r"^# Host memory of the largest process: \d+ MiB before the first size, \d+ at most$", result.stdout, re.M
    )
    lines = [line.split() for line in result.stdout.splitlines() if not line.startswith("#")]
    assert [(line[0], line[25]) for line in lines] == 2 * [(n, a) for n in ("64", "1024") for a in ("ring<", "mpi")]
    for line in lines:
        datetime.strptime(" ".join(line[26:]), "%Y-%m-%d %H:%M:%S")


def test_what_osu_measures(tmp_path):
    names = ["sendrecv", "alltoallv", "latency", "bandwidth", "bidirectional", "message_rate", "iallreduce", "ibarrier"]
    files = "--json", tmp_path / "r.json", "--html", tmp_path / "r.html"
    result = bench(2, *names, *TINY, "-W", 3, "--peers", "gloo", *files)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "# Wrong elements    : 0 OK" in result.stdout
    data = json.loads((tmp_path / "r.json").read_text())
    by_name: dict[str, list] = {}
    for row in data["results"]:
        by_name.setdefault(row["collective"], []).append(row)
    assert [name.replace("_", "") for name in by_name] == [name.replace("_", "") for name in names]
    for name, rows in by_name.items():
        assert {row["name"] for row in rows} == {"auto", "mpi", "gloo"}
        for row in rows:
            assert row["wrong"] == 0
            links = 2 if name == "bidirectional" else 1
            if "messages_per_s" in row:
                assert row["messages_per_s"] == pytest.approx(links * 1e6 / row["median_us"], rel=1e-3)
                assert row["busbw_gbps"] == pytest.approx(links * row["algbw_gbps"], rel=1e-2, abs=1e-5)
            if name.startswith("i"):
                percent = 100 - 100 * (row["overall_us"] - row["compute_us"]) / row["median_us"]
                assert row["overlap_percent"] == pytest.approx(min(100, max(0, percent)), abs=1e-3)
    page = Page((tmp_path / "r.html").read_text())
    check_charts(page)
    rates = [row["messages_per_s"] for row in by_name["latency"]]
    assert [row["messages/s"] for row in page.tables["t2"]] == pytest.approx(rates, rel=1e-5)
    assert all(row["overlap, %"] >= 0 for row in page.tables["t6"])


def test_all_roots():
    result = bench(2, "broadcast", "gather", *TINY, "-r", -1, "-A", "auto")
    assert result.returncode == 0, result.stderr
    lines = [line.split() for line in result.stdout.splitlines() if not line.startswith("#")]
    assert [line[4] for line in lines] == 2 * ["0", "0", "1", "1"]


def test_a_process_alone_works(tmp_path):
    result = bench(1, *TINY, "-c", 0, "all_gather")
    assert result.returncode == 0, result.stderr
    assert "N/A" in result.stdout
    assert "not checked" in result.stdout


def test_too_little_bandwidth_fails():
    result = bench(2, *TINY, "--min-bw", 1e6)
    assert result.returncode == 1
    assert "is below --min-bw 1e+06" in result.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--json", "{tmp}/none/r.json"],
            "/none/r.json can't be written (No such file or directory): pass a path in an existing",
        ),
        (
            ["--html", "{tmp}/none/r.html"],
            "/none/r.html can't be written (No such file or directory): pass a path in an existing",
        ),
        (
            ["--json", "/proc/r.json"],
            "--json /proc/r.json can't be written (No such file or directory): pass a path in an existing",
        ),
        (["--html", "/dev/null"], "--html /dev/null can't be written (not a regular file): pass a path in an existing"),
        (["-e", "100000G"], "--end 100000G: 10 vectors for each of a node's 2 ranks don't fit into its memory: use "),
        (["-A", "two_shot", "-e", "8"], "algorithm 'two_shot' needs ranks of one node, but there are 2 nodes"),
    ],
)
def test_bad_input_ends_all_ranks_with_a_line(tmp_path, words, message):
    words = [word.format(tmp=tmp_path) for word in words]
    env = {"COLLECTIVES_FAKE_NODES": "2x1"} if "two_shot" in words else {}
    assert message in refusal(bench(2, *words, env=env))
