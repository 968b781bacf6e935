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

    def __str__(self) -> str:
        return f"{self.topic}: {self.text}" + f": {self.remedy}" * bool(self.remedy)


class Setting(NamedTuple):
    """What examinations are told: how long a child may take, how many ranks this host has, and where its files are."""

    limit_s: float = 60.0
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
    """Of the examination that found it, whose name is the topic."""
    return finding._replace(topic=getattr(examination, "__name__", "?").replace("_", " "), about=about)


def one_line(text: str) -> str:
    """The last line that says something, as that of a traceback.

    >>> one_line("Traceback:\\n  File\\nKeyError: 3\\n")
    'KeyError: 3'
    """
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")
