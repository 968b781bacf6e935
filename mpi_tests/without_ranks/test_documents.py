"""Benchmarks' documents: read and refused, compared, drawn.  All of them are made up."""

import json
import re
import subprocess
import sys

import matplotlib.image
import numpy as np
import pytest

from collectives.bench import __main__ as bench
from collectives.bench import documents
from collectives.bench.documents import compare, parse, read
from mpi_tests.helpers.documents import document, row
from mpi_tests.helpers.launch import ROOT

TIMES = {"ring": {8: 20.0, 1024: 30.0}, "binomial": {8: 10.0, 1024: 40.0}, "mpi": {8: 5.0, 1024: 6.0}}


def measured(ranks=4, slowed=lambda name, nbytes: 1.0, times=TIMES, **fields):
    rows = [
        row(name, nbytes, [us * slowed(name, nbytes)], **fields)
        for name, sizes in times.items()
        for nbytes, us in sizes.items()
    ]
    return document(rows, ranks)


def compared(slowed, **fields):
    lines, is_slower = compare(parse(measured(**fields), "a"), parse(measured(slowed=slowed, **fields), "b"))
    verdicts = {line.split()[1]: line.split()[-1] for line in lines if line.startswith("all_reduce")}
    return {name: verdict for name, verdict in verdicts.items() if verdict in ("slower", "faster")}, is_slower


def of(factor, *names):
    return lambda name, nbytes: factor if name in names else 1.0


# --- compared ---


def test_a_document_equals_itself_and_one_with_a_little_noise():
    assert compared(of(1.0)) == ({}, False)
    assert compared(of(1.1, "ring")) == ({}, False)


def test_one_algorithm_that_is_slower_is_named_and_no_other():
    assert compared(of(1.5, "ring")) == ({"ring": "slower"}, True)


def test_a_build_faster_by_a_third_is_faster_and_not_slower():
    assert compared(of(0.7, "ring", "binomial")) == ({"ring": "faster", "binomial": "faster"}, False)


def test_what_the_peers_changed_by_is_the_machines():
    assert compared(of(1.5, *TIMES)) == ({}, False)
    assert compared(of(1.5, "mpi")) == ({"ring": "faster", "binomial": "faster"}, False)


def test_ratios_are_geometric_means_over_sizes():
    def slowed(name, nbytes):
        return 4.0 if (name, nbytes) == ("ring", 8) else 1.0

    lines, _ = compare(parse(measured(), "a"), parse(measured(slowed=slowed), "b"))
    line = next(line for line in lines if " ring " in line)
    assert re.sub(" +", " ", line) == "all_reduce ring ordinary cpu float32 sum in place 2 2.00 1.00 - 4.00 slower"
    assert lines[-1] == "1 slower, 0 faster, of 3 lines"


def test_without_peers_the_machine_is_a_suspect():
    ours = {"ring": TIMES["ring"]}
    lines, is_slower = compare(parse(measured(times=ours), "a"), parse(measured(slowed=of(2, "ring"), times=ours), "b"))
    assert is_slower
    assert lines[-1].startswith("without peers in both documents this may be the machine")


def test_what_is_not_compared_is_said():
    before = document([row("ring"), row("binomial"), row("binomial", 2048)])
    after = document([row("ring"), row("chain")], environment={"mpi": "Open MPI v5.0.11"})
    lines, _ = compare(parse(before, "a.json"), parse(after, "b.json"))
    assert lines[:3] == [
        "only in a.json: 2 rows (all_reduce binomial)",
        "only in b.json: 1 rows (all_reduce chain)",
        "the environments differ in mpi",
    ]


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (document([row()], ranks=8), "ranks are 4 in a.json, 8 in b.json: measure both alike"),
        (document([row()], nodes=[2, 2]), "nodes are (4,) in a.json, (2, 2) in b.json: measure both alike"),
        (document([row(dtype="float64")]), "a.json and b.json share no row of ours: measure both alike"),
        (document([row("mpi")]), "a.json and b.json share no row of ours: measure both alike"),
    ],
)
def test_documents_that_cannot_be_compared(other, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        compare(parse(document([row(), row("mpi")]), "a.json"), parse(other, "b.json"))


# --- read ---


def without(data, name):
    return {key: value for key, value in data.items() if key != name}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"schema": 1,', "Expecting property name"),
        ("[]", "'schema' is missing"),
        ("[" * 100000, "maximum recursion depth"),
        (json.dumps(document([], schema=2)), "schema is 2, but this build reads 1"),
        (json.dumps(without(document([]), "results")), "'results' is missing"),
        (json.dumps(document([row(median_us=0.0)])), "results[0]: 'median_us' is 0.0, but must be above 0"),
        (json.dumps(document([without(row(), "memory")])), "results[0]: 'memory' is missing"),
        (json.dumps(document([3])), "results[0]: 'collective' is missing"),
        (json.dumps(document([row(), row()])), "two results are of all_reduce ring, 1024 bytes"),
    ],
)
def test_a_broken_document_is_named(tmp_path, text, message):
    path = tmp_path / "broken.json"
    path.write_text(text)
    words = re.escape(f"{path}: no document of the benchmark ({message}")
    with pytest.raises(ValueError, match=rf"^{words}.*: measure it anew by python -m collectives.bench --json$"):
        read(path)


