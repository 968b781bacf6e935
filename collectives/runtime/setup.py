"""The setup of a communicator's parts, and its settings: from arguments, the environment, files and the other ranks."""

from __future__ import annotations

import os
import time
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from mpi4py import MPI

from collectives.algorithms.groups import Topology
from collectives.arrays.memory import Windows, ranks_in
from collectives.job import environment
from collectives.job.launch import dead_ranks, library_name, start_time
from collectives.job.settings import is_a
from collectives.runtime.agreement import Agreement
from collectives.runtime.backends import compiler
from collectives.runtime.backends.message_schedules import bookkeeping
from collectives.runtime.backends.messages import LARGEST_MESSAGE_BYTES
from collectives.runtime.backends.point_to_point import Mailbox
from collectives.runtime.choose import links
from collectives.runtime.choose.auto import Tuning, parse_tuning, read_tuning
from collectives.runtime.choose.network_file import network_tuning
from collectives.runtime.context import Context, Memories
from collectives.runtime.progress import Progress
from collectives.runtime.reports.recorder import Recorder
from collectives.runtime.reports.watchdog import RankProcess, Watchdog
from collectives.schedule.network import NETWORK


def set_up(mpi_comm: MPI.Comm, segment_bytes: int, check: bool | None, timeout_s: float | None) -> Context:
    """Make the parts of a communicator.  Collective.

    Raises: InputError on every rank for a setting that is out of range.
    """
    context = Context(mpi_comm, segment_bytes)
    shared = context.mpi.Split_type(MPI.COMM_TYPE_SHARED)
    context.progress, context.windows = Progress(environment.oversubscribed(shared.size)), Windows()
    context.progress.deaths = partial(dead_ranks, context.mpi)
    agreement = context.agreement = agreement_of(context)
    is_valid = is_a(segment_bytes, int) and 1 <= segment_bytes <= LARGEST_MESSAGE_BYTES
    failure = f"segment_bytes={segment_bytes!r} must be from 1 to {LARGEST_MESSAGE_BYTES}" * (not is_valid)
    agreement.check(f"Communicator(segment_bytes={segment_bytes})", failure)
    context.check, context.timeout_s = settings(agreement, check, timeout_s)
    context.node = node_number(context, shared)
    context.has_numba = has_kernels(context, shared)
    shared.Free()
    set_up_memory(context, mpi_comm)
    context.tuning = tuning_from_file(context)
    context.recorder = recorder(context)
    processes = silent_processes(agreement, context.node)
    if context.timeout_s:
        context.watchdog = Watchdog(
            context.mpi, context.num_tags, context.recorder, context.progress, context.timeout_s
        )
        context.watchdog.processes = processes
    return context


def silent_processes(agreement: Agreement, node: int) -> list[RankProcess]:
    """Return the process of each rank, if all ranks are to kill those that do not answer; else none.  Collective."""
    if not environment.survives_ranks():
        return []
    numbers = node, os.getpid(), start_time(os.getpid()), environment.kills_silent()
    of_ranks = [*zip(*map(agreement.gather_ints, numbers), strict=True)]
    return [RankProcess(*of_rank[:3]) for of_rank in of_ranks if all(kills for *_, kills in of_ranks)]


def survivors(comm: MPI.Comm) -> MPI.Comm:
    """Return a communicator of the ranks that have not died, in their order.  Collective among these.

    Source: the User Level Failure Mitigation chapter proposed for MPI 5, MPI_Comm_revoke, _agree and _shrink: a
    revoked communicator still agrees and shrinks.
    """
    if comm.Get_failed().size and not comm.Is_revoked():
        comm.Revoke()
    while True:
        try:
            comm.Agree(1)
            return comm.Shrink()
        except MPI.Exception:
            comm.Ack_failed()


def set_up_part(parent: Context, mpi_comm: MPI.Comm, color: int) -> Context:
    """Make the parts of a communicator of some of another's ranks, and share that one's.  Collective among these."""
    context = Context(mpi_comm, parent.segment_bytes, parent, color)
    context.progress, context.windows = parent.progress, parent.windows
    context.agreement = agreement_of(context)
    context.check, context.timeout_s, context.node = parent.check, parent.timeout_s, parent.node
    context.has_numba, context.tuning, context.recorder = parent.has_numba, parent.tuning, parent.recorder
    set_up_memory(context, mpi_comm)
    return context


def agreement_of(context: Context) -> Agreement:
    return Agreement(context.size, partial(bookkeeping, context))


def set_up_memory(context: Context, mpi_comm: MPI.Comm) -> None:
    """Find the nodes of the ranks, and set up what these share.  Collective."""
    topology = context.topology = Topology.from_ids(context.agreement.gather_ints(context.node))
    own_node = topology.nodes[topology.node_of[context.rank]]
    context.mailbox = Mailbox(mpi_comm.Dup(), own_node, context.num_tags, context.calls, context.progress)
    context.memory = Memories(context)


