"""Cost of a schedule: counted from the rounds of all ranks, and in seconds on a machine of given speeds.

A round takes as long as its slowest rank, and no rank begins the next before.  A rank's sends inside its node are
serialized, and so are its receives, but both overlap each other; reductions and copies come after.  Runs for one peer
are one message.  The ranks of a node share its cores, and its link to other nodes.  Data from another node are reduced
segment by segment, while the next segment is in flight.  Beyond the node, a rank's messages take as long as the slowest
of what they use on the way out: its own port, its node's link with all that leaves the node, and the ports of the
groups that they leave; the way in is alike.  In `collectives.schedule.events` each rank proceeds as soon as it can
instead.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from functools import cache, partial
from itertools import groupby
from typing import NamedTuple, TypeVar

from collectives.algorithms import Algorithm, variants
from collectives.schedule.moves import Barrier, Copy, Get, GetReduce, Put, Recv, RecvReduce, Round, Send
from collectives.schedule.network import NETWORK, Network, Nodes

Ways = tuple["Traffic", "Traffic"]  # out and in
T = TypeVar("T")

# A schedule on more ranks, or with more rounds, is counted on a sample of its ranks: fewer, the more rounds and ranks.
COUNTED_RANKS, COUNTED_ROUNDS, COUNTED_CHUNKS = 256, 20_000, 1 << 20
COUNTED_NODES = 32  # between the first and the last of a tier's group


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

    def plus(self, message: PeerTraffic) -> "Traffic":
        return Traffic(self.peers + 1, self.chunks + message.chunks)


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
    outer: tuple[Ways, ...] = ()  # of each tier: what leaves the rank's group of nodes, or enters it


NOTHING = Traffic(0, 0)
NO_WORK = Work(NOTHING, NOTHING, NOTHING, NOTHING, 0, 0, 0, 0, 0)


class Load(NamedTuple):
    """A rank's work in a round, and its node's: the number of busy ranks, and traffic out and in.

    `ports` has the traffic out of and into its group of each tier.
    """

    work: Work
    busy: float
    leaving: Traffic
    arriving: Traffic
    ports: tuple[Ways, ...] = ()


Profile = tuple[tuple[frozenset[Load], int], ...]  # a schedule's different rounds, and how often each occurs


def predict(row: Algorithm, nbytes: int, size: int, nodes: Nodes, root: int = 0, network: Network = NETWORK) -> float:
    """Predict the seconds that an algorithm takes on a vector of `nbytes`, in chunks of nbytes/size.

    >>> from collectives.algorithms import find
    >>> from collectives.schedule.network import Link
    >>> network = Network(within=Link(alpha_s=1e-6, beta_s_per_byte=1e-9), gamma_s_per_byte=5e-10)
    >>> seconds = predict(find("all_reduce", "ring"), 4000, 4, ((0, 1, 2, 3),), network=network)
    >>> print(f"{seconds * 1e6:.1f} us")
    13.5 us
    """
    chunk_bytes = nbytes / row.num_chunks(size, nodes)
    tiers = tuple(tier.nodes for tier in network.tiers)
    seconds = price(profile(row, size, nodes, root, tiers=tiers), chunk_bytes, network)
    num_segments = row.num_segments(chunk_bytes)
    if num_segments == 1:
        return seconds
    pipelined = price(profile(row, size, nodes, root, pipelined=True), chunk_bytes, network)
    return pipelined + (seconds - pipelined) / num_segments + (num_segments - 1) * network.meet_s


def predict_best(
    row: Algorithm, nbytes: int, size: int, nodes: Nodes, root: int = 0, network: Network = NETWORK
) -> tuple[Algorithm, float]:
    """Return the variant of an algorithm that takes the least time, and its seconds, as `predict` does."""
    num_nodes = [tier.nodes for tier in network.tiers]
    return variants.best(row, nbytes, nodes, lambda each: predict(each, nbytes, size, nodes, root, network), num_nodes)


def price(rounds: Profile, chunk_bytes: float, network: Network) -> float:
    return sum((times * max(time_s(load, chunk_bytes, network) for load in loads) for loads, times in rounds), 0.0)


def time_s(load: Load, chunk_bytes: float, network: Network) -> float:
    """Return the time of one rank's part of a round."""
    work, crowd, near = load.work, max(1.0, load.busy / network.cores), network.within

    def inside(way: Traffic) -> float:
        return crowd * (way.peers * near.alpha_s + way.chunks * chunk_bytes * near.beta_s_per_byte)

    outer_out, outer_in = zip(*work.outer, strict=True) if work.outer else ((), ())
    ports_out, ports_in = zip(*load.ports, strict=True) if load.ports else ((), ())
    messages = max(
        inside(work.near_out),
        inside(work.near_in),
        beyond((work.far_out, *outer_out), (load.leaving, *ports_out), chunk_bytes, network),
        beyond((work.far_in, *outer_in), (load.arriving, *ports_in), chunk_bytes, network),
    )
    reducing = (work.reduced - work.streamed) * chunk_bytes * network.gamma_s_per_byte
    reducing += network.reduction_s(work.streamed * chunk_bytes)
    copying = work.copied * chunk_bytes * network.copy_s_per_byte
    copying += work.pulled * chunk_bytes * network.pull_s_per_byte
    return messages + crowd * (reducing + copying + work.barriers * network.meet_s)


