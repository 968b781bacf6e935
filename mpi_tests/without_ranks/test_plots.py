"""Pictures of documents: through their axes, what is drawn is what the documents say."""

import json
import re
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest

from collectives.bench import plots
from collectives.bench.document import parse, read
from collectives.bench.documents import main
from mpi_tests.helpers.documents import document, row
from mpi_tests.helpers.launch import ROOT

TIMES = {"ring": {8: 20.0, 1024: 30.0}, "binomial": {8: 10.0, 1024: 40.0}, "mpi": {8: 5.0, 1024: 6.0}}


def measured(ranks=4, times=TIMES, **fields):
    rows = [row(name, nbytes, [us], **fields) for name, sizes in times.items() for nbytes, us in sizes.items()]
    return document(rows, ranks)


def drawn(*documents):
    parsed = [parse(data, f"{place}.json") for place, data in enumerate(documents)]
    return dict(plots.pictures(parsed))


PANEL = "all_reduce-ordinary-cpu-float32-sum-in-place"


def test_times_by_size():
    (axes,) = drawn(measured())[f"latency-{PANEL}"].axes
    assert (axes.get_xscale(), axes.get_yscale(), axes.get_ylabel()) == ("log", "log", "median time (us)")
    assert axes.get_title() == "all_reduce, ordinary cpu float32 sum in place, 4 ranks"
    assert {line.get_label(): dict(line.get_xydata().tolist()) for line in axes.lines} == TIMES
    assert {line.get_label(): line.get_linestyle() for line in axes.lines}["mpi"] == "--"


def test_bandwidth_by_size():
    (axes,) = drawn(measured())[f"bandwidth-{PANEL}"].axes
    assert axes.get_yscale() == "linear"
    for line in axes.lines:
        for nbytes, gbps in line.get_xydata():
            assert gbps == pytest.approx(1.5 * nbytes / TIMES[line.get_label()][nbytes] / 1e3)
    assert len(axes.lines) == 3


def test_a_barrier_has_times_only():
    pictures = drawn(document([row("ring", 0, collective="barrier", op=None, busbw_gbps=0.0, in_place=False)]))
    assert pictures["bandwidth-barrier-ordinary-cpu-float32"] is None
    (axes,) = pictures["latency-barrier-ordinary-cpu-float32"].axes
    np.testing.assert_allclose(axes.lines[0].get_xydata(), [(0, 11)])


def test_predictions_with_their_band():
    (axes,) = drawn(measured())["predicted"].axes
    points, diagonal = axes.lines
    ours = [us for name in ("ring", "binomial") for us in TIMES[name].values()]
    assert sorted(points.get_xydata().tolist()) == sorted([us, 0.9 * us] for us in ours)
    np.testing.assert_allclose(diagonal.get_xydata(), [(5, 5), (80, 80)])
    (band,) = axes.collections
    corners = {tuple(corner) for corner in band.get_paths()[0].vertices.tolist()}
    assert corners == {(5, 3.75), (5, 6.25), (80, 60), (80, 100)}


def test_without_predictions_there_is_no_picture():
    assert drawn(document([row("mpi")]))["predicted"] is None
    assert drawn(document([row("mpi")]))[f"fastest-{PANEL}"] is None


def test_the_fastest_of_ours_by_size_and_ranks():
    eight = {"chain": {8: 50.0}, "ring": {8: 60.0, 4096: 1.0}}
    axes = drawn(measured(8, eight), measured())[f"fastest-{PANEL}"].axes[0]
    codes, names = axes.images[0].get_array(), ["binomial", "chain", "ring"]
    shown = [[None if np.ma.is_masked(c) else names[int(c)] for c in line] for line in codes]
    assert shown == [["binomial", "ring", None], ["chain", None, "ring"]]
    assert [text.get_text() for text in axes.get_xticklabels()] == ["8", "1K", "4K"]
    assert [text.get_text() for text in axes.get_yticklabels()] == ["4", "8"]
    assert [text.get_text() for text in axes.figure.legends[0].get_texts()] == names


