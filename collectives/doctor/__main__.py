"""Say what works here and what does not, one line each, with remedies; exit with 1 if there is a problem.

python -m collectives.doctor
mpirun -n 4 python -m collectives.doctor --json doctor.json
"""

import argparse
import json
import os
import platform
import select
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from collectives.doctor.checks import OF_HOST, OF_RANK, Finding, findings_of, is_launched, problem_of
from collectives.job import environment, launch
from collectives.job.settings import Parser, Range
from collectives.schedule import draw
from collectives.schedule.moves import show_ranks

SECONDS = Range(0, 3600, open="above", unit="s")
UNDER_MPIRUN = "To examine ranks and hosts: mpirun -n 4 python -m collectives.doctor, with --hostfile for several hosts"
LOCAL_RANK = ("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID")
PTRACE_SCOPE = Path("/proc/sys/kernel/yama/ptrace_scope")
VERDICTS = ("problem", "note", "ok")
PATIENCE = 6  # times the limit of a child: ranks are not ready at once


@dataclass(order=True)
class RankReport:
    """A rank's place and findings.  `cores` are those it may use, of `num_cores` there are."""

    rank: int = 0
    host: str = "?"
    cores: Sequence[int] = ()
    num_cores: int = 1
    threads: int = 1
    findings: list[Finding] = field(default_factory=list)


