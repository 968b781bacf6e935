"""Our collectives in the place of mpi4py's own, in a program that knows only mpi4py.

    mpirun -n 4 python -m collectives.mpi4py program.py

`wrap(comm)` does it for one communicator.  What the library keeps: calls in lower case, on intercommunicators, of
user-defined ops and of MAXLOC and MINLOC, and `Alltoallv`, `Alltoallw`, `Gatherv` and `Scatterv`.

Who does a call, the library or we, must be the same on all ranks, or they would wait for each other for ever.  So it
follows only from what a correct program has alike on all of them:

- the method, the communicator, and which of its calls it is;
- in reductions, op, count and the datatype's kind and width, which MPI demands to be the same;
- in the other collectives, how many bytes a rank sends another, which MPI demands to be what the other expects;
- rank 0's settings, and what our communicators agreed on when they were set up.

It does not follow from what may differ: how data lie in memory, where, by which type, or which array library has them.
A rank whose data do not lie as one run of bytes packs and unpacks them on its own.  Where no rank knows all lengths, as
in `Alltoallv`, nothing could be decided.  A call that the library refuses on a rank goes to the library there, and
raises what mpi4py raises.
"""

from typing import Any


def wrap(comm: Any) -> Any:
    """Have an intracommunicator's collectives be ours where they are faster, and return it.  Collective.

    Raises: LoneInputError on the ranks that call it where others do not.
    """
    from collectives.mpi4py import start

    return start.wrap(comm)
