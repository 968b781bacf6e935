"""What a rank reports, and how the reports of all ranks become lines: what several found is said once."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from collectives.doctor.finding import VERDICTS, Finding, show_numbers

MOST_HOSTS = 4  # that a line names


@dataclass
class Report:
    """Of one rank: where it runs, and what it has found.  `cores` are those it may use, of `num_cores` there are."""

    rank: int = 0
    host: str = "?"
    cores: list[int] = field(default_factory=list)
    num_cores: int = 1
    threads: int = 1
    findings: list[Finding] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"findings": [list(finding) for finding in self.findings]}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "Report":
        return cls(**data | {"findings": [Finding(*finding) for finding in data["findings"]]})


class Line(NamedTuple):
    """A finding, and the ranks and hosts that have it."""

    finding: Finding
    ranks: tuple[int, ...] = ()
    hosts: tuple[str, ...] = ()
    who: str = ""  # in words; nothing for what is about the whole job

    def __str__(self) -> str:
        verdict, text, remedy, topic, _ = self.finding
        return f"{verdict:<7}  {topic}{f' ({self.who})' * bool(self.who)}: {text}{f' -> {remedy}' * bool(remedy)}"

    def to_json(self) -> dict[str, Any]:
        return self.finding._asdict() | {"ranks": list(self.ranks), "hosts": list(self.hosts)}


def merge(reports: Sequence[Report]) -> list[Line]:
    """The findings of all ranks, each once, those of a topic one after the other."""
    holders: dict[Finding, dict[int, str]] = {}
    for report in reports:
        for finding in report.findings:
            holders.setdefault(finding, {})[report.rank] = report.host
    topics = list(dict.fromkeys(finding.topic for finding in holders))
    ordered = sorted(holders.items(), key=lambda item: topics.index(item[0].topic))
    return [line(finding, who, reports) for finding, who in ordered]


def line(finding: Finding, holders: dict[int, str], reports: Sequence[Report]) -> Line:
    ranks, hosts = tuple(sorted(holders)), tuple(dict.fromkeys(holders.values()))
    words = ""
    if finding.about == "host":
        words = name_hosts(hosts, len({report.host for report in reports}))
    elif finding.about == "rank":
        words = name_ranks(ranks) + f" on {hosts[0]}" * (len(hosts) == 1 and len(ranks) < len(reports))
    return Line(finding, ranks, hosts, words)


def name_hosts(hosts: Sequence[str], number: int) -> str:
    """As many as fit a line.

    >>> name_hosts(["a", "b"], 3), name_hosts(["a", "b"], 2), name_hosts(["a"], 1), name_hosts("abcdef", 9)
    ('a, b', 'both hosts', 'a', 'a, b, c, d and 2 more hosts')
    """
    if len(hosts) == number > 1:
        return "both hosts" if number == 2 else f"all {number} hosts"
    more = len(hosts) - MOST_HOSTS
    return ", ".join(hosts[:MOST_HOSTS]) + f" and {more} more hosts" * (more > 0)


def name_ranks(ranks: Sequence[int]) -> str:
    """As in "rank 1" or "ranks 0-3"."""
    return f"rank{'s' * (len(ranks) > 1)} {show_numbers(ranks)}"


def summary(lines: Sequence[Line]) -> str:
    """As in "1 problem, 2 notes, 9 ok"."""
    counts = {verdict: sum(line.finding.verdict == verdict for line in lines) for verdict in VERDICTS}
    plural = "" if counts["note"] == 1 else "s"
    problems = "no problem" if not counts["problem"] else f"{counts['problem']} problem{'s' * (counts['problem'] > 1)}"
    return f"{problems}, {counts['note']} note{plural}, {counts['ok']} ok"