def beyond(ways: Sequence[Traffic], of_all: Sequence[Traffic], chunk_bytes: float, network: Network) -> float:
    """Return the time of a rank's messages to other nodes, or from there.

    `ways` is its traffic beyond its node, and beyond its group of each tier; `of_all` is that of all ranks of the node,
    and of the groups.  Of the messages that start one after the other at a gate, the rank's own is the last.
    """
    levels = [*zip(network.links, network.gates, ways, (*ways[1:], NOTHING), of_all, strict=False)]
    slowest_s = sum((way.chunks - out.chunks) * chunk_bytes * link.beta_s_per_byte for link, _, way, out, _ in levels)
    seconds = 0.0
    for link, gate, way, farther, every in levels:
        if gate and way.peers:
            waits_s = (every.peers - 1) * gate.alpha_s
            slowest_s = max(slowest_s, waits_s + every.chunks * chunk_bytes * gate.beta_s_per_byte)
        if way.peers > farther.peers:
            seconds = max(seconds, link.alpha_s + slowest_s)
    return seconds


@cache
def profile(
    row: Algorithm, size: int, nodes: Nodes, root: int = 0, pipelined: bool = False, tiers: tuple[int, ...] = ()
) -> Profile:
    """Count the rounds of an algorithm, once for vectors of all lengths; `pipelined`, all of them as one.

    In a pipeline, each rank is in another round, on another segment: the rank with most work determines the time.
    `tiers` has the number of nodes in the groups of each.
    """
    of_root = row.rounds(root, size, root, nodes)
    num_chunks = row.num_chunks(size, nodes)
    limit = min(COUNTED_RANKS, COUNTED_ROUNDS // max(1, len(of_root)), COUNTED_CHUNKS // num_chunks)
    num_inner = COUNTED_ROUNDS // max(1, sum(map(len, of_root))) // max(map(len, nodes))
    ranks = sample(nodes, root, max(4, limit), tiers, num_inner)
    works_of: Mapping[int, Sequence[Work]] = {
        rank: works(row.rounds(rank, size, root, nodes), rank, nodes, tiers) for rank in ranks
    }
    if len(ranks) < size:
        works_of = without_idle_rounds(works_of)
    return tally({rank: [at_once(own)] for rank, own in works_of.items()} if pipelined else works_of, nodes, tiers)


def without_idle_rounds(works_of: Mapping[int, Sequence[Work]]) -> dict[int, Sequence[Work]]:
    """Return the work of some ranks, with the round before in place of one in which only others work, as in a chain.

    >>> busy = NO_WORK._replace(copied=1)
    >>> without_idle_rounds({0: [busy, NO_WORK, NO_WORK]}) == {0: [busy, busy, busy]}
    True
    """
    is_busy = [any(work != NO_WORK for work in of_ranks) for of_ranks in zip(*works_of.values(), strict=True)]
    latest, stand_ins = next((number for number, busy in enumerate(is_busy) if busy), 0), []
    for number, busy in enumerate(is_busy):
        latest = number if busy else latest
        stand_ins.append(latest)
    return {rank: [own[number] for number in stand_ins] for rank, own in works_of.items()}


def sample(nodes: Nodes, root: int, limit: int, tiers: Sequence[int] = (), num_inner: int = 1) -> list[int]:
    """Return the ranks to count: all, or about `limit` of them, from the root's node, the largest, and others.

    Where all ranks do alike, as in a ring, that loses nothing; elsewhere a round's slowest rank may be missed.  With
    tiers, the others are in the root's groups: the first and the last node of each, and `num_inner` nodes between.

    >>> sample((tuple(range(100)),), root=7, limit=4)
    [0, 7, 33, 66, 99]
    >>> sample(tuple((rank,) for rank in range(100)), root=0, limit=4, tiers=(50,), num_inner=2)
    [0, 13, 37, 49]
    """
    if sum(map(len, nodes)) <= limit:
        return [rank for node in nodes for rank in node]
    largest, number = max(nodes, key=len), next(number for number, node in enumerate(nodes) if root in node)
    some = {nodes[number]} if tiers else {nodes[number], largest, *spread(nodes, max(2, limit // len(largest)))}
    for length in tiers:
        group = nodes[number // length * length :][:length]
        some |= {group[0], group[-1], *middles(group[1:-1], max(1, min(num_inner, COUNTED_NODES)))}
    return sorted({root, *(rank for node in some for rank in spread(node, limit))})


def spread(items: Sequence[T], number: int) -> list[T]:
    """Return `number` of the items, or all, from the first to the last.

    Where there are enough, those beside powers of two are among them, which are the inner ones of trees.

    >>> spread(range(100), 3), spread(range(100), 16)
    ([0, 49, 99], [0, 1, 2, 3, 4, 7, 8, 15, 16, 31, 32, 49, 63, 64, 99])
    """
    if len(items) <= number:
        return list(items)
    inner = {power - beside for power in (1 << bit for bit in range(len(items).bit_length())) for beside in (0, 1)}
    inner = {index for index in inner if index < len(items)} if number > 2 * len(items).bit_length() else set()
    even = {i * (len(items) - 1) // max(1, number - len(inner) - 1) for i in range(number - len(inner))}
    return [items[i] for i in sorted(inner | even)]


def middles(items: Sequence[T], number: int) -> list[T]:
    """Return the middle one of each of `number` parts of the items, or all.

    >>> middles("abcdef", 2), middles("abc", 1), middles("ab", 3)
    (['b', 'e'], ['b'], ['a', 'b'])
    """
    if len(items) <= number:
        return list(items)
    return [items[(2 * i + 1) * len(items) // (2 * number)] for i in range(number)]


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


def works(rounds: Sequence[Round], rank: int, nodes: Nodes, tiers: Sequence[int] = ()) -> list[Work]:
    """Return a rank's work in each of its rounds: one object for rounds that are alike, as all of a ring's."""
    number = next(number for number, node in enumerate(nodes) if rank in node)
    groups = [nodes[number // length * length :][:length] for length in (1, *tiers)]
    work = cache(partial(work_of, groups=[frozenset(rank for node in group for rank in node) for group in groups]))
    return [work(summary(moves, rank)) for moves in rounds]


def tally(works_of: Mapping[int, Sequence[Work]], nodes: Nodes, tiers: Sequence[int] = ()) -> Profile:
    """Count the different rounds of ranks; other ranks of a node are taken to be like these."""
    rounds: Counter[frozenset[Load]] = Counter()
    ranks = {n: own for n, node in enumerate(nodes) if (own := [rank for rank in node if rank in works_of])}
    for of_ranks, alike in groupby(zip(*works_of.values(), strict=True)):
        works = dict(zip(works_of, of_ranks, strict=True))
        by_node = {number: [works[rank] for rank in own] for number, own in ranks.items()}
        rounds[loads_of(by_node, nodes, tiers)] += sum(1 for _ in alike)
    return tuple(rounds.items())


def at_once(of_rounds: Sequence[Work]) -> Work:
    """Sum up a rank's work in all rounds of a schedule without messages."""
    reduced, streamed, copied, pulled, barriers = map(sum, zip(*(work[4:9] for work in of_rounds), strict=True))
    return Work(NOTHING, NOTHING, NOTHING, NOTHING, reduced, streamed, copied, pulled, barriers)


def loads_of(works: Mapping[int, Sequence[Work]], nodes: Nodes, tiers: Sequence[int] = ()) -> frozenset[Load]:
    """Return the different loads of ranks in a round, by node, in groups whose traffic can be summed."""
    loads: set[Load] = set()
    ports = [group_traffic(works, nodes, length, tier) for tier, length in enumerate(tiers)]
    for number, own in works.items():
        scale = len(nodes[number]) / len(own)
        busy = scale * sum(work != NO_WORK for work in own)
        leaving, arriving = summed([w.far_out for w in own], scale), summed([w.far_in for w in own], scale)
        groups = [traffic.get(number // length) for traffic, length in zip(ports, tiers, strict=True)]
        if None not in groups:
            loads |= {Load(work, busy, leaving, arriving, tuple(filter(None, groups))) for work in set(own)}
    return frozenset(loads)


def group_traffic(
    works: Mapping[int, Sequence[Work]], nodes: Nodes, length: int, tier: int
) -> dict[int, tuple[Traffic, Traffic]]:
    """Return what leaves and enters groups of nodes, of which the first and the last node are there, and one between.

    In a ring, only the outer nodes send to other groups, and receive from there: inner ones stand for inner ones.
    """
    traffic: dict[int, tuple[Traffic, Traffic]] = {}
    for group, members in groupby(works, key=lambda number: number // length):
        numbers = list(members)
        first, last = group * length, min((group + 1) * length, len(nodes)) - 1
        inner, num_inner = [n for n in numbers if first < n < last], max(0, last - first - 1)
        if {first, last} <= {*numbers} and bool(inner) == bool(num_inner):
            scales = {n: len(nodes[n]) / len(works[n]) * (num_inner / len(inner) if n in inner else 1) for n in numbers}
            ways = [[summed([w.outer[tier][way] for w in works[n]], scales[n]) for n in numbers] for way in (0, 1)]
            leaving, arriving = (summed(of_nodes, 1) for of_nodes in ways)
            traffic[group] = leaving, arriving
    return traffic


def summed(ways: Sequence[Traffic], scale: float) -> Traffic:
    return Traffic(scale * sum(way.peers for way in ways), scale * sum(way.chunks for way in ways))


def work_of(own: RoundSummary, groups: Sequence[Collection[int]]) -> Work:
    """Return a rank's work in a round; `groups` has the ranks of its node, and of its group of each tier."""
    node, *outer = groups
    ways = [[NOTHING, NOTHING], [NOTHING, NOTHING]]  # in and out, near and far
    reduced, streamed = own.reduced, 0
    for message in own.messages:
        far = message.peer not in node
        ways[message.is_send][far] = ways[message.is_send][far].plus(message)
        reduced += message.reduced
        streamed += message.reduced * far
    (near_in, far_in), (near_out, far_out) = ways
    return Work(
        *(near_out, far_out, near_in, far_in, reduced, streamed, own.copied, own.pulled, bool(own.barrier)),
        outer=tuple(outer_traffic(own, group) for group in outer),
    )


def outer_traffic(own: RoundSummary, group: Collection[int]) -> Ways:
    """Return what a rank sends out of a group, and receives from there."""
    leaving = arriving = NOTHING
    for message in own.messages:
        if message.peer not in group and message.is_send:
            leaving = leaving.plus(message)
        elif message.peer not in group:
            arriving = arriving.plus(message)
    return leaving, arriving
