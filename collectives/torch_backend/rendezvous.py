"""How torch finds the ranks of a job: MPI has been told by the launcher."""

import os
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
from mpi4py import MPI
from torch.distributed.rendezvous import _rendezvous_handlers, register_rendezvous_handler

from collectives.communicator import Communicator
from collectives.job import environment
from collectives.job.errors import InputError
from collectives.job.launch import end_job, other_mpi, start_mpi
from collectives.torch_backend.store import MPIStore

SET_BY_HAND = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
NOTHING = [-1, -1]  # RANK and WORLD_SIZE that a rank has not been told


def offer_mpi() -> None:
    """Answer init_method="mpi://", and "env://", torch's default, where nobody else numbers the ranks."""
    register_rendezvous_handler("mpi", meet)
    by_environment = _rendezvous_handlers["env"]  # torch lets no one register a second

    def either(url: str, **options: Any) -> Iterator[tuple]:
        return by_environment(url, **options) if numbered(url) else meet(url, **options)

    _rendezvous_handlers["env"] = either


def numbered(url: str) -> bool:
    """Whether ranks have their numbers from elsewhere than MPI.

    Ranks that mpirun or srun started need none, and may have inherited a variable; they go by all four, or by MPI.

    Raises: InputError on every rank where they would not all go the same way, or not meet there.
    """
    if "rank=" in url:
        return True
    set_here = [name in os.environ for name in SET_BY_HAND]
    if environment.launched_size() == 1:
        return any(set_here)
    every = told_to_all([int(os.environ[name]) for name in SET_BY_HAND[:2]] if all(set_here) else NOTHING)
    if all(told == NOTHING for told in every):
        return False
    if odd := misfits(every):
        number, size = ("not set" if value < 0 else value for value in every[odd[0]])
        raise InputError(
            f"MPI has started {len(every)} ranks, and in the environment of its rank {odd[0]} RANK is {number} and "
            f"WORLD_SIZE {size}: unset them, or pass init_method='mpi://'"
        )
    return True


def misfits(every: list[list[int]]) -> list[int]:
    """Those of MPI's ranks whose number another has, too, or whose number of ranks is not MPI's."""
    count = len(every)
    free = set(range(count))
    odd = []
    for rank, (number, size) in enumerate(every):
        if size != count or number not in free:
            odd.append(rank)
        free.discard(number)
    return odd


def told_to_all(told: list[int]) -> list[list[int]]:
    """What each rank has been told.  Collective."""
    comm = Communicator(started_world())
    every = comm.all_gather(np.array(told))
    comm.free()
    return every.reshape(-1, len(told)).tolist()


def meet(url: str, **options: Any) -> Iterator[tuple[MPIStore, int, int]]:
    """A store, this rank and the number of ranks, all of MPI's world."""
    world = started_world()
    store = MPIStore(world)
    yield store, world.rank, world.size


def started_world() -> MPI.Intracomm:
    """MPI's world, whose job ends if a rank fails: the others would wait for it.

    Raises: InputError where the launcher has started ranks that do not know of each other.
    """
    mpi = start_mpi()
    if sys.excepthook is sys.__excepthook__:
        sys.excepthook = end_job
    if environment.launched_size() > 1 and mpi.COMM_WORLD.size == 1:
        raise other_mpi(mpi)
    return mpi.COMM_WORLD
