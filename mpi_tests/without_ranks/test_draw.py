"""Space-time diagrams of planned schedules."""

import re
import sys
from itertools import pairwise

import pytest

from collectives.algorithms import find
from collectives.schedule import draw
from collectives.schedule.draw import Bar, Diagram, MessageLine
from collectives.schedule.events import simulate
from collectives.schedule.moves import Send
from collectives.schedule.network import Network
from mpi_tests.helpers.algorithm_costs import nodes_of

SMALL = Diagram("small", 2, [Bar(0, 0.0, 1e-3, "wait"), Bar(1, 1e-3, 2e-3, "reduce")], [MessageLine(0, 1, 0.0, 1e-3)])


def test_bars_and_lines_are_drawn_to_one_scale():
    first, second = draw.figure([SMALL, SMALL._replace(bars=[], lines=[])]).axes
    assert [(bar.get_x(), bar.get_width()) for bar in first.patches] == [(0.0, 1.0), (1.0, 1.0)]  # ms
    (lines,) = first.collections
    assert [line.tolist() for line in lines.get_segments()] == [[[0.0, 0.0], [1.0, 1.0]]]
    assert first.get_xlim() == second.get_xlim()
    assert (first.get_title(), first.get_xlabel()) == ("small", "time (ms)")
    assert first.get_ylim() == (1.5, -0.5)


def test_nothing_can_be_drawn():
    (axes,) = draw.figure([Diagram("nothing", 1, [], [])]).axes
    assert not axes.patches


def test_a_picture_replaces_another_whole(tmp_path):
    path = tmp_path / "picture.png"
    path.write_text("an older one")
    draw.save(draw.figure([SMALL]), str(path))
    assert path.read_bytes().startswith(b"\x89PNG")
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("no/such/folder/x.png", "No such file or directory"),
        ("/proc/x.png", "No such file or directory"),  # where root's permissions allow everything
        (".", "not a regular file"),
        ("", "not a regular file"),
        ("/dev/null", "not a regular file"),
        ("a" * 250, "File name too long"),
    ],
)
@pytest.mark.parametrize("refuse", [draw.refuse, draw.refuse_picture])
def test_a_path_that_cannot_be_written_is_refused(refuse, name, why):
    message = f"--json {name} can't be written ({why}): pass a path in an existing, writable folder"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        refuse(name, "--json ")


def test_a_path_that_can_be_written_stays_as_it_is(tmp_path):
    (tmp_path / "old").write_text("older")
    for name in ("old", "new"):
        draw.refuse(str(tmp_path / name))
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("old", "older")]


def test_a_picture_without_matplotlib_is_refused(monkeypatch, tmp_path):
    draw.refuse_picture(str(tmp_path / "a.png"))
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ValueError, match=r"a.png needs matplotlib: pip install '.\[plots\]'"):
        draw.refuse_picture(str(tmp_path / "a.png"))


@pytest.mark.parametrize("name", ["ring", "recursive_doubling", "hierarchical_direct"])
def test_the_plan_has_every_message_and_every_round(name):
    row, nodes = find("all_reduce", name), nodes_of(2, 2)
    planned = simulate(row, 1 << 16, nodes, Network())
    schedules = [row.rounds(rank, 4, 0, nodes) for rank in range(4)]
    sends = [(r, m.to) for r, rounds in enumerate(schedules) for moves in rounds for m in moves if isinstance(m, Send)]
    assert sorted((line.source, line.dest) for line in planned.lines) == sorted(sends)
    for rank, rounds in enumerate(schedules):
        mine = sorted((bar.begin, bar.end) for bar in planned.bars if bar.rank == rank and bar.kind != "reduce")
        assert len(mine) == sum(map(bool, rounds))
        assert all(end <= begin for (_, end), (begin, _) in pairwise(mine))
    assert planned.seconds == max(bar.end for bar in planned.bars)