def recorder(context: Context) -> Recorder:
    """Return the writer of the last calls, to a folder of this communicator's own.  Collective."""
    (now_ns,) = context.agreement.highest([time.time_ns()])
    now = datetime.fromtimestamp(now_ns / 1e9, UTC)
    folder = environment.calls_folder()
    own = folder and folder / f"{now:%Y-%m-%dT%H-%M-%S.%f}"
    return Recorder(context.rank, context.calls.record, context.progress, own)


def settings(agreement: Agreement, check: bool | None, timeout_s: float | None) -> tuple[bool, float]:
    """Return the settings passed, else those of the environment; refuse invalid ones on all ranks.  Collective."""
    failure = ""
    try:
        check = environment.check() if check is None else check
        timeout_s = environment.timeout_s() if timeout_s is None else timeout_s
        environment.writable_calls_folder()
        if check not in (True, False):
            raise ValueError(f"check={check!r} must be True or False")
        if not (is_a(timeout_s, float) and timeout_s >= 0):
            raise ValueError(f"timeout_s={timeout_s!r} must be seconds, or 0 for no limit")
    except ValueError as error:
        failure = str(error)
    agreement.check(f"Communicator(check={check!r})", failure)
    return bool(check), timeout_s or 0.0


def node_number(context: Context, shared: MPI.Comm) -> int:
    """Return the number of this rank's node: its first rank.  Collective."""
    with context.agreed("Communicator"):
        fake = fake_node(context)
        if shared.size < context.size:
            refuse_unprepared()
    return ranks_in(context.mpi, shared)[0] if fake is None else fake


def refuse_unprepared() -> None:
    """Raise ValueError where ranks of several hosts may die, and MPI has not started with what the others need then."""
    if lacks := environment.lacks_for_survivors():
        raise ValueError(
            f"where ranks of several hosts may die, MPI must have started with {lacks}: pass it to mpirun by -x, or "
            "call collectives.world() before mpi4py.MPI is imported"
        )


def fake_node(context: Context) -> int | None:
    """Return the number of this rank's node by COLLECTIVES_FAKE_NODES, of these ranks or of the job's; None if not set.

    Raises: ValueError if it makes neither.
    """
    fake = environment.fake_nodes()
    if fake is None:
        return None
    for comm in (context.mpi, MPI.COMM_WORLD):
        if fake[0] == -(-comm.size // fake[1]):
            return comm.rank // fake[1]
    raise ValueError(
        f"COLLECTIVES_FAKE_NODES={fake[0]}x{fake[1]} does not make the {context.size} ranks of this job: "
        "change it, or unset it"
    )


def has_kernels(context: Context, shared: MPI.Comm) -> bool:
    """Return whether all ranks can use the compiled kernels; if not, rank 0 prints why.  Collective.

    The first rank of a node compiles them, if need be, and the others find them on disk.
    """
    agreement = context.agreement
    failure = compiler.failure() if shared.rank == 0 else ""
    agreement.highest([0])
    failure = failure or compiler.failure()
    if not any(agreement.highest([bool(failure)])):
        return True
    rank, words = next((rank, words) for rank, words in enumerate(agreement.gather_texts(failure)) if words)
    if context.rank == 0:
        compiler.warn(f"rank {rank} has no compiled kernels, and all data go by messages ({words})")
    return False


def tuning_from_file(context: Context) -> Tuning:
    """Read the file that rank 0's COLLECTIVES_TUNING names; other ranks need not have it.  Collective."""
    agreement, is_first = context.agreement, context.rank == 0
    path = agreement.gather_texts(str(environment.tuning_file() or "") * is_first)[0]
    if not path:
        return tuning_of_hosts(context)
    with context.agreed():
        text = read_tuning(Path(path)) if is_first else ""
    text = agreement.gather_texts(text)[0]
    cores = min(agreement.gather_ints(environment.cores()))
    hosts = context.host_names() if path.endswith(".toml") else []
    with context.agreed():
        nodes = context.topology.nodes
        return network_tuning(text, path, nodes, hosts, cores) if hosts else parse_tuning(text, path)


def tuning_of_hosts(context: Context) -> Tuning:
    """Read the speeds that were measured of these hosts, if rank 0 has them; other ranks need not.  Collective."""
    agreement, is_first = context.agreement, context.rank == 0
    cores = min(agreement.gather_ints(environment.cores()))
    if not max(agreement.gather_ints(is_first and links.any_cached())):
        return Tuning(NETWORK._replace(cores=cores))
    key = links.key_of(context.host_names(), context.topology.nodes, library_name(MPI))
    cached = links.parse(agreement.gather_texts(links.read(key.file) * is_first)[0])
    if cached is None or cached.key != key:
        return Tuning(NETWORK._replace(cores=cores))
    return Tuning(cached.network._replace(cores=cores), measured=cached.measured or "earlier")
