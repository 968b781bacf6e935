"""Findings, and how examinations are run so that whatever befalls one of them is a finding, too."""

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

VERDICTS = ("ok", "note", "problem")


class Finding(NamedTuple):
    """One line: a verdict on a topic and, where that is not "ok", its remedy.  `about` is a rank, host or job."""

    verdict: str
    text: str
    remedy: str = ""
    topic: str = ""
    about: str = "job"


class Setting(NamedTuple):
    """What examinations are told: how long a child may take, how many ranks this host has, and where its files are."""

    limit_s: float = 30.0
    local_ranks: int = 1
    root: Path = Path("/")

    def read(self, path: str) -> str | None:
        """A file's text, None where there is no such file."""
        try:
            return (self.root / path).read_text(errors="replace").strip()
        except OSError:
            return None


Examination = Callable[[Setting], Iterable[Finding]]


def ok(text: str) -> Finding:
    return Finding("ok", text)


def note(text: str, remedy: str) -> Finding:
    return Finding("note", text, remedy)


def problem(text: str, remedy: str) -> Finding:
    return Finding("problem", text, remedy)


def examine(about: str, examinations: Sequence[Examination], setting: Setting, limit_s: float) -> list[Finding]:
    """What the examinations find, in their order, though all run at once, and in `limit_s` seconds."""
    found: list[list[Finding]] = [[] for _ in examinations]
    pairs = list(zip(examinations, found, strict=True))
    threads = [threading.Thread(target=attempt, args=(about, *pair, setting), daemon=True) for pair in pairs]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + limit_s
    for thread, (examination, findings) in zip(threads, pairs, strict=True):
        thread.join(max(0.0, deadline - time.monotonic()))
        if thread.is_alive():
            late = note(f"not examined after {limit_s:g} s", "see what it waits for, or raise --timeout")
            findings.append(titled(late, about, examination))
    return [finding for findings in found for finding in list(findings)]


def attempt(about: str, examination: Examination, findings: list[Finding], setting: Setting) -> None:
    """Add what an examination finds until it ends, one way or another."""
    try:
        findings.extend(titled(finding, about, examination) for finding in examination(setting))
    except (Exception, SystemExit) as error:
        words = one_line(str(error)) or "without a word"
        failed = note(f"could not be examined ({type(error).__name__}: {words})", "see to that, then try again")
        findings.append(titled(failed, about, examination))


def titled(finding: Finding, about: str, examination: Examination) -> Finding:
    """A finding of an examination, whose name is the topic, in one line."""
    topic = getattr(examination, "__name__", "?").replace("_", " ")
    text, remedy = (" ".join(words.split()) for words in (finding.text, finding.remedy))
    return Finding(finding.verdict, text, remedy, topic, about)


def one_line(text: str) -> str:
    """What a failed program has said, in a line: the exception of its first traceback, or else its first words.

    >>> one_line("----\\nTraceback (most recent call last):\\n  File\\nKeyError: 3\\n----\\nExit code: 1\\n")
    'KeyError: 3'
    """
    _, traceback, after = text.partition("Traceback (")
    lines = [line for line in (after if traceback else text).splitlines() if any(map(str.isalpha, line))]
    told = [line for line in lines[bool(traceback) :] if not line.startswith(" ")]
    return (told or lines or [""])[0].strip()


def show_numbers(numbers: Sequence[int]) -> str:
    """Ascending numbers, in few characters.

    >>> show_numbers([0, 1, 2, 8]), show_numbers([5])
    ('0-2,8', '5')
    """
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
