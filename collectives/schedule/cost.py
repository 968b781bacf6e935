"""Cost of a schedule: counted from the rounds of all ranks, and in seconds on a machine of given speeds.

A round takes as long as its slowest rank, and no rank begins the next before.  A rank's sends inside its node are
serialized, and so are its receives, but both overlap each other; reductions and copies come after.  Runs for one peer
are one message.  The ranks of a node share its cores, and its link to other nodes, which serializes messages.  Data
from another node are reduced segment by segment, while the next segment is in flight.  In `collectives.schedule.events`
each rank proceeds as soon as it can instead.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from functools import cache, partial
from itertools import groupby
from typing import NamedTuple, TypeVar

from collectives.algorithms import Algorithm
from collectives.schedule.moves import Barrier, Copy, Get, GetReduce, Put, Recv, RecvReduce, Round, Send

Nodes = tuple[tuple[int, ...], ...]  # the ranks of each
T = TypeVar("T")

# A schedule on more ranks, or with more rounds, is counted on a sample of its ranks: fewer, the more rounds and ranks.
COUNTED_RANKS, COUNTED_ROUNDS, COUNTED_CHUNKS = 256, 20_000, 1 << 20


class Link(NamedTuple):
    """A message of n bytes takes `alpha_s` + n `beta_s_per_byte`."""

    alpha_s: float
    beta_s_per_byte: float

    def seconds(self, nbytes: float) -> float:
        return self.alpha_s + nbytes * self.beta_s_per_byte


class Network(NamedTuple):
    """A machine's speeds, which `python -m collectives.bench` measures (bench/constants.py).

    The defaults are of two cores of a server (benchmarks/results) and of 10 Gbit/s Ethernet.
    """

    within: Link = Link(3e-6, 3e-10)  # between two ranks of a node
    between: Link = Link(3e-5, 8e-10)  # between two nodes, one rank of each communicating
    gamma_s_per_byte: float = 5e-11  # to reduce a byte received by a message or a get, all cores busy
    copy_s_per_byte: float = 8e-11  # to copy a byte, all cores busy
    meet_s: float = 5e-7  # a barrier of a node's ranks, no more than cores
    system: Link = Link(1e-6, 8e-11)  # extra cost of access through the system: per barrier, and per byte
    staged_s_per_byte: float = 8e-11  # the same of a byte that another core has just written to a staging buffer
    pull_s_per_byte: float = 0.0  # the same of a byte in another rank's memory, as one of these
    cores: float = 1 << 20  # of the smallest node; more busy ranks than these slow each other down
    nic: Link | None = None  # time that a message occupies its node's link, each way; None: one pair fills it
    segment_bytes: int = 1 << 20  # of data that are reduced as they arrive from another node

    @property
    def gate(self) -> Link:
        """The link that a message occupies on its node's way out and in."""
        return self.nic or Link(0.0, self.between.beta_s_per_byte)

    def reduction_s(self, nbytes: float) -> float:
        """Return the time from the end of a message between nodes to that of its reduction, which overlaps with it."""
        late = max(0.0, nbytes - self.segment_bytes)
        slower = max(0.0, self.gamma_s_per_byte - self.between.beta_s_per_byte)
        return (nbytes - late) * self.gamma_s_per_byte + late * slower


NETWORK = Network()


def on_device(network: Network, has_barriers: bool = False) -> Network:
    """Return the speeds with arrays in device memory: not measured, orders of magnitude only.

    A message goes through host memory at both ends: 10 us for a copy that the host waits for, and 50 GB/s, a PCIe link
    of the fifth generation.  Another rank's memory is read at 400 GB/s, NVLink's of the fourth.  Barriers take a host's
    flags and two events on streams, or, where devices wait for each other, flags in each other's memory.
    """

    def staged(link: Link) -> Link:
        return Link(link.alpha_s + 2e-5, link.beta_s_per_byte + 4e-11)

    return network._replace(
        within=staged(network.within),
        between=staged(network.between),
        gamma_s_per_byte=2.5e-12,
        copy_s_per_byte=2.5e-12,
        meet_s=3e-6 if has_barriers else 2e-5,
        system=Link(0.0, 0.0),
        staged_s_per_byte=0.0,
    )


class PeerTraffic(NamedTuple):
    """The chunks that a rank sends another in a round, or receives from it."""

    is_send: bool
    peer: int
    chunks: int
    reduced: int  # of the chunks


class RoundSummary(NamedTuple):
    """A rank's work in a round; `copied` and `reduced` chunks in its node's memory, `pulled` those in other ranks'."""

    messages: tuple[PeerTraffic, ...] = ()
    copied: int = 0
    reduced: int = 0
    pulled: int = 0
    barrier: tuple[int, ...] = ()  # its ranks


