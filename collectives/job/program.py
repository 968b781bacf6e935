"""A user's program as the main module of each rank."""

import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from mpi4py.run import run_command_line

from collectives.job import environment
from collectives.job.backoff import Backoff
from collectives.job.launch import end_job, start_mpi
from collectives.job.settings import __version__

PATIENCE_S = 1.0  # for the other ranks to end, too


def run_program(launcher: str, prepare: Callable[[], None]) -> None:
    """Run the program that the command line names, after `prepare`; a rank that fails ends the job.

    `-m module` and `-c code` are taken, too, as mpi4py.run takes them.  `launcher` is the module that calls this.
    """
    words = command_line(f"usage: python -m {launcher} [-m module | -c code | program.py] [arguments]")
    sys.excepthook = end_job
    mpi = start_mpi()
    barrier = mpi.Comm.Ibarrier  # MPI's own, which `prepare` may replace
    prepare()
    arrive = partial(barrier, mpi.COMM_WORLD.Dup())  # apart from the program's calls
    try:
        run_command_line(words)
    except SystemExit as error:
        end_with_others(error.code, arrive)
        raise


def command_line(usage: str) -> list[str]:
    """Return the program and its arguments, or end here: with help, the version, or why there is no program."""
    words = sys.argv[1:]
    is_help = words[:1] in (["-h"], ["--help"])
    if is_help or not words or (words[0] in ("-m", "-c") and len(words) < 2):
        print(usage, file=sys.stdout if is_help else sys.stderr)
        sys.exit(0 if is_help else 2)
    if words[0] == "--version":
        print(f"handwritten-collectives {__version__}")
        sys.exit(0)
    if words[0] not in ("-m", "-c") and (why := refusal(Path(words[0]))):
        if environment.launched_rank() == 0:
            print(f"error: {words[0]}: {why}; {usage}", file=sys.stderr)
        sys.exit(2)
    return words


def refusal(program: Path) -> str:
    """Return why Python cannot run a file, or a folder or archive with a program in it."""
    if not program.exists():
        return "no such program"
    is_program = program.is_file() or (program / "__main__.py").is_file()
    return "" if is_program else "a folder without a __main__.py"


def end_with_others(code: object, arrive: Callable) -> None:
    """End the job if a rank exits with a failure and others do not exit: MPI's end would wait for them."""
    mpi = start_mpi()
    if code in (None, 0) or mpi.COMM_WORLD.size == 1 or mpi.Is_finalized():
        return
    arrived, deadline_s, backoff = arrive(), time.monotonic() + PATIENCE_S, Backoff()
    while not arrived.Test():
        if time.monotonic() > deadline_s:
            status = code if isinstance(code, int) else 1
            words = "" if isinstance(code, int) else f":\n{code}"
            print(f"rank {mpi.COMM_WORLD.rank} exits with status {status} and ends the job{words}", file=sys.stderr)
            sys.stdout.flush()
            sys.stderr.flush()
            mpi.COMM_WORLD.Abort(status)
        backoff.sleep()