def test_a_missing_document_and_one_of_bytes(tmp_path):
    with pytest.raises(ValueError, match=r"none\.json: can't be read \(No such file or directory\): check the path"):
        read(tmp_path / "none.json")
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match=r"bytes\.json: no document of the benchmark \("):
        read(tmp_path / "bytes.json")


RESULTS = ROOT / "benchmarks" / "results"


@pytest.mark.parametrize("path", sorted(RESULTS.glob("rig-*.json")), ids=lambda path: path.stem)
def test_published_results_are_read(path):
    if "tuning" in path.name:
        with pytest.raises(ValueError, match="no document of the benchmark"):
            read(path)
    else:
        assert len(read(path).rows) >= 6


# --- drawn ---

DATA = "all_reduce-ordinary-cpu-float32-sum-in-place"


def test_times_by_size():
    (axes,) = dict(documents.plots(parse(measured(), "a.json")))[f"latency-{DATA}"].axes
    assert (axes.get_xscale(), axes.get_yscale(), axes.get_ylabel()) == ("log", "log", "median time (us)")
    assert axes.get_title() == "all_reduce, ordinary cpu float32 sum in place, 4 ranks on 1 nodes"
    assert {line.get_label(): dict(line.get_xydata().tolist()) for line in axes.lines} == TIMES
    assert {line.get_label(): line.get_linestyle() for line in axes.lines}["mpi"] == "--"


def test_bandwidth_by_size():
    (axes,) = dict(documents.plots(parse(measured(), "a.json")))[f"bandwidth-{DATA}"].axes
    for line in axes.lines:
        for nbytes, gbps in line.get_xydata():
            assert gbps == pytest.approx(1.5 * nbytes / TIMES[line.get_label()][nbytes] / 1e3)
    assert len(axes.lines) == 3


def test_a_barrier_has_times_only():
    barrier = document([row("ring", 0, collective="barrier", op=None, busbw_gbps=0.0, in_place=False)])
    ((name, figure),) = documents.plots(parse(barrier, "a.json"))
    assert name == "latency-barrier-ordinary-cpu-float32"
    np.testing.assert_allclose(figure.axes[0].lines[0].get_xydata(), [(0, 11)])


# --- the command ---


def command(monkeypatch, *words) -> int:
    monkeypatch.setattr("sys.argv", ["bench", *map(str, words)])
    return bench.main()


def written(path, data):
    path.write_text(json.dumps(data))
    return path


def test_the_command_compares_and_exits(monkeypatch, tmp_path, capsys):
    before, slow = (
        written(tmp_path / "a.json", measured()),
        written(tmp_path / "b.json", measured(slowed=of(2, "ring"))),
    )
    pairs = (before, before), (before, slow), (slow, before)
    assert [command(monkeypatch, "--compare", *pair) for pair in pairs] == [0, 1, 0]
    assert "1 slower, 0 faster, of 3 lines" in capsys.readouterr().out
    assert command(monkeypatch, "--compare", before, tmp_path / "c.json") == 2
    message = f"error: {tmp_path}/c.json: can't be read (No such file or directory): check the path\n"
    assert capsys.readouterr().err == message


def test_the_command_writes_pngs_and_names_them(monkeypatch, tmp_path, capsys):
    paths = [written(tmp_path / f"{ranks}.json", measured(ranks)) for ranks in (2, 4)]
    folder = tmp_path / "new" / "out"
    assert command(monkeypatch, "--plots", folder, "--from", *paths) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed == [f"{folder}/{ranks}-{kind}-{DATA}.png" for ranks in (2, 4) for kind in ("latency", "bandwidth")]
    assert sorted(printed) == sorted(map(str, folder.iterdir()))
    assert {matplotlib.image.imread(path).shape[2] for path in printed} == {4}


def test_bad_folders_and_documents(monkeypatch, tmp_path, capsys):
    path = written(tmp_path / "a.json", measured())
    assert command(monkeypatch, "--plots", path, "--from", path) == 2
    assert capsys.readouterr().err == f"error: [Errno 17] File exists: '{path}'\n"
    assert command(monkeypatch, "--plots", tmp_path, "--from", path, path) == 2
    assert "error: documents named a, a: pictures are named after them" in capsys.readouterr().err
    assert command(monkeypatch, "--from", path) == 2
    assert "error: --from needs --plots DIR" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [path]


def test_no_mpi_is_needed(tmp_path):
    before = written(tmp_path / "a.json", measured())
    script = "import sys; sys.modules['mpi4py'] = None; from collectives.bench.__main__ import main; sys.exit(main())"
    words = [sys.executable, "-c", script, "--compare", before, before]
    ran = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert (ran.returncode, ran.stderr) == (0, "")
