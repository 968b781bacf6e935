"""Our collectives in place of mpi4py's own, in an unmodified mpi4py program.

    mpirun -n 4 python -m collectives.mpi4py program.py

`wrap(comm)` does it for one communicator.  The library keeps calls in lower case, on intercommunicators, of
user-defined ops and of MAXLOC and MINLOC, and `Barrier`, `Reduce`, `Gather`, `Exscan`, at which it is as fast, and
`Alltoallv`, `Alltoallw`, `Gatherv` and `Scatterv`.

The choice between the library and us must be the same on all ranks, or they would wait for each other for ever.  So it
depends only on facts that are the same on all ranks of a correct program:

- the method, the communicator, and the call's number there;
- in reductions, op, count and the datatype's kind and width, which MPI requires to be the same;
- in other collectives, the bytes that a rank sends another, which MPI requires to be those that the other expects;
- rank 0's settings, and agreements of our communicators when they were set up.

It does not depend on facts that may differ: the layout, place and type of data, or their array library.  A rank whose
data are not contiguous packs and unpacks them on its own.  Where no rank knows all lengths, as in `Alltoallv`, no
decision is possible.  A call that the library refuses on a rank goes to the library there, and raises mpi4py's error.
"""

from typing import Any


def wrap(comm: Any) -> Any:
    """Replace an intracommunicator's collectives by ours where these are faster, and return it.  Collective.

    Raises: LoneInputError on the ranks that call it if others do not.
    """
    from collectives.mpi4py.methods import communicators
    from collectives.mpi4py.policy import agree

    communicators().add(comm, agree(comm))
    return comm
