"""Fuzz settings for seconds, and check the report of a faulty command; `make test-all` does so for minutes."""

import sys

import pytest

from mpi_tests import fuzz_settings
from mpi_tests.fuzz_settings import Case, draw_case, outcome, wrong
from mpi_tests.helpers.launch import ROOT, environment, watched

pytestmark = pytest.mark.shares_cores

PATIENCE_S = 60  # seconds for one case on a busy machine


def test_commands_run_or_refuse_in_one_line():
    words = [sys.executable, "-m", "mpi_tests.fuzz_settings", "--seconds", 15, "--limit", PATIENCE_S]
    result = watched(words, environment() | {"PYTHONPATH": str(ROOT)}, 180)
    assert result.returncode == 0, result.stderr
    assert " cases of --seed 0: " in result.stdout


def test_a_failure_names_its_case(monkeypatch, capsys):
    """A repeated case fails again; tracebacks, outputs of several lines, and accepted absurd settings are reported."""
    number = next(n for n in range(100) if draw_case(3, n).absurd and not draw_case(3, n).is_process)
    monkeypatch.setattr("sys.argv", ["fuzz_settings", "--seed", "3", "--only", str(number)])
    for fault, words in (
        (lambda *_: (0, ""), f"case {number} of --seed 3: "),
        (lambda *_: (1, "error: what else\n"), "ends with status 1"),
        (lambda *_: (2, "usage: x\nerror: this is too much\n"), "ends with status 2"),
        (lambda *_: 1 / 0, "a traceback: ZeroDivisionError"),
    ):
        monkeypatch.setattr(fuzz_settings, "outcome", fault)
        with pytest.raises(SystemExit, match=words) as caught:
            fuzz_settings.main()
        assert f"--seed=3 --only={number}" in str(caught.value)
    monkeypatch.setattr(fuzz_settings, "outcome", outcome)
    fuzz_settings.main()
    assert "1 cases of --seed 3: " in capsys.readouterr().out


def test_what_takes_too_long_is_told(monkeypatch):
    def endless(*_):
        while True:
            pass

    monkeypatch.setattr(fuzz_settings, "in_process", endless)
    assert wrong(Case("bench", ()), limit_s=0.1) == ("not finished after 0.1 s", "")
