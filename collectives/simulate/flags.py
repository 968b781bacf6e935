"""The simulation's command line, and the network that it describes."""

import argparse
import math
import re
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

from collectives import algorithms, links
from collectives.algorithms import Algorithm, Reach
from collectives.cost import NETWORK, Link, Network, Nodes
from collectives.simulate.fabrics import FABRICS
from collectives.sizes import ladder, num_bytes

COLLECTIVES = tuple(dict.fromkeys(row.collective for row in algorithms.REGISTRY))
EXACT_RANKS = 1024  # up to which every rank is followed, unless flags say otherwise


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


def parser(description: str | None) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        "python -m collectives.simulate", None, description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    fabrics = "; ".join(f"{name}: {fabric.words}" for name, fabric in FABRICS.items())
    made.add_argument("collective", nargs="?", default="all_reduce", help="(all_reduce)")
    made.add_argument("--ranks", type=int, metavar="N", help="as many as the topology has, by default")
    made.add_argument(
        "--topology",
        default="ndr",
        help=f"nodes x ranks, as 512x8; measured: of these hosts, and kept; {fabrics} (ndr)",
    )
    made.add_argument("--algorithms", nargs="+", metavar="NAME", help="these only")
    made.add_argument("-b", "--begin", type=num_bytes, default="8", help="smallest vector, as in 8, 64K, 1M (8)")
    made.add_argument("-e", "--end", type=num_bytes, default="256M", help="largest vector (256M)")
    made.add_argument("-f", "--factor", type=int, default=8, help="from one size to the next (8)")
    made.add_argument("--root", type=int, default=0, help="of collectives that have one (0)")
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
    for name, words in (("within", "in a node"), ("between", "between nodes")):
        made.add_argument(f"--{name}", nargs=2, type=number, metavar=("US", "GB/s"), help=f"a message {words}")
    made.add_argument("--nic", nargs=2, type=number, metavar=("US", "GB/s"), help="of a node, for all its ranks")
    made.add_argument("--fold", type=number, metavar="GB/s", help="how fast a rank folds")
    made.add_argument("--copy", type=number, metavar="GB/s", help="how fast it copies")
    made.add_argument("--meet", type=number, metavar="US", help="for a node's ranks to meet")
    made.add_argument("--cores", type=int, metavar="N", help="of a node")


def number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} must be a number, 0 or above")
    return value


def job(flags: argparse.Namespace) -> Job:
    """What the flags ask for.

    Raises: ValueError for what makes no sense, with the remedy.
    """
    if flags.collective not in COLLECTIVES:
        raise ValueError(f"collective {flags.collective!r} is unknown: use one of {', '.join(COLLECTIVES)}")
    if flags.factor < 2:
        raise ValueError(f"--factor {flags.factor}: use 2 or more")
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
    if ranks is not None and ranks < 1:
        raise ValueError(f"--ranks {ranks}: use 1 or more")
    if text in FABRICS:
        fabric = FABRICS[text]
        return in_nodes(ranks or fabric.ranks_per_node, fabric.ranks_per_node), fabric.network, fabric.words
    if text == "measured":
        return measured(ranks)
    if not (match := re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", text)):
        raise ValueError(f"--topology {text!r}: write nodes x ranks, as 512x8, or {', '.join([*FABRICS, 'measured'])}")
    num_nodes, length = int(match[1]), int(match[2])
    if ranks not in (None, num_nodes * length):
        raise ValueError(f"--topology {text} has {num_nodes * length} ranks, but --ranks says {ranks}: leave that out")
    return in_nodes(num_nodes * length, length), NETWORK, "default speeds, but for what flags say"


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
    given: dict[str, float | int | Link] = {}
    for name in ("within", "between", "nic"):
        if pair := getattr(flags, name):
            given[name] = Link(pair[0] * 1e-6, seconds_a_byte(f"--{name}", pair[1]))
    if flags.between and not flags.nic:
        given["nic"] = Link(0.0, seconds_a_byte("--between", flags.between[1]))
    for name, field in (("fold", "gamma_s_per_byte"), ("copy", "copy_s_per_byte")):
        if (rate := getattr(flags, name)) is not None:
            given[field] = seconds_a_byte(f"--{name}", rate)
    if flags.meet is not None:
        given["meet_s"] = flags.meet * 1e-6
    if flags.cores is not None:
        if flags.cores < 1:
            raise ValueError(f"--cores {flags.cores}: use 1 or more")
        given["cores"] = flags.cores
    for name, value in given.items():
        if min(value if isinstance(value, Link) else (value,)) < (name == "cores"):
            raise ValueError(
                f"--{name.removesuffix('_s')} {value}: speeds and times can't be below 0, nor cores below 1"
            )
    return Network(**{**network._asdict(), **given})


def seconds_a_byte(flag: str, gbps: float) -> float:
    if not gbps > 0:
        raise ValueError(f"{flag}: {gbps:g} GB/s must be above 0")
    return 1e-9 / gbps


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
