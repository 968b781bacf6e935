"""torch's rendezvous of the ranks of a job, which MPI knows from the launcher."""

import math
import os
import socket
import sys
import time
from collections.abc import Collection, Iterator, Sequence, Set
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from zlib import crc32

import numpy as np
import torch.distributed as dist
from torch.distributed.rendezvous import _rendezvous_handlers, register_rendezvous_handler

from collectives.job import environment
from collectives.job.backoff import Backoff
from collectives.job.errors import InputError
from collectives.job.launch import dead_ranks, end_job, keep_in_flight, start_mpi

if TYPE_CHECKING:  # torch_backend/__init__.py says why these are not imported with it
    from mpi4py import MPI

    from collectives.communicator import Communicator

SET_BY_HAND = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
NOTHING = [-1, -1]  # RANK and WORLD_SIZE of a rank for which they are not set


def offer_mpi() -> None:
    """Answer init_method="mpi://", and "env://", torch's default, if ranks are not numbered otherwise."""
    register_rendezvous_handler("mpi", rendezvous)
    by_environment = _rendezvous_handlers["env"]  # torch refuses a second registration

    def either(url: str, **options: Any) -> Iterator[tuple]:
        return by_environment(url, **options) if numbered(url) else rendezvous(url, **options)

    _rendezvous_handlers["env"] = either


def numbered(url: str) -> bool:
    """Return whether ranks are numbered by other means than MPI.

    Ranks that mpirun or srun started need no variables, but may have inherited one; they use all four, or MPI.

    Raises: InputError on every rank if they would not all use the same means, or not find each other.
    """
    if "rank=" in url:
        return True
    set_here = [name in os.environ for name in SET_BY_HAND]
    if environment.launched_size() == 1:
        return any(set_here)
    numbers = [int(os.environ[name]) for name in SET_BY_HAND[:2]] if all(set_here) else NOTHING
    every = started_world().allgather(numbers)
    if all(numbers == NOTHING for numbers in every):
        return False
    if (odd := misfit(every)) is not None:
        number, size = ("not set" if value < 0 else value for value in every[odd])
        raise InputError(
            f"MPI has started {len(every)} ranks, and in the environment of its rank {odd} RANK is {number} and "
            f"WORLD_SIZE {size}: unset them, or pass init_method='mpi://'"
        )
    return True


def misfit(every: list[list[int]]) -> int | None:
    """Return the first of MPI's ranks whose number another has, too, or whose number of ranks is not MPI's."""
    free = set(range(len(every)))
    for rank, (number, size) in enumerate(every):
        if size != len(every) or number not in free:
            return rank
        free.remove(number)
    return None


def rendezvous(url: str, **options: Any) -> Iterator[tuple[dist.Store, int, int]]:
    """Yield a store, this rank and the number of ranks, all of MPI's world."""
    world = started_world()
    yield create_store(world), world.rank, world.size


def create_store(comm: "MPI.Comm", timeout: timedelta = timedelta(minutes=5)) -> dist.Store:
    """Create torch's store of keys and values, served by rank 0, whose address and port MPI sends.  Collective."""
    host = address_of_first(comm)
    server = dist.TCPStore(host, 0, None, True, timeout, wait_for_workers=False) if comm.rank == 0 else None
    port = comm.bcast(server and server.port)
    return server or dist.TCPStore(host, port, None, False, timeout, wait_for_workers=False)


def address_of_first(comm: "MPI.Comm") -> str:
    """Return where all ranks reach rank 0's host.  Collective."""
    names = comm.allgather(socket.gethostname())
    return names[0] if len(set(names)) > 1 else "127.0.0.1"


def started_world() -> "MPI.Intracomm":
    """Start MPI's world, which ends the job if a rank fails: the others would wait for it.

    Raises: InputError if the launcher has started ranks that are not connected.
    """
    if sys.excepthook is sys.__excepthook__:
        sys.excepthook = end_job
    return start_mpi().COMM_WORLD


