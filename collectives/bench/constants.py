"""Measure the constants of the cost model's `Network`, and keep them for later jobs on the same hosts."""

import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
from mpi4py import MPI

from collectives.arrays import views
from collectives.bench.trial import RANK_TIMES
from collectives.communicator import Communicator
from collectives.job import environment
from collectives.job.launch import library_name
from collectives.runtime.backends.messages import SEGMENT_BYTES
from collectives.runtime.choose import links
from collectives.runtime.plan import Plan
from collectives.schedule.network import NETWORK, Link, Network

VECTOR_BYTES = 16 << 20  # reduced, copied or sent in a node: more than caches hold
CACHED_BYTES = 1 << 18  # less than that
SHORT_BYTES = 8
FAR_BYTES = 4 << 20  # of a long message to another node
PING_PONGS, BARRIERS, RUNS = 10, 10, 10  # timed as one
ROUNDS = 3  # of which two must agree
LEAST_S = 1e-15  # for a byte, where noise makes a difference negative

Action = Callable[[], Any]
Timer = Callable[[Action], float]


def samples(
    comm: Communicator, actions: Sequence[Action], repeats: int, warmups: int, rank_time: str = "slowest rank"
) -> np.ndarray:
    """Measure seconds by repeat and action, reduced over the ranks as `RANK_TIMES` defines.  Collective.

    Actions take turns, so that a change of the machine's speed hits all alike, each after a barrier.
    """
    barrier = comm.plan("barrier")
    times = np.zeros((warmups + repeats, len(actions)))
    for turn in times:
        for index, action in enumerate(actions):
            barrier()
            begin = time.perf_counter()
            action()
            turn[index] = time.perf_counter() - begin
    barrier.free()
    op = RANK_TIMES[rank_time]
    return (comm.all_reduce(times, op=op) if op else comm.broadcast(times))[warmups:]


def medians(comm: Communicator, actions: Sequence[Action], repeats: int, warmups: int) -> list[float]:
    """Measure the median over the repeats of the slowest rank's seconds, for each action.  Collective."""
    return np.median(samples(comm, actions, repeats, warmups), axis=0).tolist()


def measure(comm: Communicator, repeats: int, warmups: int) -> Network:
    """Measure the machine's speeds, and keep them for later jobs on these hosts.  Collective; the same on all ranks.

    They are measured in several rounds.  Where these do not agree, or the speeds are implausible, as on a machine that
    others use, rank 0 says so, and they are not kept.
    """
    rounds = [speeds(comm, math.ceil(repeats / ROUNDS), warmups) for _ in range(ROUNDS)]
    network, why_not = links.combine(rounds)
    where = save(comm, network, why_not)
    if comm.rank == 0 and why_not:
        print(f"# links: {where}", flush=True)
    return network


def save(comm: Communicator, network: Network, why_not: str = "") -> str:
    """Write the speeds on rank 0, and return the path, or why they are not written.  Collective."""
    key = links.key_of(comm.host_names(), comm.topology.nodes, library_name(MPI))
    return links.save(links.CachedLinks(key, network), why_not) if comm.rank == 0 else ""


def speeds(comm: Communicator, repeats: int, warmups: int) -> Network:
    """Measure the speeds that these ranks can show; others are defaults, as links between nodes on one node.

    Collective; every rank gets the same.
    """

    def timer(action: Action) -> float:
        return medians(comm, [action], repeats, warmups)[0]

    nodes = comm.topology.nodes
    cores = int(comm.all_reduce(np.array([environment.cores()]), op="min")[0])
    has_core = nodes[comm.topology.node_of[comm.rank]].index(comm.rank) < cores
    oversubscription = max(1.0, max(map(len, nodes)) / cores)  # by which the model multiplies
    network = NETWORK._replace(
        gamma_s_per_byte=reduction_s_per_byte(timer, has_core),
        copy_s_per_byte=copy_s_per_byte(timer, has_core),
        meet_s=barrier_s(comm, timer) / oversubscription,
        cores=cores,
    )
    if pair := next((node[:2] for node in nodes if len(node) > 1), None):
        system, staged = access_speeds(comm, pair, repeats, warmups)
        within = link_of_pairs(comm, timer, [pair], VECTOR_BYTES)
        system = system._replace(alpha_s=system.alpha_s / oversubscription)
        network = network._replace(within=within, system=system, staged_s_per_byte=staged)
    if len(nodes) > 1:
        between, nic = between_nodes(comm, timer, nodes)
        network = network._replace(between=between, nic=nic)
    return network


