"""How torch finds the ranks of a job: MPI has been told by the launcher."""

import os
import sys
from collections.abc import Iterator
from typing import Any

from torch.distributed.rendezvous import _rendezvous_handlers, register_rendezvous_handler

from collectives import environment
from collectives.job import end_job, other_mpi, start_mpi
from collectives.torch_backend.store import MPIStore

SET_BY_HAND = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE")


def offer_mpi() -> None:
    """Answer init_method="mpi://", and "env://", torch's default, where the environment says nothing."""
    register_rendezvous_handler("mpi", meet)
    by_environment = _rendezvous_handlers["env"]  # torch lets no one register a second

    def either(url: str, **options: Any) -> Iterator[tuple]:
        told = "rank=" in url or any(name in os.environ for name in SET_BY_HAND)
        return by_environment(url, **options) if told else meet(url, **options)

    _rendezvous_handlers["env"] = either


def meet(url: str, **options: Any) -> Iterator[tuple[MPIStore, int, int]]:
    """A store, this rank and the number of ranks, all of MPI's world."""
    mpi = start_mpi()
    if environment.launched_size() > 1 and mpi.COMM_WORLD.size == 1:
        raise other_mpi(mpi)
    if sys.excepthook is sys.__excepthook__:
        sys.excepthook = end_job  # the other ranks would wait for one that has failed
    store = MPIStore(mpi.COMM_WORLD)
    yield store, mpi.COMM_WORLD.rank, mpi.COMM_WORLD.size
