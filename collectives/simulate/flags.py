"""The simulation's command line, and the network that it describes."""

import argparse
import re
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

from collectives import algorithms, links
from collectives.algorithms import Algorithm, Reach
from collectives.cost import NETWORK, Link, Network, Nodes
from collectives.settings import Parser, Range
from collectives.simulate.fabrics import FABRICS
from collectives.sizes import ladder, num_bytes

COLLECTIVES = tuple(dict.fromkeys(row.collective for row in algorithms.REGISTRY))
EXACT_RANKS = 1024  # up to which every rank is followed, unless flags say otherwise
RANKS = Range(1, 2**17, unit="ranks")  # whose schedules can be looked at in minutes
FACTOR, CORES = Range(2, 2**30), Range(1, 2**16)
TIME, SPEED = Range(0, 10**9, unit="us"), Range(0, 10**9, open="above", unit="GB/s")


class Job(NamedTuple):
    """What is to be predicted."""

    rows: tuple[Algorithm, ...]
    sizes: tuple[int, ...]
    nodes: Nodes
    network: Network
    root: int
    exact: bool
    words: str  # about the topology

    @property
    def ranks(self) -> int:
        return sum(map(len, self.nodes))


def parser(description: str | None) -> Parser:
    made = Parser("python -m collectives.simulate", description)
    fabrics = "; ".join(f"{name}: {fabric.words}" for name, fabric in FABRICS.items())
    made.add_argument("collective", nargs="?", default="all_reduce", help="(all_reduce)")
    made.add_argument("--ranks", type=RANKS.whole, metavar="N", help="as many as the topology has, by default")
    made.add_argument(
        "--topology",
        default="ndr",
        help=f"nodes x ranks, as 512x8; measured: of these hosts, and kept; {fabrics} (ndr)",
    )
    made.add_argument("--algorithms", nargs="+", metavar="NAME", help="these only")
    made.add_argument("-b", "--begin", type=num_bytes, default="8", help="smallest vector, as in 8, 64K, 1M (8)")
    made.add_argument("-e", "--end", type=num_bytes, default="256M", help="largest vector (256M)")
    made.add_argument("-f", "--factor", type=FACTOR.whole, default=8, help="from one size to the next (8)")
    made.add_argument("--root", type=RANKS._replace(least=0).whole, default=0, help="of collectives that have one (0)")
    add_network_flags(made)
    made.add_argument("--exact", action="store_true", help=f"follow every rank: up to {EXACT_RANKS}, by default")
    made.add_argument("--by-round", action="store_true", help="a round takes as long as its slowest rank: beyond that")
    made.add_argument("--plot", metavar="FILE", help="draw the times as a PNG")
    made.add_argument(
        "--space-time", metavar="FILE", help="draw one algorithm at the smallest size, message by message"
    )
    return made


def add_network_flags(made: argparse.ArgumentParser) -> None:
    """What `with_flags` takes."""
    add = made.add_argument
    for name, words in (("within", "in a node"), ("between", "between nodes"), ("nic", "of a node, for all its ranks")):
        add(f"--{name}", nargs=2, type=float, metavar=("US", "GB/s"), help=f"a message {words}")
    add("--fold", type=SPEED.number, metavar="GB/s", help="how fast a rank folds")
    add("--copy", type=SPEED.number, metavar="GB/s", help="how fast it copies")
    add("--meet", type=TIME.number, metavar="US", help="for a node's ranks to meet")
    add("--cores", type=CORES.whole, metavar="N", help="of a node")


def job(flags: argparse.Namespace) -> Job:
    """What the flags ask for.

    Raises: ValueError for what makes no sense, with the remedy.
    """
    if flags.collective not in COLLECTIVES:
        raise ValueError(f"collective {flags.collective!r} is unknown: use one of {', '.join(COLLECTIVES)}")
    if flags.begin > flags.end:
        raise ValueError(f"--begin {flags.begin} is above --end {flags.end}: exchange them")
    if flags.exact and flags.by_round:
        raise ValueError("--exact and --by-round: choose one")
    nodes, network, words = topology(flags.topology, flags.ranks)
    ranks = sum(map(len, nodes))
    if not 0 <= flags.root < ranks:
        raise ValueError(f"--root {flags.root}: there are ranks 0 to {ranks - 1}")
    exact = flags.exact or (ranks <= EXACT_RANKS and not flags.by_round)
    rows = chosen(flags.collective, flags.algorithms, nodes)
    sizes = ladder(flags.begin, flags.end, flags.factor) if flags.collective != "barrier" else (0,)
    return Job(rows, sizes, nodes, with_flags(network, flags), flags.root, exact, words)


