"""The ranks that take part in calls.  Horovod has one job per process, stored here: `global_process_set`."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import count
from operator import index
from typing import TYPE_CHECKING, Any

from collectives import world
from collectives.horovod.matching import MatchedCalls
from collectives.job.launch import start_mpi

if TYPE_CHECKING:
    from collectives.communicator import Communicator


class ProcessSet:
    """Ranks that make calls among themselves, from `init` or `add_process_set` on.

    `ranks_or_comm` are numbers of ranks, or a communicator of mpi4py.  Ranks are numbered as in the job, by
    `root_rank`, too; `rank()` alone counts within the set.
    """

    process_set_id: int | None = None
    calls: MatchedCalls | None = None  # only on its ranks

    def __init__(self, ranks_or_comm: Any):
        self.mpi_comm = None if isinstance(ranks_or_comm, Iterable) else ranks_or_comm
        self.ranks: list[int] | None = None
        try:
            if self.mpi_comm is None:
                self.ranks = sorted(map(index, ranks_or_comm))
            else:
                self.mpi_comm.Get_group()
        except (TypeError, AttributeError):
            what = "pass a list of ranks, or a communicator of mpi4py"
            raise ValueError(f"ProcessSet({ranks_or_comm!r}): {what}") from None

    def size(self) -> int | None:
        """Return the number of its ranks; None before it is added."""
        return None if self.process_set_id is None else len(self.ranks or ())

    def rank(self) -> int | None:
        """Return the number of this rank within it; None before it is added.

        Raises: ValueError on other ranks.
        """
        return None if self.process_set_id is None else self.matched.comm.rank

    def included(self) -> bool | None:
        """Return whether this rank is in it; None while its ranks are not known."""
        return None if self.ranks is None else job().rank in self.ranks

    @property
    def matched(self) -> MatchedCalls:
        """Its calls.  Raises: ValueError if there are none."""
        if self.calls is None:
            rank = job().rank
            why = "add it: hvd.add_process_set" if self.process_set_id is None else f"rank {rank} is not in it"
            raise ValueError(f"{self}: {why}")
        return self.calls

    def __str__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks})"

    def _open(self, number: int, comm: Communicator | None) -> None:
        self.process_set_id, self.calls = number, MatchedCalls(comm, is_part=number > 0) if comm else None

    def _close(self) -> None:
        if self.calls is not None:
            self.calls.free()
        self.process_set_id = self.calls = None


global_process_set = ProcessSet(())
process_sets: list[ProcessSet] = []  # added so far
numbers = count(1)


def job() -> Communicator:
    """Return the communicator of all ranks.  Raises: ValueError before `init`."""
    if global_process_set.calls is None:
        raise ValueError("no job: call hvd.init() first")
    return global_process_set.calls.comm


def is_initialized() -> bool:
    return global_process_set.calls is not None


def init(comm: Any = None, process_sets: Any = None) -> None:
    """Start the job: of all ranks, or of those of a communicator of mpi4py.  Collective.

    `process_sets` are added.
    """
    if is_initialized():
        return
    if comm is not None and not isinstance(comm, start_mpi().Comm):
        raise ValueError(f"comm={comm!r}: pass a communicator of mpi4py, and process_sets=[...] for some of the ranks")
    from collectives.communicator import Communicator  # imports mpi4py.MPI, which the program may do itself before

    every = world() if comm is None else Communicator(comm)
    global_process_set.ranks = list(range(every.size))
    global_process_set._open(0, every)
    for process_set in () if process_sets in (None, "dynamic") else process_sets:
        add_process_set(process_set)


def shutdown() -> None:
    """End the job.  Collective."""
    for process_set in (*process_sets, global_process_set):
        process_set._close()
    process_sets.clear()


def add_process_set(process_set: Any) -> ProcessSet:
    """Add ranks that are to make calls among themselves.  Collective over all ranks of the job."""
    comm = job()
    added = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    if added.mpi_comm is not None:
        group = added.mpi_comm.Get_group()
        added.ranks = sorted(type(group).Translate_ranks(group, range(group.size), comm.mpi.Get_group()))
    comm.compare(f"add_process_set({added.ranks})", refusal(added, comm.size))
    added._open(next(numbers), comm.split(0 if comm.rank in (added.ranks or ()) else None))
    process_sets.append(added)
    return added


def refusal(process_set: ProcessSet, size: int) -> str:
    ranks = process_set.ranks or []
    if process_set.process_set_id is not None or any(
        each.ranks == ranks for each in (global_process_set, *process_sets)
    ):
        return f"process set of ranks {ranks} has been added before: use that one"
    if not ranks or len({*ranks}) < len(ranks) or not 0 <= ranks[0] <= ranks[-1] < size:
        return f"process set of ranks {ranks}: pass one or more, each once, from 0 to {size - 1}"
    return ""


def remove_process_set(process_set: ProcessSet) -> bool:
    """Remove a process set; return whether there was one to remove.  Collective over all ranks of the job."""
    if process_set not in process_sets:
        return False
    job().compare(f"remove_process_set({process_set.ranks})")
    process_sets.remove(process_set)
    process_set._close()
    return True


def rank() -> int:
    return job().rank


def size() -> int:
    return job().size


def node() -> tuple[int, ...]:
    """Return the ranks of this rank's node."""
    topology = job().topology
    return topology.nodes[topology.node_of[rank()]]


def local_rank() -> int:
    """Return this rank's number within its node."""
    return node().index(rank())


def local_size() -> int:
    return len(node())


def cross_ranks() -> list[int]:
    """Return the ranks with this rank's number within their nodes."""
    return [ranks[local_rank()] for ranks in job().topology.nodes if len(ranks) > local_rank()]


def cross_rank() -> int:
    """Return the number of this rank's node, among those with so many ranks."""
    return cross_ranks().index(rank())


def cross_size() -> int:
    return len(cross_ranks())


def is_homogeneous() -> bool:
    """Return whether all nodes have equally many ranks."""
    return len({len(ranks) for ranks in job().topology.nodes}) == 1
