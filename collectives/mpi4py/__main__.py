"""Run a program that uses mpi4py with our collectives: `python -m collectives.mpi4py program.py args`.

`-m module` and `-c code` are taken, too, as mpi4py.run takes them.
"""

import sys
from pathlib import Path

from mpi4py.run import run_command_line

from collectives.job import environment
from collectives.job.errors import InputError, LoneInputError
from collectives.job.launch import end_job, start_mpi
from collectives.job.settings import __version__

USAGE = "usage: python -m collectives.mpi4py [-m module | -c code | program.py] [arguments]"


def main() -> None:
    words = sys.argv[1:]
    is_help = words[:1] in (["-h"], ["--help"])
    if is_help or not words or (words[0] in ("-m", "-c") and len(words) < 2):
        print(USAGE, file=sys.stdout if is_help else sys.stderr)
        sys.exit(0 if is_help else 2)
    if words[0] == "--version":
        print(f"handwritten-collectives {__version__}")
        sys.exit(0)
    if words[0] not in ("-m", "-c") and (why := refusal(Path(words[0]))):
        if environment.launched_rank() == 0:
            print(f"error: {words[0]}: {why}; {USAGE}", file=sys.stderr)
        sys.exit(2)
    sys.excepthook = end_job
    mpi = start_mpi()
    from collectives.mpi4py.methods import communicators
    from collectives.mpi4py.policy import agree

    try:
        communicators().add_all(agree(mpi.COMM_WORLD))
    except LoneInputError as error:  # the other ranks do not wait for these
        print(f"error: {error}", file=sys.stderr, flush=True)
        mpi.COMM_WORLD.Abort(2)
    if refusals := [*filter(None, mpi.COMM_WORLD.allgather(environment.refusal()))]:
        raise InputError(refusals[0])
    run_command_line(words)


def refusal(program: Path) -> str:
    """Return why Python cannot run a file, or a folder or archive with a program in it."""
    if not program.exists():
        return "no such program"
    is_program = program.is_file() or (program / "__main__.py").is_file()
    return "" if is_program else "a folder without a __main__.py"


main()
