"""Log of the collectives that this rank has entered, for reports of mismatches and deadlocks.

Every call is logged, at little cost: words are formatted only on demand.
"""

import contextlib
import os
import sys
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from traceback import walk_tb
from types import CodeType, FrameType
from typing import Any, NamedTuple

LENGTH = 512
PROGRAMS = ("bench",)
HERE = str(Path(__file__).parents[2])  # of the library


def library_files(folder: str) -> Iterator[str]:
    """Yield the sources of the library beneath a folder, without those of programs, which are callers themselves."""
    for path, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name not in PROGRAMS]
        yield from (os.path.join(path, name) for name in names if name.endswith(".py"))


NOT_THE_CALLER = frozenset([contextlib.__file__, *library_files(HERE)])
NOT_THE_PROGRAM = (HERE + os.sep, sys.prefix + os.sep, sys.base_prefix + os.sep, "<frozen")


CallSite = tuple[CodeType, int] | tuple[str, int]  # code and an instruction in it, or a file and a line


class SourceLine(NamedTuple):
    """A line of a program."""

    file: str
    line: int

    @classmethod
    def of(cls, call_site: CallSite) -> "SourceLine":
        where, number = call_site
        if isinstance(where, str):
            return cls(where, number)
        spans = (line for begin, end, line in where.co_lines() if begin <= number < end)
        return cls(where.co_filename, next(spans, None) or where.co_firstlineno)

    def __str__(self) -> str:
        return f"{self.file.removeprefix(os.getcwd() + os.sep)}:{self.line}"


def caller(frame: FrameType) -> CallSite:
    """Return the innermost call_site outside the library, from a frame on; its line is looked up when it is shown."""
    while frame.f_code.co_filename in NOT_THE_CALLER and frame.f_back:
        frame = frame.f_back
    return frame.f_code, frame.f_lasti


def call_site_of(thread: int) -> SourceLine | None:
    """Return the source line of a thread in its program, rather than in the libraries that it calls."""
    innermost = frame = sys._current_frames().get(thread)
    while frame and frame.f_code.co_filename.startswith(NOT_THE_PROGRAM):
        frame = frame.f_back
    frame = frame or innermost
    return SourceLine(frame.f_code.co_filename, frame.f_lineno) if frame else None


def error_site_of(error: BaseException) -> SourceLine | None:
    """Return the innermost source line of the program in which an error has occurred, or else of a library."""
    lines = [SourceLine(frame.f_code.co_filename, line) for frame, line in walk_tb(error.__traceback__)][::-1]
    own = [line for line in lines if not line.file.startswith(NOT_THE_PROGRAM)]
    return [*own, *(line for line in lines if not line.file.startswith("<frozen")), None][0]


class LoggedRun(NamedTuple):
    """A collective that was entered: its number among the calls of its communicator, and its source line."""

    entry: "LogEntry"
    number: int
    call_site: SourceLine

    def __str__(self) -> str:
        entry = self.entry
        size = f"{entry.nbytes} bytes of {entry.dtype}, " if entry.dtype is not None else ""
        return f"{entry.name} #{self.number}{entry.calls.label} ({size}{self.call_site})"


class Record:
    """The last collectives that this rank has entered on communicators made from one by `split`."""

    def __init__(self) -> None:
        self.ring: deque[tuple[LogEntry, int, CallSite]] = deque(maxlen=LENGTH)
        self.communicators: list[Calls] = []
        self.num_closed = 0  # calls on communicators that are freed
        self.short: list[weakref.ref[LogEntry]] = []  # of plans that may run without an entry in the ring

    def runs(self) -> list[LoggedRun]:
        """Return the last runs, the latest at the end; of plans run on the fast path, their latest run only."""
        runs = [LoggedRun(entry, number, SourceLine.of(call_site)) for entry, number, call_site in list(self.ring)]
        for entry in filter(None, (reference() for reference in self.short)):
            own = [i for i, run in enumerate(runs) if run.entry.calls is entry.calls]
            if entry.number > max((runs[i].number for i in own if runs[i].entry is entry), default=0):
                following = [i for i in own if runs[i].number > entry.number]
                runs.insert(min(following, default=len(runs)), entry.latest())
        return runs

    @property
    def num_calls(self) -> int:
        return self.num_closed + sum(calls.number for calls in list(self.communicators))

    def without_gaps(self) -> list[LoggedRun]:
        """Return the latest runs, back to a missing one that was only counted."""
        unbroken: list[LoggedRun] = []
        expected: dict[Calls, int] = {}
        for run in reversed(self.runs()):
            calls = run.entry.calls
            if run.number != expected.get(calls, calls.number):
                break
            expected[calls] = run.number - 1
            unbroken.append(run)
        return unbroken[::-1]

    def expect_short_runs(self, entry: "LogEntry") -> None:
        self.short = [reference for reference in self.short if reference()] + [weakref.ref(entry)]


