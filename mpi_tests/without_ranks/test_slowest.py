"""The list of slow items that `.ci/run` prints."""

import json

import pytest

from mpi_tests.helpers import slowest


@pytest.mark.parametrize(
    ("make_test", "whole", "status", "words"),
    [
        (720, 2400, 0, []),
        (721, 2400, 0, ["warning: make test takes 721 s, more than 720 s: see the items above"]),
        (500, 2401, 1, ["error: all takes 2401 s, more than 2400 s: see the items above"]),
    ],
)
def test_slow_items_are_warned_of_and_a_slow_whole_is_an_error(
    monkeypatch, tmp_path, capsys, make_test, whole, status, words
):
    monkeypatch.setattr(slowest, "TIMES_FOLDER", tmp_path)
    for number in range(2):
        run = {f"test_{number}.py::test_{i}": float(number * 10 + i) for i in range(12)}
        (tmp_path / f"run-{number}").write_text(json.dumps(run))
    assert slowest.main(["--make_test", str(make_test), "--whole", str(whole)]) == status
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "slowest items:"
    assert lines[1:11] == [f"   {seconds}.0 s  test_1.py::test_{seconds - 10}" for seconds in range(21, 11, -1)]
    assert lines[11].startswith("warning: test_1.py::test_11 takes 21 s, more than 20 s: ")
    assert lines[12:] == words