def between_nodes(comm: Communicator, timer: Timer, nodes: Sequence[Sequence[int]]) -> tuple[Link, Link | None]:
    """Measure one pair of ranks of each two nodes, then all pairs at once, for the rate of their nodes' links."""
    all_pairs = [list(zip(*two, strict=False)) for two in zip(nodes[::2], nodes[1::2], strict=False)]
    alone = link_of_pairs(comm, timer, [pairs[0] for pairs in all_pairs], FAR_BYTES)
    most = min(map(len, all_pairs))
    if most == 1:
        return alone, None
    at_once = link_of_pairs(comm, timer, [pair for pairs in all_pairs for pair in pairs[:most]], FAR_BYTES)
    more_s = (at_once.alpha_s - alone.alpha_s) / (most - 1)
    rate = min(at_once.beta_s_per_byte / most, alone.beta_s_per_byte)
    return alone, Link(min(max(LEAST_S, more_s), alone.alpha_s), rate)


def link_of_pairs(comm: Communicator, timer: Timer, pairs: Sequence[Sequence[int]], long_bytes: int) -> Link:
    """Measure messages between the ranks of each pair, all pairs at once, while the others do nothing.

    A short message goes back and forth.  Long ones go both ways at once, as in collectives.
    """
    number = {rank: nth for nth, pair in enumerate(pairs) for rank in pair}
    pair = comm.split(number.get(comm.rank), key=0)
    short, (x, out) = np.zeros(SHORT_BYTES, np.uint8), np.zeros((2, 2 * long_bytes), np.uint8)
    ping_pong, exchange = [], []
    if pair is not None:
        ping_pong = [pair.plan("broadcast", short, root=root, algorithm="binomial") for root in (0, 1)]
        exchange = [pair.plan("all_to_all", x, out=out, algorithm="pairwise")]
    short_s, long_s = time_plans(ping_pong, timer, PING_PONGS) / 2, time_plans(exchange, timer, 1)
    if pair is not None:
        pair.free()
    return link(short_s, long_s, long_bytes)


def access_speeds(comm: Communicator, ranks: Sequence[int], repeats: int, warmups: int) -> tuple[Link, float]:
    """Measure what access to another rank's memory costs more than to symmetric memory that nobody writes.

    Returns what a barrier and a byte cost more through the system, and a byte of a staging buffer, in which it has just
    been written.  Two ranks broadcast, while the others do nothing, each array many times in a row, as calls and system
    calls are several times slower at first.  Where the system denies the access, the result is the least cost, which no
    choice then uses.
    """
    pair = comm.split(0 if comm.rank in ranks else None)
    plans: list[Plan] = []
    if pair is not None:
        arrays = [make(n, np.uint8) for n in (SHORT_BYTES, VECTOR_BYTES) for make in (np.ones, pair.empty)]
        cached = pair.empty(CACHED_BYTES, np.uint8)
        with suppress(ValueError):
            plans = [pair.plan("broadcast", array, algorithm="direct") for array in (*arrays, cached)]
            plans.append(pair.plan("broadcast", cached, algorithm="staged"))
    times = medians(comm, [partial(run_often, plan) for plan in plans] or [int] * 6, repeats, warmups)
    short_s, symmetric_short_s, long_s, symmetric_s, cached_s, staged_s = (time_s / RUNS for time_s in times)
    for plan in plans:
        plan.free()
    if pair is not None:
        pair.free()
    barrier_s, run_s = (short_s - symmetric_short_s) / 2, long_s - symmetric_s  # a broadcast has two barriers
    system = Link(max(LEAST_S, barrier_s), max(LEAST_S, 2 * run_s / VECTOR_BYTES))  # and each rank copies a half
    written_s = staged_s - symmetric_short_s - 2 * (cached_s - symmetric_short_s)  # staged, each copies all of it
    return system, max(LEAST_S, written_s / CACHED_BYTES)


def run_often(plan: Plan) -> None:
    for _ in range(RUNS):
        plan()


