"""What ranks find together: started by the doctor of each rank, or by mpirun for a trial.

Each line of output is a message to the doctor: where it is, so that a doctor whose ranks hang can say where; and,
on rank 0, each rank's report as it comes in.
"""

import json
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from collectives import environment, job, system
from collectives.doctor.finding import Finding, Setting, attempt, note, ok
from collectives.doctor.launch import INSTALL
from collectives.doctor.memory import tracing
from collectives.doctor.probes import say
from collectives.doctor.report import Report
from collectives.errors import InputError

REPORT_TAG = 1


def main() -> int:
    given = sys.argv[1:] == ["--report"]  # under mpirun, standard input may never end
    report = Report.from_json(json.load(sys.stdin)) if given else Report(host=socket.gethostname())
    at("starts MPI")
    try:
        mpi = job.start_mpi()
    except (Exception, SystemExit) as error:
        said, _, remedy = str(error).rpartition(": ") if isinstance(error, InputError) else (str(error), "", INSTALL)
        return fail(f"cannot start MPI: {said}", remedy)
    if environment.launched_size() > 1 and mpi.COMM_WORLD.size == 1:
        said, _, remedy = str(job.other_mpi(mpi)).rpartition(": ")
        return fail(said, remedy)
    meet(mpi, report)
    return 0


def fail(said: str, remedy: str) -> int:
    say(failed=said, remedy=remedy)
    return 1


def at(where: str) -> None:
    say(at=where, rank=environment.launched_rank())


def meet(mpi: Any, report: Report) -> None:
    """Find out what takes several ranks, and bring all that was found to rank 0."""
    comm = mpi.COMM_WORLD
    report.rank = comm.rank
    at("meets the ranks of its host")
    node = comm.Split_type(mpi.COMM_TYPE_SHARED)
    for examination in (library(mpi), mpi_threads(mpi), single_copy(node)):
        attempt("rank", examination, report.findings, Setting())
    if comm.rank:
        at("sends its report to rank 0")
        comm.send(report.to_json(), 0, REPORT_TAG)
    else:
        say(report=report.to_json(), size=comm.size)
        for _ in range(comm.size - 1):
            at("waits for the others' reports")
            say(report=comm.recv(None, mpi.ANY_SOURCE, REPORT_TAG), size=comm.size)
    at("meets all ranks")
    comm.Barrier()
    clocks = comm.gather((report.host, time.time()))
    if comm.rank == 0:
        say(clocks=clocks)


def library(mpi: Any) -> Callable[[Setting], Iterator[Finding]]:
    def mpi_library(setting: Setting) -> Iterator[Finding]:
        yield ok(f"{job.library_name(mpi)}, {'.'.join(map(str, mpi.Get_version()))} of the standard")

    return mpi_library


def mpi_threads(mpi: Any) -> Callable[[Setting], Iterator[Finding]]:
    def threads_in_mpi(setting: Setting) -> Iterator[Finding]:
        if mpi.Query_thread() == mpi.THREAD_MULTIPLE:
            yield ok("several may call MPI (THREAD_MULTIPLE), so started plans go on in the background")
        else:
            words = "MPI gives less than THREAD_MULTIPLE: started plans go on only when asked or waited for"
            yield note(words, "use an MPI built with thread support, and leave mpi4py.rc.thread_level as it is")

    return threads_in_mpi


def single_copy(node: Any) -> Callable[[Setting], Iterator[Finding]]:
    """Whether this rank reads those of its host.  Collective."""

    def memory_of_other_ranks(setting: Setting) -> Iterator[Finding]:
        invitations = node.allgather(system.invitation())
        allowed = system.accept(invitations)
        node.Barrier()  # until then, everyone's number must be there
        if node.size > 1 and allowed:
            yield ok("the system lets a rank read it (process_vm_readv), so ordinary arrays are copied once")
        elif node.size > 1:
            words = "the system lets no rank read it (process_vm_readv), so ordinary arrays are copied twice"
            yield note(words, tracing(setting))

    return memory_of_other_ranks


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    if status:
        os._exit(status)  # MPI, if it is half there, is not ended
