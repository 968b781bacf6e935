"""Measure the constants of the cost model's `Network`, and keep them for later jobs on the same hosts.

mpirun -n 4 python -m collectives.bench.constants
"""

if __name__ == "__main__":  # ahead of what imports MPI
    from collectives import job

    job.begin()

import json
from collections.abc import Callable, Sequence

import numpy as np
from mpi4py import MPI

import collectives
from collectives import arrays, environment, links
from collectives.bench.timing import medians, nothing
from collectives.communicator import Communicator
from collectives.cost import NETWORK, Link, Network
from collectives.executor import SEGMENT_BYTES
from collectives.job import library_name
from collectives.plan import Plan
from collectives.tuning import network_to_json

REPEATS, WARMUPS = 15, 2
VECTOR_BYTES = 16 << 20  # that are folded, copied or sent in a node: more than cores cache
SHORT_BYTES = 8
FAR_BYTES = 4 << 20  # of a long message to another node
PING_PONGS = 10  # that are timed as one
MEETINGS = 10  # that are timed as one
LEAST_S = 1e-15  # for a byte, where noise says less than nothing

Timer = Callable[[Callable[[], None]], float]


def main() -> None:
    comm = collectives.world()
    network = speeds(comm, REPEATS, WARMUPS)
    where = keep(comm, network)
    if comm.rank == 0:
        print(json.dumps(network_to_json(network), indent=1), where, sep="\n")


def measure(comm: Communicator, repeats: int, warmups: int) -> Network:
    """The machine's speeds, kept for later jobs on these hosts.  Collective; every rank gets the same.

    Rank 0 says so where they can't be believed, and so are not kept.
    """
    network = speeds(comm, repeats, warmups)
    where = keep(comm, network)
    if comm.rank == 0 and links.doubt(network):
        print(f"# links: {where}", flush=True)
    return network


def keep(comm: Communicator, network: Network) -> str:
    """Where rank 0 keeps the speeds, or why not.  Collective."""
    place = links.place(comm.host_names(), comm.topology.nodes, library_name(MPI))
    return links.keep(links.Kept(place, network)) if comm.rank == 0 else ""


def speeds(comm: Communicator, repeats: int, warmups: int) -> Network:
    """What these ranks can show, and defaults for the rest, as one node cannot show links between nodes.

    Collective; every rank gets the same.
    """

    def timer(action: Callable[[], None]) -> float:
        return medians(comm, [action], repeats, warmups)[0]

    nodes = comm.topology.nodes
    cores = int(comm.all_reduce(np.array([environment.cores()]), op="min")[0])
    has_core = nodes[comm.topology.node_of[comm.rank]].index(comm.rank) < cores
    crowd = max(1.0, max(map(len, nodes)) / cores)  # meetings are of all ranks, and the model multiplies by this
    network = NETWORK._replace(
        gamma_s_per_byte=fold_rate(timer, has_core),
        copy_s_per_byte=copy_rate(timer, has_core),
        meet_s=meeting(comm, timer) / crowd,
        cores=cores,
    )
    if near := next((node for node in nodes if len(node) > 1), None):
        network = network._replace(within=tried(comm, timer, [near[:2]], VECTOR_BYTES))
    if len(nodes) > 1:
        between, nic = between_nodes(comm, timer, nodes)
        network = network._replace(between=between, nic=nic)
    return network


def between_nodes(comm: Communicator, timer: Timer, nodes: Sequence[Sequence[int]]) -> tuple[Link, Link | None]:
    """One pair of ranks of each two nodes; and as many as there are, from which follows what each costs the others."""
    all_pairs = [list(zip(*two, strict=False)) for two in zip(nodes[::2], nodes[1::2], strict=False)]
    alone = tried(comm, timer, [pairs[0] for pairs in all_pairs], FAR_BYTES)
    most = min(map(len, all_pairs))
    if most == 1:
        return alone, None
    together = tried(comm, timer, [pair for pairs in all_pairs for pair in pairs[:most]], FAR_BYTES)
    more = [(b - a) / (most - 1) for a, b in zip(alone, together, strict=True)]
    return alone, Link(*(min(max(LEAST_S, m), a) for m, a in zip(more, alone, strict=True)))


def tried(comm: Communicator, timer: Timer, pairs: Sequence[Sequence[int]], long_bytes: int) -> Link:
    """Messages between the ranks of each pair, all pairs at once, while the others do nothing.

    A short one goes back and forth.  Long ones meet on their way: in collectives, too, ranks send and receive at once.
    """
    number = {rank: nth for nth, pair in enumerate(pairs) for rank in pair}
    pair = comm.split(number.get(comm.rank), key=0)
    found = link(ping_pong(pair, timer), exchange(pair, timer, long_bytes), long_bytes)
    if pair is not None:
        pair.free()
    return found


def link(short_s: float, long_s: float, long_bytes: int) -> Link:
    """By the times of a short message and of a long one.

    >>> found = link(3e-6, 1.003e-3, 1 << 20)
    >>> print(f"{found.alpha_s:.1e} {found.beta_s_per_byte:.1e}")
    3.0e-06 9.5e-10
    """
    return Link(short_s, max(LEAST_S, (long_s - short_s) / long_bytes))


def ping_pong(pair: Communicator | None, timer: Timer) -> float:
    """Seconds of a short message that goes back and forth; on ranks of no pair, the others' seconds."""
    x = np.zeros(SHORT_BYTES, np.uint8)
    plans = [pair.plan("broadcast", x, root=root, algorithm="binomial") for root in (0, 1)] if pair else []
    return repeated(plans, timer, PING_PONGS) / 2


def exchange(pair: Communicator | None, timer: Timer, nbytes: int) -> float:
    """Seconds of two messages that meet on their way; on ranks of no pair, the others' seconds."""
    x, out = np.zeros((2, 2 * nbytes), np.uint8)
    return repeated([pair.plan("all_to_all", x, out=out, algorithm="pairwise")] if pair else [], timer, 1)


def repeated(plans: Sequence[Plan], timer: Timer, times: int) -> float:
    """Seconds to run the plans once, of so many times that are timed as one."""

    def run() -> None:
        for _ in range(times):
            for plan in plans:
                plan()

    seconds = timer(run) / times
    for plan in plans:
        plan.free()
    return seconds


def fold_rate(timer: Timer, has_core: bool) -> float:
    """Seconds a byte, in the executor's way: segments that arrive in one small buffer are added to a long vector.

    As many ranks of a node as it has cores do so at once.
    """
    vector, arrived = np.zeros(VECTOR_BYTES // 4, np.float32), np.ones(SEGMENT_BYTES // 4, np.float32)
    device = arrays.device("cpu")

    def fold() -> None:
        for own in np.split(vector, len(vector) // len(arrived)):
            device.fold("sum", arrived, own, own)

    return timer(fold if has_core else nothing) / VECTOR_BYTES


def copy_rate(timer: Timer, has_core: bool) -> float:
    """Seconds a byte, from one long vector to another, by as many ranks of a node as it has cores."""
    source, target = np.ones(VECTOR_BYTES, np.uint8), np.zeros(VECTOR_BYTES, np.uint8)
    device = arrays.device("cpu")
    return timer((lambda: device.copy(target, source)) if has_core else nothing) / VECTOR_BYTES


def meeting(comm: Communicator, timer: Timer) -> float:
    """Seconds for the ranks of a node to meet, on all nodes at once."""
    node = comm.split(comm.topology.node_of[comm.rank])
    assert node is not None
    seconds = repeated([node.plan("barrier", algorithm="direct")], timer, MEETINGS)
    node.free()
    return seconds


if __name__ == "__main__":
    main()
