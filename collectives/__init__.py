"""Hand-written collective communication over MPI, on NumPy, CuPy and torch arrays.

    import collectives

    comm = collectives.world()
    comm.all_reduce(x)

The pure half (schedules, algorithms, contract) imports neither MPI nor an array library; the rest is loaded on use.
"""

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collectives.arrays.ops import Op
    from collectives.communicator import Communicator
    from collectives.job.errors import CommunicationError, InputError, RankFailure
    from collectives.runtime.plan import Plan

if os.name != "posix":
    raise ImportError("collectives needs POSIX (mpirun, signals, shared memory): on Windows, install it in WSL")

__all__ = ["CommunicationError", "Communicator", "InputError", "Op", "Plan", "RankFailure", "algorithms", "world"]

HOMES = {
    "algorithms": "collectives.algorithms",
    "CommunicationError": "collectives.job.errors",
    "Plan": "collectives.runtime.plan",
    "Communicator": "collectives.communicator",
    "InputError": "collectives.job.errors",
    "RankFailure": "collectives.job.errors",
    "Op": "collectives.arrays.ops",
    "__version__": "collectives.job.settings",
}


def world() -> "Communicator":
    """Return the communicator of all ranks that the launcher started.

    From here on an exception that nobody catches ends the whole job, with the rank's traceback; an InputError,
    which all ranks raise, ends it with one line of rank 0.

    Raises: InputError for an invalid environment variable, without an MPI library, or where mpirun and mpi4py belong to
    different ones, or srun has not connected the ranks, so that each is alone.
    """
    from collectives.job.launch import start_job

    mpi = start_job()  # before the import below, which needs an MPI library
    from collectives.communicator import Communicator

    return Communicator(mpi.COMM_WORLD)


def __getattr__(name: str) -> Any:
    if name not in HOMES:
        raise AttributeError(f"module 'collectives' has no attribute {name!r}")
    module = import_module(HOMES[name])
    return module if name == "algorithms" else getattr(module, name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