class Calls:
    """Counter of the collectives called on one communicator: equal on all ranks, if they make the same calls.

    `label` tells it from others of its record; `members` are its ranks, numbered in the original communicator.
    """

    def __init__(self, record: Record, label: str, members: Sequence[int]):
        self.record, self.label, self.members = record, label, members
        self.number = 0
        record.communicators.append(self)

    def part(self, color: int, ranks: Sequence[int]) -> "Calls":
        """Return the counter of a communicator that a split has just made of these `ranks`."""
        label = f" of split(color={color}) #{self.number}{self.label}"
        return Calls(self.record, label, [self.members[rank] for rank in ranks])

    def close(self) -> None:
        self.record.communicators.remove(self)
        self.record.num_closed += self.number


class LogEntry:
    """A collective that is called once, or the runs of a plan.  As a context manager it is entered and left."""

    __slots__ = (
        "__weakref__",
        "call_site",
        "calls",
        "description",
        "dtype",
        "lengths",
        "name",
        "nbytes",
        "number",
        "under_way",
    )

    def __init__(self, calls: Calls, name: str, description: str = "", call_site: CallSite | None = None):
        self.calls, self.name, self.description = calls, name, description or name
        self.nbytes, self.dtype = 0, None
        self.lengths: Sequence[int] = ()  # in elements, as ranks compare them
        self.number, self.under_way = 0, False
        self.call_site = call_site  # that of the caller where it enters, by default

    def __enter__(self) -> "LogEntry":
        self.enter(call_site=self.call_site)
        return self

    def __exit__(self, *_: Any) -> None:
        self.under_way = False

    def enter(self, depth: int = 1, call_site: CallSite | None = None) -> None:
        """Count it, and log it with its call site or the caller's, at least `depth` frames up, which cost time."""
        calls = self.calls
        calls.number = self.number = calls.number + 1
        self.call_site = line = call_site or caller(sys._getframe(depth))
        calls.record.ring.append((self, self.number, line))
        self.under_way = True

    def describe(self, collective: str, description: str, flat: Any, lengths: Sequence[int]) -> str:
        """Note the collective and its lengths; returns the description that ranks compare."""
        self.description = self.name.replace(collective, description)
        if flat is not None:
            self.nbytes, self.dtype, self.lengths = flat.nbytes, flat.dtype, lengths
        return self.description

    def latest(self) -> LoggedRun:
        """Return the latest run."""
        return LoggedRun(self, self.number, SourceLine.of(self.call_site or ("", 0)))

    def plan_entry(self, name: str) -> "LogEntry":
        """Return the runs of a plan that this call has bound; those of the caller's plan are not like plain calls."""
        description = self.description
        if description.startswith("plan "):
            description = f"{description.removeprefix('plan ')} by plan #{self.number}"
        runs = LogEntry(self.calls, name, description)
        runs.nbytes, runs.dtype, runs.lengths, runs.call_site = self.nbytes, self.dtype, self.lengths, self.call_site
        return runs


def show_runs(runs: Sequence[LoggedRun]) -> str:
    """Show consecutive runs of one collective from one source line as one.

    >>> barrier = LogEntry(Calls(Record(), "", range(2)), "barrier direct")
    >>> show_runs([LoggedRun(barrier, n, SourceLine("a.py", 8)) for n in (2, 3)])
    'barrier direct #2-#3 (a.py:8)'
    """
    first, last = runs[0], runs[-1]
    numbers = f"#{first.number}" if first is last else f"#{first.number}-#{last.number}"
    return f"{first.entry.name} {numbers}{first.entry.calls.label} ({first.call_site})"


def show_last(runs: Sequence[LoggedRun], most: int) -> str:
    """Return the last collectives, latest first, at most so many; runs of one from one source line count once."""
    alike = groupby(runs, key=lambda run: (run.entry.calls.label, run.entry.name, run.call_site))
    return ", ".join(show_runs(group) for group in reversed([list(group) for _, group in alike][-most:]))
