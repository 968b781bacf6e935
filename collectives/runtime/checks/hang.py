"""What is told of ranks that wait for each other in vain: where each of them is, and who has not arrived."""

from collections.abc import Iterable, Mapping, Sequence
from threading import Thread
from typing import NamedTuple

from collectives.runtime.checks.call_log import Entry, Record, place_of, show_last
from collectives.runtime.plan import Wait
from collectives.schedule.moves import show_ranks

MOST_SHOWN = 3  # of the last collectives of a rank, runs of one counted once


class Awaited(NamedTuple):
    """The call that a rank waits in; `members` are the ranks that it is to be called on."""

    title: str
    label: str
    number: int
    members: Sequence[int]


class Report(NamedTuple):
    """Where a rank is: in words; how many calls it has made on each communicator, by label; and its last ones."""

    words: str
    numbers: dict[str, int]
    said: dict[tuple[str, int], str]
    awaited: Awaited | None


class Times(NamedTuple):
    """How long ago, in seconds, the wait has begun, and anything has changed."""

    waited_s: float
    quiet_s: float


def report(record: Record, wait: Wait | None, times: Times, main: Thread) -> Report:
    """Of this rank, by any of its threads."""
    entries = record.entries()
    numbers = {calls.label: calls.number for calls in list(record.communicators)}
    said = {(entry.call.calls.label, entry.number): entry.call.said for entry in entries}
    if wait is None:
        return Report(of_no_wait(entries, times.quiet_s, main), numbers, said, None)
    awaited = awaited_by(wait, entries)
    if awaited is None:
        words = f"waits {times.waited_s:.0f} s in {wait.words} ({place_of(wait.thread)}){before(entries)}"
        return Report(words, numbers, said, None)
    earlier = entries[: entries.index(awaited)] if awaited in entries else entries
    words = f"waits {times.waited_s:.0f} s in {awaited}{details(wait)}{before(earlier)}"
    calls = awaited.call.calls
    title = f"{awaited.call.name} #{awaited.number}{calls.label}"
    return Report(words, numbers, said, Awaited(title, calls.label, awaited.number, list(calls.members)))


def awaited_by(wait: Wait, entries: Sequence[Entry]) -> Entry | None:
    """The call that a wait is part of: the latest, where the ranks agree on it with plans of the library's own."""
    if wait.words:
        return None
    if wait.plan is not None and wait.plan.call is not None:
        return wait.plan.call.entry()
    return entries[-1]


def details(wait: Wait) -> str:
    assert wait.plan is not None
    agreeing = "" if wait.plan.call else ", where the ranks agree on it"
    return f"{agreeing}, {wait.plan.awaits()}"


def of_no_wait(entries: Sequence[Entry], quiet_s: float, main: Thread) -> str:
    where = (
        f"is not in a collective, but at {place_of(main.ident or 0)}" if main.is_alive() else "has ended its program"
    )
    if not entries:
        return f"{where}; it has called none"
    ended = "started" if entries[-1].call.under_way else "ended"
    return f"{where}; its last: {entries[-1]}, {ended} {quiet_s:.0f} s ago{before(entries[:-1])}"


def before(entries: Sequence[Entry]) -> str:
    return f"; before: {show_last(entries, MOST_SHOWN)}" if entries else ""


def account(reports: Mapping[int, Report], asked: Iterable[int], size: int) -> str:
    """What the ranks that were asked have reported, and what follows, a line each."""
    silent = "does not answer: it is stopped, has died, or is in code that lets no other thread run"
    lines = [f"rank {rank} of {size} {reports[rank].words if rank in reports else silent}" for rank in asked]
    for awaited in dict.fromkeys((r.awaited.label, r.awaited.number) for _, r in sorted(reports.items()) if r.awaited):
        lines += verdict(reports, *awaited)
    return "\n".join(lines)


def verdict(reports: Mapping[int, Report], label: str, number: int) -> list[str]:
    """Who of those that should be in a call is not, or is in another one."""
    awaited = next(r.awaited for _, r in sorted(reports.items()) if r.awaited and r.awaited[1:3] == (label, number))
    late = [r for r in awaited.members if r in reports and reports[r].numbers.get(label, 0) < number]
    silent = [r for r in awaited.members if r not in reports]
    lines = [f"not arrived at {awaited.title}: {ranks(late)}"] if late else []
    lines += [f"perhaps not arrived at {awaited.title}: {ranks(silent)}"] if silent else []
    calls: dict[str, list[int]] = {}
    for rank in awaited.members:
        if rank in reports and (said := reports[rank].said.get((label, number))):
            calls.setdefault(said, []).append(rank)
    if len(calls) > 1:
        sides = ", ".join(f"{said} on {ranks(callers)}" for said, callers in calls.items())
        lines.append(f"ranks disagree: call #{number}{label} is {sides}")
    return lines


def ranks(some: Iterable[int]) -> str:
    """As in "rank 1" or "ranks 0-3"."""
    numbers = list(some)
    return f"rank{'s' * (len(numbers) > 1)} {show_ranks(numbers)}"