def topology(text: str, ranks: int | None) -> tuple[Nodes, Network, str]:
    """The nodes' ranks, the speeds, and both in words."""
    if text in FABRICS:
        fabric = FABRICS[text]
        return in_nodes(ranks or fabric.ranks_per_node, fabric.ranks_per_node), fabric.network, fabric.words
    if text == "measured":
        return measured(ranks)
    if not (match := re.fullmatch(r"([1-9]\d{0,19})x([1-9]\d{0,19})", text, re.ASCII)):
        raise ValueError(f"--topology {text!r}: write nodes x ranks, as 512x8, or {', '.join([*FABRICS, 'measured'])}")
    num_nodes, length = int(match[1]), int(match[2])
    refuse_too_many(num_nodes * length, f"--topology {text}")
    if ranks not in (None, num_nodes * length):
        raise ValueError(f"--topology {text} has {num_nodes * length} ranks, but --ranks says {ranks}: leave that out")
    return in_nodes(num_nodes * length, length), NETWORK, "default speeds, but for what flags say"


def refuse_too_many(ranks: int, what: str) -> None:
    """Raise ValueError for more ranks than can be looked at."""
    if ranks not in RANKS:
        raise ValueError(f"{what} makes {ranks} ranks: use {RANKS.most} at most")


def measured(ranks: int | None) -> tuple[Nodes, Network, str]:
    kept = links.latest()
    if kept is None:
        raise ValueError(
            "--topology measured: nothing is kept: run python -m collectives.bench.constants on the hosts first"
        )
    lengths = [length for _, length in kept.place.hosts]
    words = f"measured on {', '.join(dict.fromkeys(name for name, _ in kept.place.hosts))}, {kept.place.mpi}"
    if ranks is None:
        ends = accumulate(lengths, initial=0)
        return tuple(tuple(range(a, b)) for a, b in pairwise(ends)), kept.network, words
    return in_nodes(ranks, max(lengths)), kept.network, words


def in_nodes(ranks: int, length: int) -> Nodes:
    """Consecutive ranks in nodes of one length, but for the last.

    >>> in_nodes(5, 2)
    ((0, 1), (2, 3), (4,))
    """
    return tuple(tuple(range(first, min(first + length, ranks))) for first in range(0, ranks, length))


def with_flags(network: Network, flags: argparse.Namespace) -> Network:
    """The speeds with those that flags give instead."""
    given: dict[str, Any] = {}
    for name in ("within", "between", "nic"):
        if pair := getattr(flags, name):
            given[name] = link(f"--{name}", *pair)
    if flags.between and not flags.nic:
        given["nic"] = given["between"]._replace(alpha_s=0.0)
    for name, field in (("fold", "gamma_s_per_byte"), ("copy", "copy_s_per_byte")):
        if (rate := getattr(flags, name)) is not None:
            given[field] = 1e-9 / rate
    if flags.meet is not None:
        given["meet_s"] = flags.meet * 1e-6
    if flags.cores is not None:
        given["cores"] = flags.cores
    return Network(**{**network._asdict(), **given})


def link(flag: str, latency_us: float, gbps: float) -> Link:
    for value, values in ((latency_us, TIME), (gbps, SPEED)):
        if value not in values:
            raise ValueError(f"{flag} {latency_us:g} {gbps:g}: {value:g} must be {values}")
    return Link(latency_us * 1e-6, 1e-9 / gbps)


def chosen(collective: str, names: Sequence[str] | None, nodes: Nodes) -> tuple[Algorithm, ...]:
    """The algorithms asked for, else all that can be run there."""
    size = sum(map(len, nodes))
    reach = Reach.ARRAYS if len(nodes) == 1 else Reach.NODES if min(map(len, nodes)) > 1 else Reach.MESSAGES
    if names is None:
        return tuple(row for row in algorithms.rows(collective, size) if row.reach <= reach)
    rows = tuple(algorithms.find(collective, name) for name in names)
    for row in rows:
        row.check(size)
        if row.reach > reach:
            raise ValueError(f"algorithm {row.name!r} needs shared memory, which these {len(nodes)} nodes don't have")
    return rows