def link(short_s: float, long_s: float, long_bytes: int) -> Link:
    """Compute a link from the times of a short message and of a long one.

    >>> alpha_s, beta_s_per_byte = link(3e-6, 1.003e-3, 1 << 20)
    >>> print(f"{alpha_s:.1e} {beta_s_per_byte:.1e}")
    3.0e-06 9.5e-10
    """
    return Link(short_s, max(LEAST_S, (long_s - short_s) / long_bytes))


def time_plans(plans: Sequence[Plan], timer: Timer, times: int) -> float:
    """Measure the seconds to run the plans once, from so many runs timed as one; then free them."""

    def run() -> None:
        for _ in range(times):
            for plan in plans:
                plan()

    seconds = timer(run) / times
    for plan in plans:
        plan.free()
    return seconds


def reduction_s_per_byte(timer: Timer, has_core: bool) -> float:
    """Measure as the executor reduces: segments that arrive in one small buffer are added to a long vector.

    As many ranks of a node as it has cores do so at once.
    """
    vector, arrived = np.zeros(VECTOR_BYTES // 4, np.float32), np.ones(SEGMENT_BYTES // 4, np.float32)
    device = views.device("cpu")

    def reduce() -> None:
        for own in np.split(vector, len(vector) // len(arrived)):
            device.reduce("sum", arrived, own, own)

    return timer(reduce if has_core else lambda: None) / VECTOR_BYTES


def copy_s_per_byte(timer: Timer, has_core: bool) -> float:
    """Measure copies from one long vector to another, by as many ranks of a node as it has cores."""
    source, target = np.ones(VECTOR_BYTES, np.uint8), np.zeros(VECTOR_BYTES, np.uint8)
    device = views.device("cpu")
    return timer(lambda: device.copy(target, source) if has_core else None) / VECTOR_BYTES


def barrier_s(comm: Communicator, timer: Timer) -> float:
    """Measure a barrier of the ranks of a node, on all nodes at once."""
    node = comm.split(comm.topology.node_of[comm.rank])
    assert node is not None
    seconds = time_plans([node.plan("barrier", algorithm="direct")], timer, BARRIERS)
    node.free()
    return seconds


def bound_s(collective: str, nbytes: int, nodes: Sequence[Sequence[int]], network: Network) -> float | None:
    """Compute the seconds that no algorithm can beat, at the rates measured; None if no data must move.

    In one node it is the time of copying memory, all ranks at once; for several nodes, that of the busiest one's wire.
    """
    size = sum(map(len, nodes))
    if size == 1 or not nbytes:
        return None
    if len(nodes) > 1:
        return nbytes * vectors_on_wire(collective, nodes) * network.gate.beta_s_per_byte
    oversubscription = max(1.0, size / network.cores)
    return nbytes * vectors_copied(collective, size) * network.copy_s_per_byte * oversubscription


def vectors_copied(collective: str, size: int) -> float:
    """Compute how often each rank copies the vector, if all ranks copy equally much.

    A copy reads and writes: to read p vectors and write one is (p + 1) / 2 copies.

    >>> vectors_copied("all_reduce", 4), vectors_copied("reduce", 4), vectors_copied("gather", 4)
    (1.0, 0.625, 0.25)
    """
    parts = dict.fromkeys(("reduce", "reduce_scatter"), (size + 1) / (2 * size)) | {"broadcast": (size - 1) / size}
    return (parts | {"gather": 1 / size, "scatter": 1 / size}).get(collective, 1.0)


def vectors_on_wire(collective: str, nodes: Sequence[Sequence[int]]) -> float:
    """Compute how many vectors pass the busiest node's wire, one way.

    >>> nodes = ((0, 1), (2, 3), (4, 5), (6, 7))
    >>> [vectors_on_wire(name, nodes) for name in ("all_reduce", "all_to_all", "all_gather")]
    [1.5, 1.5, 0.75]
    """
    lengths = [len(node) for node in nodes]
    size = sum(lengths)
    match collective:
        case "all_reduce":
            return 2 * (len(nodes) - 1) / len(nodes)
        case "broadcast" | "reduce":
            return 1.0
        case "all_to_all":
            return max(length * (size - length) / size for length in lengths)
    return (size - min(lengths)) / size
