"""Say what works here and what does not, one line each, with remedies; exit with 1 if there is a problem.

python -m collectives.doctor
mpirun -n 4 python -m collectives.doctor
"""

import os
import platform
import select
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from collectives.doctor.checks import OF_HOST, Finding, findings_of, is_launched, problem_of
from collectives.job import environment, launch
from collectives.job.settings import Parser
from collectives.schedule.moves import show_ranks

UNDER_MPIRUN = "To examine ranks and hosts: mpirun -n 4 python -m collectives.doctor, with --hostfile for several hosts"
LOCAL_RANK = ("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID")
PTRACE_SCOPE = Path("/proc/sys/kernel/yama/ptrace_scope")
VERDICTS = ("problem", "note", "ok")
CHECK_S, JOB_S = 30.0, 180.0  # that a check may take, and all that several ranks do


class RankReport(NamedTuple):
    """What a rank has found; `cores` are those it may use, of `num_cores` there are."""

    rank: int
    host: str
    cores: Sequence[int]
    num_cores: int
    threads: int
    reads: bool  # the memory of the host's other ranks
    findings: Sequence[Finding]  # about its host, of the first rank there


def main(arguments: Sequence[str] | None = None) -> int:
    if environment.launched_rank():
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  # rank 0 speaks for all
    try:
        Parser("python -m collectives.doctor", description=__doc__).parse_args(arguments)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    is_first = environment.first_int(LOCAL_RANK, 0) == 0
    of_host = [finding for check in OF_HOST * is_first for finding in findings_of(check, CHECK_S)]
    if not is_launched():
        status = show([("", finding) for finding in of_host])
        print(UNDER_MPIRUN)
        return status
    sink = watch(of_host)
    try:
        reports = collect(of_host)
    except Exception as error:
        return fail(problem_of(error), of_host)
    finally:
        os.close(sink)
    return show([*of_job(reports)]) if reports else 0


def watch(of_host: Sequence[Finding]) -> int:
    """Fork a process that ends this one if it gets stuck, be it inside of MPI; return a pipe to close in the end."""
    (source, sink), parent = os.pipe(), os.getpid()
    if os.fork():
        os.close(source)
        return sink
    os.close(sink)
    if not select.select([source], [], [], JOB_S)[0]:
        remedy = "see what MPI and other ranks say above; between hosts, name the network interface (hostfiles)"
        fail(Finding("problem", f"not over after {JOB_S:g} s", remedy), of_host)
        time.sleep(1.0)  # for the launcher to take the words
        os.kill(parent, signal.SIGKILL)
    os._exit(0)


def fail(finding: Finding, of_host: Sequence[Finding]) -> int:
    """Show what has gone wrong between ranks, and what was found before."""
    text = f"rank {environment.launched_rank()} on {platform.node()}: {finding.text}"
    if environment.launched_rank():
        print(text, file=sys.stderr, flush=True)
        return 1
    return show([("", finding._replace(text=text, topic="ranks")), *(("", each) for each in of_host)])


def collect(of_host: Sequence[Finding]) -> list[RankReport] | None:
    """Try what takes several ranks, and return all reports on rank 0."""
    mpi = launch.start_mpi()
    from collectives.arrays import memory

    node = mpi.COMM_WORLD.Split_type(mpi.COMM_TYPE_SHARED)
    reads = memory.reads_processes(node.allgather(memory.probe_address()))
    node.Barrier()  # until then, every rank's number must be there
    place = mpi.COMM_WORLD.rank, platform.node(), sorted(os.sched_getaffinity(0)), environment.cores()
    return mpi.COMM_WORLD.gather(RankReport(*place, environment.threads_per_rank(), reads, of_host))


def of_job(reports: Sequence[RankReport]) -> Iterator[tuple[str, Finding]]:
    """Yield what there is to say of a job, and of which hosts."""
    hosts: dict[str, list[RankReport]] = {}
    for report in reports:
        hosts.setdefault(report.host, []).append(report)
    where = ", ".join(f"{name_ranks([each.rank for each in there])} on {host}" for host, there in hosts.items())
    yield "", Finding("ok", f"{len(reports)} exchange messages: {where}", topic="ranks")
    for host, there in hosts.items():
        yield host, cores(there)
        if len(there) > 1:
            yield host, single_copy(all(each.reads for each in there))
    holders: dict[Finding, list[str]] = {}
    for report in reports:
        for finding in report.findings:
            holders.setdefault(finding, []).append(report.host)
    yield from ((", ".join(of), finding) for finding, of in holders.items())


def single_copy(reads: bool) -> Finding:
    """Say whether the system lets a rank read the memory of those of its host."""
    topic = "memory of other ranks"
    if reads:
        words = "the system lets a rank read it (process_vm_readv), so ordinary arrays are copied once"
        return Finding("ok", words, topic=topic)
    remedy = "in a container, start it with --cap-add=SYS_PTRACE; otherwise run all ranks as one user"
    if PTRACE_SCOPE.exists() and PTRACE_SCOPE.read_text().strip() != "0":
        remedy = "sysctl kernel.yama.ptrace_scope=0 as root"
    words = "the system lets no rank read it (process_vm_readv), so ordinary arrays are copied twice"
    return Finding("note", words, remedy, topic)


def cores(reports: Sequence[RankReport]) -> Finding:
    """Say whether the ranks of a host have a core each, and one for each of their threads."""
    bound = sorted({core for report in reports for core in report.cores})
    number, of_host, threads = len(reports), reports[0].num_cores, sum(report.threads for report in reports)
    usable = min(len(bound), of_host)
    words = f"{number} rank{'s' * (number > 1)} on core{'s' * (len(bound) > 1)} {show_ranks(bound)}"
    verdict, remedy = "ok", ""
    if number > len(bound) and len(bound) < of_host:
        verdict, words = "problem", f"{words} of {of_host} there are"
        remedy = "mpirun --bind-to core or --bind-to none, or ask the scheduler for more cores"
    elif number > usable:
        verdict, words = "note", f"{words}: oversubscribed"
        remedy = "fine for tests; to be fast, start no more ranks than cores"
    elif threads > usable:
        verdict, words = "note", f"{words}, computing with {threads} threads"
        remedy = "lower OMP_NUM_THREADS, or start fewer ranks"
    return Finding(verdict, words, remedy, "cores")


def show(findings: Sequence[tuple[str, Finding]]) -> int:
    """Print findings, and which hosts have them if it is not the job; return the exit status."""
    for hosts, (verdict, text, remedy, topic) in findings:
        print(f"{verdict:<7}  {topic}{f' ({hosts})' * bool(hosts)}: {text}{f' -> {remedy}' * bool(remedy)}")
    verdicts = [finding.verdict for _, finding in findings]
    print(", ".join(f"{verdicts.count(verdict)} {verdict}" for verdict in VERDICTS), flush=True)
    return int("problem" in verdicts)


def name_ranks(ranks: Sequence[int]) -> str:
    """Name ranks, as in "rank 1" or "ranks 0-3"."""
    return f"rank{'s' * (len(ranks) > 1)} {show_ranks(ranks)}"


if __name__ == "__main__":
    sys.exit(main())