IDLE = RoundSummary()


class Traffic(NamedTuple):
    """Messages of a round in one direction: the numbers of peers and of chunks."""

    peers: float
    chunks: float


class Work(NamedTuple):
    """A rank's work in a round, in chunks; `near` is inside its node, `far` between nodes."""

    near_out: Traffic
    far_out: Traffic
    near_in: Traffic
    far_in: Traffic
    reduced: int
    streamed: int  # chunks among the reduced that come from other nodes
    copied: int
    pulled: int  # chunks among both in other ranks' memory
    barriers: int


NOTHING = Traffic(0, 0)
NO_WORK = Work(NOTHING, NOTHING, NOTHING, NOTHING, 0, 0, 0, 0, 0)


class Load(NamedTuple):
    """A rank's work in a round, and its node's: the number of busy ranks, and traffic out and in."""

    work: Work
    busy: float
    leaving: Traffic
    arriving: Traffic


Profile = tuple[tuple[frozenset[Load], int], ...]  # a schedule's different rounds, and how often each occurs


def predict(row: Algorithm, nbytes: int, size: int, nodes: Nodes, root: int = 0, network: Network = NETWORK) -> float:
    """Predict the seconds that an algorithm takes on a vector of `nbytes`, in chunks of nbytes/size.

    >>> from collectives.algorithms import find
    >>> network = Network(within=Link(alpha_s=1e-6, beta_s_per_byte=1e-9), gamma_s_per_byte=5e-10)
    >>> seconds = predict(find("all_reduce", "ring"), 4000, 4, ((0, 1, 2, 3),), network=network)
    >>> print(f"{seconds * 1e6:.1f} us")
    13.5 us
    """
    chunk_bytes = nbytes / size
    seconds = price(profile(row, size, nodes, root), chunk_bytes, network)
    num_segments = row.num_segments(chunk_bytes)
    if num_segments == 1:
        return seconds
    pipelined = price(profile(row, size, nodes, root, pipelined=True), chunk_bytes, network)
    return pipelined + (seconds - pipelined) / num_segments + (num_segments - 1) * network.meet_s


def price(rounds: Profile, chunk_bytes: float, network: Network) -> float:
    return sum((times * max(time_s(load, chunk_bytes, network) for load in loads) for loads, times in rounds), 0.0)


def time_s(load: Load, chunk_bytes: float, network: Network) -> float:
    """Return the time of one rank's part of a round."""
    work, crowd = load.work, max(1.0, load.busy / network.cores)
    near, far, gate = network.within, network.between, network.gate

    def inside(way: Traffic) -> float:
        return crowd * (way.peers * near.alpha_s + way.chunks * chunk_bytes * near.beta_s_per_byte)

    def beyond(way: Traffic, of_node: Traffic) -> float:
        if not way.peers:
            return 0.0
        last = way.chunks / way.peers
        ahead = Traffic(of_node.peers - 1, of_node.chunks - last)
        queue = ahead.peers * gate.alpha_s + ahead.chunks * chunk_bytes * gate.beta_s_per_byte
        return queue + far.alpha_s + last * chunk_bytes * far.beta_s_per_byte

    messages = max(
        inside(work.near_out),
        inside(work.near_in),
        beyond(work.far_out, load.leaving),
        beyond(work.far_in, load.arriving),
    )
    reducing = (work.reduced - work.streamed) * chunk_bytes * network.gamma_s_per_byte
    reducing += network.reduction_s(work.streamed * chunk_bytes)
    copying = work.copied * chunk_bytes * network.copy_s_per_byte
    copying += work.pulled * chunk_bytes * network.pull_s_per_byte
    return messages + crowd * (reducing + copying + work.barriers * network.meet_s)


