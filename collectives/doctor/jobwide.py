"""What the reports of all ranks show together."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

from collectives import environment
from collectives.doctor.child import Ended
from collectives.doctor.finding import Finding, Setting, note, ok, problem
from collectives.doctor.host import show_cores
from collectives.doctor.launch import SCHEDULERS
from collectives.doctor.report import Report, name_hosts, name_ranks

CLOCKS_APART_S = 1.0  # more than ranks on crowded cores leave a barrier apart

Examination = Callable[[Setting], Iterator[Finding]]


def by_host(reports: Sequence[Report]) -> dict[str, list[Report]]:
    hosts: dict[str, list[Report]] = {}
    for report in reports:
        hosts.setdefault(report.host, []).append(report)
    return hosts


def examinations(
    ended: Ended, reports: Sequence[Report], size: int, clocks: Sequence[tuple[str, float]]
) -> list[Examination]:
    """Of a job of `size` ranks, of which perhaps not all have reported; rank 0's part in it has `ended`."""

    def ranks(setting: Setting) -> Iterator[Finding]:
        yield from together(ended, reports, size)
        yield from allotted(size)

    def fake_nodes(setting: Setting) -> Iterator[Finding]:
        with suppress(ValueError):  # which the examination of settings reports
            if fake := environment.fake_nodes():
                yield pretended(*fake, size)

    def same_on_all_hosts(setting: Setting) -> Iterator[Finding]:
        yield from differing(reports)

    def clocks_of_hosts(setting: Setting) -> Iterator[Finding]:
        yield from apart(clocks)

    return [ranks, fake_nodes, same_on_all_hosts, clocks_of_hosts]


def together(ended: Ended, reports: Sequence[Report], size: int) -> Iterator[Finding]:
    """Who has reported, and what has kept the others from it."""
    missing = sorted(set(range(size)) - {report.rank for report in reports})
    wrong = failure(ended)
    if wrong:
        who = f" ({name_ranks(missing)} did not report)" if missing else ""
        yield wrong._replace(text=f"rank 0 {wrong.text}{who}")
    else:
        hosts = [f"{name_ranks([r.rank for r in there])} on {host}" for host, there in by_host(reports).items()]
        yield ok(f"{size} exchange messages: {name_hosts(hosts, 0)}")


def failure(ended: Ended) -> Finding | None:
    """What has gone wrong between ranks, by what this rank's child has said."""
    messages = ended.messages()
    for message in messages:
        if "failed" in message:
            return problem(message["failed"], message["remedy"])
    if not ended.how:
        return None
    where = next((message["at"] for message in reversed(messages) if "at" in message), "does not begin")
    remedy = "see what MPI and other ranks say above; between hosts, name the network interface to mpirun (hostfiles)"
    return problem(f"{where}: {ended.how}", remedy)


def allotted(size: int) -> Iterator[Finding]:
    """Whether a scheduler allots as many tasks as there are ranks."""
    for name, (_, variable) in SCHEDULERS.items():
        tasks = os.environ.get(variable, "")
        if tasks.isdigit() and int(tasks) != size:
            yield note(f"{name} allots {tasks} tasks ({variable}) to {size} ranks", "ask mpirun for as many, with -n")


def crowding_of(there: Sequence[Report]) -> Examination:
    """Whether the ranks of a host have a core each, and one for each of their threads."""

    def crowding(setting: Setting) -> Iterator[Finding]:
        cores = sorted({core for report in there for core in report.cores})
        number, of_host, threads = len(there), there[0].num_cores, sum(report.threads for report in there)
        usable = min(len(cores), of_host)
        words = f"{number} rank{'s' * (number > 1)} on {show_cores(cores)}"
        if number > len(cores) and len(cores) < of_host:
            remedy = "mpirun --bind-to core or --bind-to none, or ask the scheduler for more cores"
            yield problem(f"{words} of {of_host} there are", remedy)
        elif number > usable:
            yield note(words, "fine for tests; to be fast, start no more ranks than cores")
        elif threads > usable:
            yield note(f"{words}, computing with {threads} threads", "lower OMP_NUM_THREADS, or start fewer ranks")
        else:
            yield ok(words)

    return crowding


def pretended(nodes: int, ranks: int, size: int) -> Finding:
    words = f"COLLECTIVES_FAKE_NODES={nodes}x{ranks}"
    if nodes * ranks != size:
        return problem(f"{words} does not make the {size} ranks of this job", "change it, or unset it")
    return note(f"{words} has ranks play nodes that they are not on", "unset it, unless this is a test")


def differing(reports: Sequence[Report]) -> Iterator[Finding]:
    """Whether what should be the same everywhere is."""
    for topic in ("versions", "mpi library"):
        said = {finding.text for report in reports for finding in report.findings if finding.topic == topic}
        if len(said) > 1:
            yield note(f"{topic} differ, as listed below", "install the same on all hosts")


def apart(clocks: Sequence[tuple[str, float]]) -> Iterator[Finding]:
    """How far the hosts' clocks differ, by what they showed when ranks had met; first come, first read."""
    first: dict[str, float] = {}
    for host, seconds in clocks:
        first[host] = min(seconds, first.get(host, seconds))
    if len(first) < 2:
        return
    early, late = min(first, key=first.__getitem__), max(first, key=first.__getitem__)
    spread_s = first[late] - first[early]
    if spread_s > CLOCKS_APART_S:
        yield note(f"{late} is {spread_s:.1f} s ahead of {early}", "set clocks by NTP: times in logs mislead")
    else:
        yield ok(f"within {CLOCKS_APART_S:g} s of each other")
