"""Pipeline schedules as grids in letters and colors, and the command that draws, searches and checks them."""

import re
import sys

import pytest

from parallelism.pipeline.schedule import files, picture
from parallelism.pipeline.schedule.__main__ import main
from parallelism.pipeline.schedule.actions import Schedule
from parallelism.pipeline.schedule.basic import gpipe, one_f_one_b
from parallelism.pipeline.schedule.picture import ScheduleGrid, planned, text
from parallelism.pipeline.schedule.price import Costs, Span, price
from parallelism.pipeline.schedule.registry import make_schedule as make
from parallelism.step.actions import parse

COLOR = re.compile(r"\x1b\[[0-9;]*m")


def lanes(grid):
    return [line.split(None, 2)[2] for line in grid.splitlines()[1:]]


def parse_schedule(*orders):
    return Schedule("written", tuple(tuple(map(parse, order.split())) for order in orders), (9,) * len(orders))


def test_a_grid_in_letters():
    assert text(planned(price(one_f_one_b(3, 4)))).splitlines() == [
        "1f1b: 18 s, bubble 33.3%, live activations at most 3 2 1",
        "rank 0  F0F1F2........B0--F3B1--..B2--..B3--",
        "rank 1  ..F0F1....B0--F2B1--F3B2--..B3--....",
        "rank 2  ....F0B0--F1B1--F2B2--F3B3--........",
    ]


def test_stages_are_named_where_a_rank_has_several():
    grid = text(planned(price(parse_schedule("0F0 3F0 3I0 0I0 3W0 0W0", "1F0 2F0 2I0 1I0 2W0 1W0"))))
    assert lanes(grid) == ["0F0......3F03I0......0I03W00W0", "...1F02F0......2I01I02W01W0..."]


def test_widths_are_in_proportion_to_times():
    grid = text(planned(price(gpipe(2, 1), Costs(forward=[2, 1], inputs=3, weights=1, message=0.5))))
    assert lanes(grid) == ["F0--............B0------", ".....F0B0------........."]


def test_every_lane_is_as_long_as_the_columns_allow():
    timeline = price(one_f_one_b(8, 12), Costs(1.3, 1.1, 0.7, 0.3))
    for columns in (40, 80, 133):
        assert {len(line) for line in text(planned(timeline), columns).splitlines()[1:]} == {columns}


def test_what_is_too_narrow_for_its_name_has_its_letter():
    timeline = price(parse_schedule("0F10 0F11 0B10 0B11"))
    names = [set(re.findall("[FB][0-9]*", lanes(text(planned(timeline), columns))[0])) for columns in range(12, 40)]
    assert set.union(*names) == {"F", "B", "F10", "F11", "B10", "B11"}, "part of a number reads as another one"


def test_actions_that_take_no_time_have_no_cell():
    grid = text(planned(price(gpipe(2, 2), Costs(forward=1, inputs=0, weights=0))))
    assert lanes(grid) == ["F0F1..", "..F0F1"]


def test_an_empty_schedule_has_empty_lanes():
    timeline = price(Schedule("idle", ((), ()), (0, 0)))
    assert text(planned(timeline)).splitlines()[1:] == ["rank 0  ", "rank 1  "]
    picture.figure([planned(timeline)]).draw_without_rendering()


def test_colors_change_no_letter_but_fill():
    timeline = price(one_f_one_b(3, 4))
    plain, colored = text(planned(timeline)), text(planned(timeline), colored=True)
    assert COLOR.sub("", colored) == plain.replace("-", " ")
    assert "\x1b[97;44mF0\x1b[0m" in colored
    assert "\x1b[30;102mB1  \x1b[0m" in colored


def bars(axes):
    """Return the middle, begin and end of each bar by label."""
    return {
        group.get_label(): sorted(
            (round(bar.get_y() + bar.get_height() / 2, 3), bar.get_x(), bar.get_x() + bar.get_width()) for bar in group
        )
        for group in axes.containers
    }


def test_a_figure_has_a_bar_for_each_action():
    timeline = price(one_f_one_b(4, 8), Costs(2, 3, 1, 0.5))
    (axes,) = picture.figure([planned(timeline)]).axes
    for label, kind in (("forward", "F"), ("backward", "B")):
        expected = sorted((s.rank, s.begin_s, s.end_s) for s in timeline.spans if s.what[1] == kind)
        assert [pytest.approx(bar) for bar in bars(axes)[label]] == expected
    numbers = [text.get_text() for text in axes.texts]
    assert sorted(numbers) == sorted(str(m) for m in range(8) for _ in range(2 * 4))
    assert axes.get_title() == picture.title(timeline)


def test_grids_share_their_time_and_their_colors():
    timeline = price(one_f_one_b(2, 2))
    happened = [span._replace(end_s=span.end_s + 0.5) for span in timeline.spans] + [
        Span(1, "wait for activation", 0, 1),
        Span(0, "all_reduce of stage 0", 4, 6),
    ]
    fig = picture.figure([planned(timeline), ScheduleGrid("happened", 2, happened)])
    above, below = fig.axes
    assert above.get_xlim() == below.get_xlim()
    assert above.get_xlim()[1] > 9.5
    assert bars(below)["wait"] == [(1, 0, 1)]
    assert [label.get_text() for label in fig.legends[0].get_texts()] == ["forward", "backward", "wait", "all_reduce"]
    assert bars(below)["all_reduce"] == [(0.4, 4, 6)], "on the lower edge of rank 0's lane"
    assert above.containers[0][0].get_facecolor() == below.containers[0][0].get_facecolor()