@cache
def profile(row: Algorithm, size: int, nodes: Nodes, root: int = 0, pipelined: bool = False) -> Profile:
    """Count the rounds of an algorithm, once for vectors of all lengths; `pipelined`, all of them as one.

    In a pipeline, each rank is in another round, on another segment: the rank with most work determines the time.
    """
    of_root = row.rounds(root, size, root, nodes)
    limit = min(COUNTED_RANKS, COUNTED_ROUNDS // max(1, len(of_root)), COUNTED_CHUNKS // size)
    ranks = sample(nodes, root, max(4, limit))
    works_of = {rank: works(row.rounds(rank, size, root, nodes), rank, nodes) for rank in ranks}
    return tally({rank: [at_once(own)] for rank, own in works_of.items()} if pipelined else works_of, nodes)


def sample(nodes: Nodes, root: int, limit: int) -> list[int]:
    """Return the ranks to count: all, or about `limit` of them, from the root's node, the largest, and others.

    Where all ranks do alike, as in a ring, that loses nothing; elsewhere a round's slowest rank may be missed.

    >>> sample((tuple(range(100)),), root=7, limit=4)
    [0, 7, 33, 66, 99]
    """
    if sum(map(len, nodes)) <= limit:
        return [rank for node in nodes for rank in node]
    largest, home = max(nodes, key=len), next(node for node in nodes if root in node)
    some = {home, largest, *spread(nodes, max(2, limit // len(largest)))}
    return sorted({root, *(rank for node in some for rank in spread(node, limit))})


def spread(items: Sequence[T], number: int) -> list[T]:
    """Return `number` of the items, or all, from the first to the last."""
    if len(items) <= number:
        return list(items)
    return [items[i * (len(items) - 1) // max(1, number - 1)] for i in range(number)]


def summary(moves: Round, rank: int) -> RoundSummary:
    """Return a rank's work in a round."""
    chunks: dict[tuple[bool, int], list[int]] = {}
    copied = reduced = pulled = 0
    barrier: tuple[int, ...] = ()
    for move in moves:
        match move:
            case Send(peer, run) | Recv(peer, run) | RecvReduce(peer, run):
                sums = chunks.setdefault((isinstance(move, Send), peer), [0, 0])
                sums[0] += len(run)
                sums[1] += len(run) * isinstance(move, RecvReduce)
            case Copy(_, run) | Get(_, _, run) | Put(_, run, _):
                copied += len(run)
                pulled += len(run) * (not isinstance(move, Copy))
            case GetReduce(sources, _, run):
                reduced += len(sources) * len(run)
                pulled += (len(sources) - (rank in sources)) * len(run)
            case Barrier(ranks):
                barrier = ranks
    messages = tuple(PeerTraffic(*way, *sums) for way, sums in chunks.items())
    return RoundSummary(messages, copied, reduced, pulled, barrier)


def works(rounds: Sequence[Round], rank: int, nodes: Nodes) -> list[Work]:
    """Return a rank's work in each of its rounds: one object for rounds that are alike, as all of a ring's."""
    node = next(frozenset(node) for node in nodes if rank in node)
    work = cache(partial(work_of, node=node))
    return [work(summary(moves, rank)) for moves in rounds]


def tally(works_of: Mapping[int, Sequence[Work]], nodes: Nodes) -> Profile:
    """Count the different rounds of ranks; other ranks of a node are taken to be like these."""
    rounds: Counter[frozenset[Load]] = Counter()
    for of_ranks, alike in groupby(zip(*works_of.values(), strict=True)):
        rounds[loads_of(dict(zip(works_of, of_ranks, strict=True)), nodes)] += sum(1 for _ in alike)
    return tuple(rounds.items())


def at_once(of_rounds: Sequence[Work]) -> Work:
    """Sum up a rank's work in all rounds of a schedule without messages."""
    sums = map(sum, zip(*(work[4:] for work in of_rounds), strict=True))
    return Work(NOTHING, NOTHING, NOTHING, NOTHING, *sums)


def loads_of(works: Mapping[int, Work], nodes: Nodes) -> frozenset[Load]:
    """Return the different loads of ranks in a round."""
    loads: set[Load] = set()
    for node in nodes:
        if there := [works[rank] for rank in node if rank in works]:
            scale = len(node) / len(there)
            busy = scale * sum(work != NO_WORK for work in there)
            leaving, arriving = summed([w.far_out for w in there], scale), summed([w.far_in for w in there], scale)
            loads |= {Load(work, busy, leaving, arriving) for work in set(there)}
    return frozenset(loads)


def summed(ways: Sequence[Traffic], scale: float) -> Traffic:
    return Traffic(scale * sum(way.peers for way in ways), scale * sum(way.chunks for way in ways))


def work_of(own: RoundSummary, node: Collection[int]) -> Work:
    ways = [[NOTHING, NOTHING], [NOTHING, NOTHING]]  # in and out, near and far
    reduced, streamed = own.reduced, 0
    for message in own.messages:
        far = message.peer not in node
        peers, chunks = ways[message.is_send][far]
        ways[message.is_send][far] = Traffic(peers + 1, chunks + message.chunks)
        reduced += message.reduced
        streamed += message.reduced * far
    (near_in, far_in), (near_out, far_out) = ways
    return Work(
        near_out, far_out, near_in, far_in, reduced, streamed, own.copied, own.pulled, barriers=bool(own.barrier)
    )
