"""Run a program that uses mpi4py with our collectives: `python -m collectives.mpi4py program.py args`."""

import sys

from collectives.job import environment
from collectives.job.errors import InputError, LoneInputError
from collectives.job.launch import start_mpi
from collectives.job.program import run_program


def replace_collectives() -> None:
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


run_program("collectives.mpi4py", replace_collectives)