def communicator(world: "MPI.Intracomm", store: dist.Store, rank: int, size: int, name: str) -> "Communicator":
    """Make a communicator of those ranks of MPI's world that use a store, in any order."""
    store.set(f"world rank of {rank}", str(world.rank))
    if rank == 0:
        ranks = store.multi_get([f"world rank of {r}" for r in range(size)])
        store.set("world ranks", b",".join(ranks).decode())
    members = [int(r) for r in store.get("world ranks").split(b",")]
    if len(set(members)) < size:
        raise dist.DistBackendError(
            f"{size} ranks were asked for, but MPI has started {world.size}: start as many with mpirun or srun"
        )
    return part(world, members, name)


def part(of: Any, ranks: Sequence[int], name: str) -> "Communicator":
    """Make a communicator of some ranks of an MPI communicator, which all know them.  Collective among these."""
    from mpi4py import MPI

    from collectives.communicator import Communicator

    group, timeout_s = of.group.Incl(ranks), 0.0  # calls have torch's time limits
    if environment.survives_ranks():
        # Other ranks of the communicator may have died, which Create_group refuses; deaths must be noticed.
        mpi_comm, timeout_s = MPI.Intracomm.Create_from_group(group, name), math.inf
    else:
        mpi_comm = of.Create_group(group, tag_of(name))
    comm = Communicator(mpi_comm, check=True, timeout_s=timeout_s)
    mpi_comm.Free()
    comm.barrier()  # all ranks are here for it
    return comm


def tag_of(name: str) -> int:
    from mpi4py import MPI

    largest: Any = MPI.COMM_WORLD.Get_attr(MPI.TAG_UB)
    return crc32(name.encode()) % largest


def handle_of(rank: int) -> str:
    return f"collectives:{rank}"


def ranks_of(handles: Collection[str]) -> list[int]:
    """Return the ranks of MPI's world with some handles, in their order; those of a set, in MPI's.

    Raises: DistBackendError for a handle of no rank of the job, one that is there twice, and without this rank's own.
    """
    from mpi4py import MPI

    world = {handle_of(rank): rank for rank in range(MPI.COMM_WORLD.size)}
    if other := [handle for handle in handles if handle not in world]:
        raise dist.DistBackendError(f"{other[0]!r} is not a handle of this job's {len(world)} ranks")
    ranks = [world[handle] for handle in handles]
    if len({*ranks}) < len(ranks) or MPI.COMM_WORLD.rank not in ranks:
        own = handle_of(MPI.COMM_WORLD.rank)
        raise dist.DistBackendError(f"the handles {[*handles]} must have {own!r} and others, each once")
    return sorted(ranks) if isinstance(handles, Set) else ranks


def wait_for_all(ranks: Sequence[int], uuid: int, limit_s: float) -> None:
    """Wait until these ranks of MPI's world are here, for the same ranks in the same order.

    By messages, as rank 0, which serves the store, may have died.  Each rank sends its own twice, the second once all
    have come: one that comes after another's limit is not left to wait for it.

    Raises: DistBackendError with the ranks that do not come in time, have died, or come for others.
    """
    own = np.array([crc32(str([*ranks]).encode())])
    for _ in range(2):
        for rank, word in exchanged(own, ranks, tag_of(f"reconfigure {uuid}"), limit_s).items():
            if word != own:
                raise dist.DistBackendError(f"MPI's rank {rank} comes for other ranks than {[*ranks]}")


def exchanged(own: np.ndarray, ranks: Sequence[int], tag: int, limit_s: float) -> dict[int, np.ndarray]:
    """Return the numbers of the other ranks of MPI's world, which get this one's."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    theirs = {rank: np.zeros_like(own) for rank in ranks if rank != world.rank}
    arrivals, sent = {}, []
    backoff, deadline_s = Backoff(), time.monotonic() + limit_s
    try:
        arrivals = {rank: world.Irecv(word, rank, tag) for rank, word in theirs.items()}
        sent = [world.Isend(own, rank, tag) for rank in theirs]
        while late := [rank for rank, arrival in arrivals.items() if not arrival.Test()]:
            if time.monotonic() > deadline_s:
                raise dist.DistBackendError(f"MPI's ranks {late} are not here within {limit_s:g} s")
            backoff.sleep()
    except MPI.Exception as error:
        raise dist.DistBackendError(f"{dead_ranks() or error}: pass the handles of the ranks that are left") from None
    finally:
        keep_in_flight(request for request in (*arrivals.values(), *sent) if request != MPI.REQUEST_NULL)
    return theirs
