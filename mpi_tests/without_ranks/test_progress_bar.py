"""The progress bar of programs: only on a terminal, only on rank 0, with other output above it."""

import sys

from collectives.job.progress_bar import progress_bar, show


class Terminal:
    """A file that reports itself as a terminal."""

    def __init__(self):
        self.text = ""

    def write(self, text):
        self.text += text

    def flush(self):
        pass

    def isatty(self):
        return True


def on_terminal(monkeypatch):
    """Replace stdout within the test, as pytest replaces it before the test."""
    monkeypatch.setattr(sys, "stdout", Terminal())
    return sys.stdout


def test_a_terminal_shows_the_step_and_the_lines_above_the_bar(monkeypatch):
    terminal = on_terminal(monkeypatch)
    for step in progress_bar("ab", "letter"):
        show(f"line {step}")
    lines = terminal.text.replace("\r", "\n").split("\n")
    assert [line for line in lines if line.startswith("line")] == ["line a", "line b"]
    assert any("0/2" in line and "letter" in line for line in lines)
    assert lines[-1].strip() == ""  # the bar is removed at the end


def test_steps_may_be_told(monkeypatch):
    terminal = on_terminal(monkeypatch)
    with progress_bar(3, "step") as bar:
        bar.update(2)
        assert bar.n == 2
    assert "0/3" in terminal.text


def test_other_ranks_draw_nothing(monkeypatch):
    terminal = on_terminal(monkeypatch)
    assert list(progress_bar("ab", "letter", rank=1)) == ["a", "b"]
    assert terminal.text == ""


def test_nothing_is_drawn_off_a_terminal(capsys):
    for step in progress_bar("ab", "letter"):
        show(step, "")
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("a\n\nb\n\n", "")