def main(arguments: Sequence[str] | None = None) -> int:
    is_first = environment.launched_rank() == 0
    if not is_first:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  # rank 0 speaks for all
    try:
        flags = parse(arguments)
    except ValueError as error:
        if is_first:
            print(f"error: {error}", file=sys.stderr)
        return 2
    report = report_of_process(flags.timeout)
    if not is_launched():
        return show([report], flags.json, UNDER_MPIRUN)
    return examine_job(report, flags)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the flags; raise ValueError for what makes no sense."""
    parser = Parser("python -m collectives.doctor", description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the findings there, too")
    words = "how long a trial may take (30)"
    parser.add_argument("--timeout", type=SECONDS.number, default=30.0, metavar="S", help=words)
    flags = parser.parse_args(arguments)
    if flags.json:
        draw.refuse(str(flags.json))
    return flags


def report_of_process(limit_s: float) -> RankReport:
    """Examine what this process can by itself; what is the same for a host, its first rank does."""
    of_rank, of_host = ("rank", "host") if is_launched() else ("job", "job")
    checks = [(check, of_host) for check in OF_HOST * (environment.first_int(LOCAL_RANK, 0) == 0)]
    checks += [(check, of_rank) for check in OF_RANK]
    findings = [finding for check, about in checks for finding in findings_of(check, about, limit_s)]
    cores, threads = sorted(os.sched_getaffinity(0)), environment.threads_per_rank()
    return RankReport(environment.launched_rank(), platform.node(), cores, environment.cores(), threads, findings)


def examine_job(report: RankReport, flags: argparse.Namespace) -> int:
    """Find out what takes several ranks, and show all reports on rank 0."""
    sink = watch(report, PATIENCE * flags.timeout, flags.json)
    try:
        mpi = launch.start_mpi()
        if environment.launched_size() > 1 and mpi.COMM_WORLD.size == 1:
            raise launch.other_mpi(mpi)
        reports = collect(mpi, report, sink)
    except Exception as error:
        return show_failure(report, problem_of(error), flags.json)
    finally:
        os.close(sink)
    if report.rank:
        return 0
    for host in hosts_of(reports):
        of_host = [each for each in reports if each.host == host]
        of_host[0].findings.insert(0, cores(of_host)._replace(topic="cores", about="host"))
    return show([RankReport(findings=list(exchange(reports))), *reports], flags.json)


def watch(report: RankReport, limit_s: float, path: Path | None) -> int:
    """Fork a process that shows the report and ends this one if it gets stuck, be it inside of MPI.

    Returns a pipe to write to where this process is, and to close in the end.
    """
    source, sink = os.pipe()
    parent, place = os.getpid(), "starts MPI"
    if os.fork():
        os.close(source)
        return sink
    os.close(sink)
    while select.select([source], [], [], limit_s)[0]:
        if not (place := os.read(source, 1 << 16).decode()):
            os._exit(0)
    remedy = "see what MPI and other ranks say above; between hosts, name the network interface (hostfiles)"
    show_failure(report, Finding("problem", f"{place}: not over after {limit_s:g} s", remedy), path)
    time.sleep(1.0)  # for the launcher to take the words
    os.kill(parent, signal.SIGKILL)
    os._exit(1)


def collect(mpi: Any, report: RankReport, sink: int) -> list[RankReport]:
    """Try what takes several ranks, and return all reports on rank 0."""
    from collectives.arrays import memory

    comm, reports = mpi.COMM_WORLD, [report]
    os.write(sink, b"waits for the ranks of its host")
    node = comm.Split_type(mpi.COMM_TYPE_SHARED)
    reads = memory.reads_processes(node.allgather(memory.probe_address()))
    node.Barrier()  # until then, every rank's number must be there
    if node.size > 1:
        report.findings.append(single_copy(reads)._replace(topic="memory of other ranks", about="rank"))
    if comm.rank:
        comm.send(report, 0)
    while comm.rank == 0 and len(reports) < comm.size:
        missing = sorted({*range(comm.size)} - {each.rank for each in reports})
        os.write(sink, f"waits for reports of {name_ranks(missing)}".encode())
        reports.append(comm.recv(None, mpi.ANY_SOURCE))
    os.write(sink, b"waits in a barrier of all ranks")
    comm.Barrier()
    return sorted(reports)


def show_failure(report: RankReport, failure: Finding, path: Path | None) -> int:
    """Show what has gone wrong between ranks, and the own report: on rank 0, on others in one line."""
    words = f"rank {report.rank} on {report.host}: {failure.text}"
    if report.rank:
        print(words, file=sys.stderr, flush=True)
        return 1
    return show([RankReport(findings=[failure._replace(text=words, topic="ranks")]), report], path)


def single_copy(reads: bool) -> Finding:
    """Say whether the system lets a rank read the memory of those of its host."""
    if reads:
        return Finding("ok", "the system lets a rank read it (process_vm_readv), so ordinary arrays are copied once")
    remedy = "in a container, start it with --cap-add=SYS_PTRACE; otherwise run all ranks as one user"
    if PTRACE_SCOPE.exists() and PTRACE_SCOPE.read_text().strip() != "0":
        remedy = "sysctl kernel.yama.ptrace_scope=0 as root"
    words = "the system lets no rank read it (process_vm_readv), so ordinary arrays are copied twice"
    return Finding("note", words, remedy)


def exchange(reports: Sequence[RankReport]) -> Iterator[Finding]:
    """Say where ranks are, and whether hosts have different packages."""
    ranks = [(host, [report.rank for report in reports if report.host == host]) for host in hosts_of(reports)]
    where = ", ".join(f"{name_ranks(numbers)} on {host}" for host, numbers in ranks)
    yield Finding("ok", f"{len(reports)} exchange messages: {where}", topic="ranks")
    if len({finding.text for report in reports for finding in report.findings if finding.topic == "versions"}) > 1:
        yield Finding("note", "they differ, as listed below", "install the same on all hosts", "versions")


def cores(reports: Sequence[RankReport]) -> Finding:
    """Say whether the ranks of a host have a core each, and one for each of their threads."""
    bound = sorted({core for report in reports for core in report.cores})
    number, of_host, threads = len(reports), reports[0].num_cores, sum(report.threads for report in reports)
    usable = min(len(bound), of_host)
    words = f"{number} rank{'s' * (number > 1)} on core{'s' * (len(bound) > 1)} {show_ranks(bound)}"
    if number > len(bound) and len(bound) < of_host:
        remedy = "mpirun --bind-to core or --bind-to none, or ask the scheduler for more cores"
        return Finding("problem", f"{words} of {of_host} there are", remedy)
    if number > usable:
        remedy = "fine for tests; to be fast, start no more ranks than cores"
        return Finding("note", f"{words}: oversubscribed", remedy)
    if threads > usable:
        words = f"{words}, computing with {threads} threads"
        return Finding("note", words, "lower OMP_NUM_THREADS, or start fewer ranks")
    return Finding("ok", words)


def show(reports: Sequence[RankReport], path: Path | None, hint: str = "") -> int:
    """Print the findings of all ranks, each once, those of a topic one after the other; return the exit status."""
    holders: dict[Finding, list[RankReport]] = {}
    for report in reports:
        for finding in report.findings:
            holders.setdefault(finding, []).append(report)
    topics = list(dict.fromkeys(finding.topic for finding in holders))
    merged = sorted(holders.items(), key=lambda item: topics.index(item[0].topic))
    verdicts = [finding.verdict for finding in holders]
    counts = ", ".join(f"{verdicts.count(verdict)} {verdict}" for verdict in VERDICTS)
    print(*(line(finding, who) for finding, who in merged), counts, *[hint] * bool(hint), sep="\n", flush=True)
    if path:
        when = {"time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}
        entries = [
            finding._asdict() | {"ranks": [each.rank for each in who], "hosts": hosts_of(who)}
            for finding, who in merged
        ]
        path.write_text(json.dumps(when | {"findings": entries}, indent=1) + "\n")
    return int("problem" in verdicts)


def line(finding: Finding, holders: Sequence[RankReport]) -> str:
    """Format a finding, and which hosts or ranks have it, unless it is about the whole job."""
    verdict, text, remedy, topic, about = finding
    hosts = hosts_of(holders)
    who = ", ".join(hosts) if about == "host" else name_ranks([each.rank for each in holders])
    who += f" on {hosts[0]}" * (about == "rank" and len(hosts) == 1)
    return f"{verdict:<7}  {topic}{f' ({who})' * (about != 'job')}: {text}{f' -> {remedy}' * bool(remedy)}"


def hosts_of(reports: Sequence[RankReport]) -> list[str]:
    return list(dict.fromkeys(report.host for report in reports))


def name_ranks(ranks: Sequence[int]) -> str:
    """Name ranks, as in "rank 1" or "ranks 0-3"."""
    return f"rank{'s' * (len(ranks) > 1)} {show_ranks(ranks)}"


if __name__ == "__main__":
    sys.exit(main())