def written(path, data):
    path.write_text(json.dumps(data))
    return str(path)


def test_the_command_writes_pngs_and_names_them(tmp_path, capsys):
    paths = [written(tmp_path / f"{ranks}.json", measured(ranks)) for ranks in (2, 4)]
    assert main(["--plots", str(tmp_path / "new" / "out"), "--from", *paths]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert sorted(printed) == sorted(map(str, (tmp_path / "new" / "out").iterdir()))
    kinds = [f"bandwidth-{PANEL}", f"latency-{PANEL}", "predicted"]
    wanted = [f"{ranks}-{kind}" for ranks in (2, 4) for kind in kinds] + [f"fastest-{PANEL}"]
    assert printed == [f"{tmp_path}/new/out/{name}.png" for name in wanted]
    for path in printed:
        assert matplotlib.image.imread(path).shape[2] == 4


def test_bad_folders_and_documents(tmp_path, capsys):
    path = written(tmp_path / "a.json", measured())
    assert main(["--plots", path, "--from", path]) == 2
    assert capsys.readouterr().err == f"error: {path} can't be made (File exists): pass another folder\n"
    assert main(["--plots", str(tmp_path), "--from", path, path]) == 2
    assert "error: documents named a, a: pictures are named after them" in capsys.readouterr().err
    assert main(["--plots", str(tmp_path), "--from", str(tmp_path / "b.json")]) == 2
    assert list(tmp_path.iterdir()) == [tmp_path / "a.json"]


RESULTS = sorted((ROOT / "benchmarks" / "results").glob("*.json"))
OF_COLLECTIVES = [path for path in RESULTS if re.match(r"peers-|rig-(?!openmpi-tuning)", path.name)]


@pytest.mark.parametrize("path", OF_COLLECTIVES, ids=lambda path: path.stem)
def test_published_results_are_read_and_compared(path, capsys):
    """Each with itself, which is equal."""
    assert len(read(path).rows) >= 6
    assert main(["--compare", str(path), str(path)]) == 0
    assert "equal, as far as the noise lets see" in capsys.readouterr().out


def test_published_results_are_drawn(tmp_path):
    path = next(path for path in OF_COLLECTIVES if path.name == "peers-openmpi-2.json")
    found = read(path)
    small = found._replace(rows=[row for row in found.rows if row.group.collective == "broadcast"])
    assert {row.group.name for row in small.rows} == {"auto", "mpi", "gloo"}
    paths = plots.save(tmp_path, [small])
    assert {Path(path).name.partition("-")[0] for path in paths} == {"bandwidth", "latency", "fastest"}
    measured = json.loads(path.read_text())["results"]
    (of_1_kib,) = (result for result in measured if (result["collective"], result["bytes"]) == ("all_reduce", 1024))
    there = [row for row in found.rows if (row.group.collective, row.nbytes) == ("all_reduce", 1024)]
    rows = {(row.group.name, row.group.memory, row.group.dtype): row for row in there}
    assert rows["auto", "ordinary", "float32"].median_us == pytest.approx(of_1_kib["seconds"]["auto ordinary"] * 1e6)
    assert rows["auto", "symmetric", "bfloat16"].median_us == pytest.approx(of_1_kib["seconds"]["auto bfloat16"] * 1e6)
    assert rows["mpi", "ordinary", "float32"].median_us == pytest.approx(of_1_kib["seconds"]["mpi"] * 1e6)


@pytest.mark.parametrize("path", sorted({*RESULTS} - {*OF_COLLECTIVES}), ids=lambda path: path.stem)
def test_published_results_of_other_kinds_say_what_they_are(path, capsys):
    words = (
        "a tuning file, which has no times" if "tuning" in path.name else "which are no times of collectives by size"
    )
    for flags in (["--plots", "out", "--from", str(path)], ["--compare", str(path), str(path)]):
        assert main(flags) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert words in line
