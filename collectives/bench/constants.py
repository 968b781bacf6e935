"""Measures the constants of the cost model's `Network`."""

from collections.abc import Callable

import numpy as np

from collectives import arrays, environment
from collectives.bench.timing import medians, nothing
from collectives.communicator import Communicator
from collectives.cost import NETWORK, Link, Network
from collectives.executor import SEGMENT_BYTES

ROUND_TRIPS = 10  # timed as one
SMALL_BYTES, LARGE_BYTES = 8, 16 << 20  # of messages
VECTOR_BYTES = 16 << 20  # that are folded or copied: more than cores cache
LEAST_S = 1e-15  # for a byte, where noise says less than nothing

Timer = Callable[[Callable[[], None]], float]


def measure(comm: Communicator, repeats: int, warmups: int) -> Network:
    """The machine's speeds; the default of what these ranks cannot show, as one node cannot show links between nodes.

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
        network = network._replace(within=ping_pong(comm, timer, *near[:2]))
    if len(nodes) > 1:
        network = network._replace(between=ping_pong(comm, timer, nodes[0][0], nodes[1][0]))
    return network


def ping_pong(comm: Communicator, timer: Timer, a: int, b: int) -> Link:
    """Small and large messages between two ranks, back and forth, while the others do nothing."""
    small, large = (one_way(comm, timer, a, b, nbytes) for nbytes in (SMALL_BYTES, LARGE_BYTES))
    return Link(small, max(LEAST_S, (large - small) / (LARGE_BYTES - SMALL_BYTES)))


def one_way(comm: Communicator, timer: Timer, a: int, b: int, nbytes: int) -> float:
    x = np.zeros(nbytes, np.uint8)

    def exchange() -> None:
        for _ in range(ROUND_TRIPS):
            if comm.rank == a:
                comm.send(x, b)
                comm.recv(x, b)
            elif comm.rank == b:
                comm.recv(x, a)
                comm.send(x, a)

    return timer(exchange) / (2 * ROUND_TRIPS)


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
    meet = node.plan("barrier", algorithm="direct")
    seconds = timer(meet)
    meet.free()
    node.free()
    return seconds
