"""The doctor's rounds: what each process finds by itself, then what ranks find together."""

import json
import os
import socket
import sys
import time
from dataclasses import replace

from collectives import environment
from collectives.doctor import child, cuda, host, jobwide, launch, memory, network, software
from collectives.doctor.finding import Setting, examine
from collectives.doctor.report import Line, Report, merge, name_ranks

OF_RANK = (launch.launcher, host.binding, software.threads, software.settings, software.tuning)
OF_HOST = (
    software.versions,
    launch.mpirun,
    software.numba,
    host.system,
    host.cores,
    host.clock,
    memory.shared_memory,
    network.host_name,
    network.network,
    cuda.cuda,
)
LOCAL_RANK = ("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID")
RANKS = [sys.executable, "-m", "collectives.doctor.ranks"]
CHILDREN = 4  # of an examination, at most, each with its time
JOB = CHILDREN + 2  # as many times a child's time for what ranks do together, for which they are not ready at once
LAST_WORDS_S = 10.0  # for rank 0 to print


def is_launched() -> bool:
    """Whether a launcher has started this process: a job of one rank counts, a shell that Slurm gives does not."""
    told = any(name in os.environ for name in environment.LAUNCHED_SIZE if not name.startswith("SLURM"))
    return told or environment.launched_size() > 1


def local_report(setting: Setting) -> Report:
    """What this process finds by itself; what is the same for a host, its first rank does."""
    of_rank, of_host = ("rank", "host") if is_launched() else ("job", "job")
    first = environment.first_int(LOCAL_RANK, 0) == 0
    limit_s = CHILDREN * setting.limit_s
    findings = examine(of_host, OF_HOST, setting, limit_s) if first else []
    findings += examine(of_rank, OF_RANK, setting, limit_s)
    rank, num_cores, threads = environment.launched_rank(), environment.cores(), environment.threads_per_rank()
    return Report(rank, socket.gethostname(), host.usable_cores(), num_cores, threads, findings)


def alone(report: Report, setting: Setting) -> list[Line]:
    """The findings of a process without ranks, and of a trial of two."""
    path = launch.find_mpirun()
    ended = child.run([path, "-n", "2", *RANKS], setting.limit_s) if path else child.Ended("", "", "")
    found = examine("job", [launch.trial(ended, path)], setting, setting.limit_s)
    for trial in reports_of(ended):
        found += [finding._replace(about="job") for finding in trial.findings]
    return merge([replace(report, findings=report.findings + found)])


def of_job(report: Report, setting: Setting) -> list[Line]:
    """The findings of all ranks, on rank 0; on others nothing, but a line of what has gone wrong between ranks."""
    limit_s, began = JOB * setting.limit_s, time.monotonic()
    ended = child.run([*RANKS, "--report"], limit_s, given=json.dumps(report.to_json()), hears=False)
    if report.rank:
        if wrong := jobwide.failure(ended):
            print(f"{name_ranks([report.rank])} on {report.host}: {wrong.text}", file=sys.stderr, flush=True)
        if ended.crashed:  # mpirun ends the job when this process ends, too: rank 0 must have spoken by then
            time.sleep(max(0.0, began + limit_s + LAST_WORDS_S - time.monotonic()))
        return []
    reports = reports_of(ended) or [report]
    told = {name: value for message in ended.messages() for name, value in message.items()}
    size, clocks = told.get("size", environment.launched_size()), told.get("clocks", [])
    found = examine("job", jobwide.examinations(ended, reports, size, clocks), setting, setting.limit_s)
    for there in jobwide.by_host(reports).values() if len(reports) == size else ():
        there[0].findings[:0] = examine("host", [jobwide.crowding_of(there)], setting, setting.limit_s)
    return merge([Report(findings=found)]) + merge(reports)


def reports_of(ended: child.Ended) -> list[Report]:
    """By rank."""
    reports = [Report.from_json(message["report"]) for message in ended.messages() if "report" in message]
    return sorted(reports, key=lambda report: report.rank)