def test_stages_of_a_rank_have_shades():
    (axes,) = picture.figure([planned(price(parse_schedule("0F0 1F0 1B0 0B0")))]).axes
    forward = axes.containers[0]
    assert len({bar.get_facecolor() for bar in forward}) == 2


PNG = b"\x89PNG\r\n\x1a\n"


def words(text):
    return text.split()


def test_the_command_draws(capsys, tmp_path):
    png, out = tmp_path / "a.png", tmp_path / "a.csv"
    assert main([*words("draw --schedule 1f1b --stages 4 --micro_batches 8 --png"), str(png), "--out", str(out)]) == 0
    assert capsys.readouterr().out.rstrip("\n") == text(planned(price(one_f_one_b(4, 8))))
    assert png.read_bytes().startswith(PNG)
    assert files.read(out).orders == one_f_one_b(4, 8).orders
    assert main([*words("draw --message 0.5 --forward 1 2 3 4 --file"), str(out)]) == 0
    expected = price(files.read(out), Costs(forward=[1, 2, 3, 4], message=0.5))
    assert capsys.readouterr().out.rstrip("\n") == text(planned(expected))


def test_by_default_four_stages_and_eight_micro_batches(capsys):
    assert main(["draw"]) == 0
    assert main(words("draw --schedule interleaved --virtual_stages 3")) == 0
    output = capsys.readouterr().out
    assert text(planned(price(one_f_one_b(4, 8)))) in output
    assert text(planned(price(make("interleaved", 4, 8, 3)))) in output


@pytest.mark.parametrize(
    ("environment", "is_colored"),
    [({"TERM": "xterm"}, True), ({"TERM": "dumb"}, False), ({"TERM": "a", "NO_COLOR": "1"}, False)],
)
def test_colors_are_for_terminals_that_have_them(environment, is_colored, capsys, monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    for name, value in (environment | {"COLUMNS": "60"}).items():
        monkeypatch.setenv(name, value)
    main(["draw"])
    assert "\x1b" not in capsys.readouterr().out, "in a file"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    main(["draw"])
    output = capsys.readouterr().out
    assert ("\x1b" in output) == is_colored
    assert max(map(len, COLOR.sub("", output).splitlines()[1:])) == 60


def test_the_command_searches(capsys, tmp_path):
    out = tmp_path / "found.txt"
    flags = words("search --stages 3 --micro_batches 4 --memory 2 --message 0.5 --weights 0.5 --out")
    assert main([*flags, str(out)]) == 0
    grid, _, others = capsys.readouterr().out.partition("\nknown:\n")
    costs = Costs(weights=0.5, message=0.5)
    schedule = files.read(out)
    assert max(schedule.peaks) <= 2
    assert grid.splitlines()[1:] == text(planned(price(schedule, costs))).splitlines()[1:]
    assert f"{picture.title(price(make('1f1b', 3, 4), costs))}, above the limit\n" in others
    assert f"{picture.title(price(make('naive', 3, 4), costs))}\n" in others


def test_the_command_checks_files(capsys, tmp_path):
    good, bad = tmp_path / "good.csv", tmp_path / "bad.csv"
    files.write(make("zb_h1", 3, 4), good)
    bad.write_text("0F0,0B0\n1B0,1F0\n")
    assert main(["check", str(good)]) == 0
    assert (
        capsys.readouterr().out
        == f"{good} holds: 3 ranks, 3 stages, 4 micro-batches, live activations at most 3 on each rank\n"
    )
    assert main(["check", str(good), str(bad)]) == 2
    assert str(bad) in capsys.readouterr().err
    assert main(["check", "none.csv"]) == 2
    assert capsys.readouterr().err == "error: none.csv can't be read (No such file or directory): check the path\n"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("draw --schedule 2f2b", "no pipeline schedule is called '2f2b': use naive, gpipe"),
        ("draw --stages 0", "argument --stages: '0' must be a whole number from 1 to 1000000"),
        ("draw --micro_batches many", "argument --micro_batches: 'many' must be a whole number from 1 to 1000000"),
        ("draw --forward fast", "argument --forward: 'fast' must be a number from 0 to 1000000000 s"),
        ("draw --message -1", "argument --message: '-1' must be a number from 0 to"),
        ("draw --inputs 1 2 3", "inputs has 3 times: pass one, or 4"),
        ("draw --schedule zb_v --virtual_stages 3", "schedule 'zb_v' takes 2 stages a rank, not 3"),
        ("draw --png no/such/a.png", "--png no/such/a.png can't be written (No such file or directory): pass a path"),
        ("draw --out no/such/a.csv", "--out no/such/a.csv can't be written (No such file or directory): pass a path"),
        ("draw --file no.csv", "no.csv can't be read (No such file or directory)"),
        ("draw --file no.csv --stages 3", "--stages 3: the file no.csv sets it; omit one of them"),
        ("search --memory 1 --virtual_stages 2", "a limit of 1 activations"),
        ("search --memory 4 4", "2 limits for 4 ranks: pass one, or 4"),
        ("search --schedule 1f1b", "unrecognized arguments: --schedule 1f1b"),
        ("paint", "invalid choice: 'paint'"),
        ("", "the following arguments are required: draw | search | check"),
    ],
)
def test_bad_flags_are_one_line(flags, message, capsys):
    assert main(words(flags)) == 2
    streams = capsys.readouterr()
    assert streams.out == ""
    assert streams.err.startswith("error: ")
    assert streams.err.count("\n") == 1
    assert message in streams.err
