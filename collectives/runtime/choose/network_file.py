"""A network as a TOML file: levels from the node outwards, each with its rates, and what a rank does by itself.

    [[levels]]              # ranks of a node
    size = 8
    latency_us = 3.4
    gb_per_s = 370.8        # of a message between two of them

    [[levels]]              # nodes of a pod
    size = 32
    latency_us = 9.6
    gb_per_s = 50.0
    port_gb_per_s = 400.0   # of a node's port, each way, for all its ranks; by default that of one message

    [[levels]]              # pods
    size = 4
    latency_us = 12.0
    gb_per_s = 50.0
    port_gb_per_s = 6400.0  # of a pod's port, each way; by default as much as those of all its nodes

A port is occupied by each message for `port_latency_us`, by default 0, and for its bytes.  `ranks` is the number of
ranks where the last groups are not full.  A table `rank` has what `RATES` and `TIMES` name, by default as in `Network`.
A file of links (collectives/graphs/links_file.py) is read, too, as the levels of its graph.
"""

import math
import tomllib
from collections.abc import Mapping, Sequence
from decimal import Decimal
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from collectives.graphs.levels import graph_levels
from collectives.graphs.links_file import parse_links
from collectives.job.settings import Range, nearest
from collectives.runtime.choose.auto import Tuning
from collectives.schedule.moves import laid
from collectives.schedule.network import NETWORK, Link, Network, Nodes, Tier

RANKS = Range(1, 2**17, unit="ranks")  # more would take longer than minutes
TIME, SPEED = Range(0, 10**9, unit="us"), Range(0, 10**9, open="above", unit="GB/s")
COUNTS = Range(1, 2**62)
KEYS = ("size", "latency_us", "gb_per_s", "port_latency_us", "port_gb_per_s")
RATES = {
    "reduce_gb_per_s": "gamma_s_per_byte",
    "copy_gb_per_s": "copy_s_per_byte",
    "get_gb_per_s": "pull_s_per_byte",
    "staged_gb_per_s": "staged_s_per_byte",
}
TIMES = {"barrier_us": "meet_s"}
OTHERS = {"cores": "cores", "segment_bytes": "segment_bytes"}
SYSTEM = ("system_us", "system_gb_per_s")
OF_RANK = (*RATES, *TIMES, *SYSTEM, *OTHERS)
DIGITS = 28  # of decimal numbers


class NetworkFile(NamedTuple):
    """What a file describes: the ranks of each node, the speeds, and the hosts' names if it has them."""

    nodes: Nodes
    network: Network
    hosts: tuple[str, ...] = ()


def read(path: str) -> NetworkFile:
    """Read a file; raise ValueError with its name, the fault and the remedy."""
    return parse(text_of(path), path)


def text_of(path: str) -> str:
    """Return a file's text; raise ValueError with its name, the fault and the remedy."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{path} can't be read ({error.strerror}): pass the path of a network in TOML") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not TOML ({error}): see --describe for the form") from None


def parse(text: str, path: str) -> NetworkFile:
    """Parse the text of a file, either kind; raise ValueError with its name, the fault and the remedy."""
    try:
        if {"link", "host"} & tomllib.loads(text).keys():
            return NetworkFile(*graph_levels(parse_links(text)))
        return NetworkFile(*from_toml(text))
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ValueError(f"{path} is not TOML ({error}): see --describe for the form") from None
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def network_tuning(text: str, path: str, nodes: Nodes, hosts: Sequence[str], cores: int) -> Tuning:
    """Parse the network of a job with these nodes, hosts of every rank, and cores of the smallest host.

    Raises: ValueError if the file describes other nodes.
    """
    where, names = f"COLLECTIVES_TUNING={path}", host_names(hosts, nodes)
    described = parse(text, where)
    in_file, own = ([len(node) for node in each] for each in (described.nodes, nodes))
    if described.hosts and [*described.hosts] != names:
        what = f"it has the hosts {in_short(described.hosts)}, but the job {in_short(names)}"
    elif in_file != own:
        what = f"it has nodes of {in_short(in_file)} ranks, but the job of {in_short(own)}"
    else:
        network = described.network._replace(cores=min(cores, described.network.cores))
        return Tuning(network, path, defaults=network)
    raise ValueError(f"{where}: {what}: measure these by python -m collectives.bench --links {path}, or unset it")


def host_names(names: Sequence[str], nodes: Nodes) -> list[str]:
    """Return the name of each node's host, of every rank's; a host that plays several nodes has a number on each.

    >>> host_names(["a", "a", "b"], ((0, 1), (2,))), host_names(["a", "a"], ((0,), (1,)))
    (['a', 'b'], ['a-1', 'a-2'])
    """
    own = [names[node[0]] for node in nodes]
    numbers = [own[: nth + 1].count(name) for nth, name in enumerate(own)]
    return [f"{name}-{number}" * (own.count(name) > 1) or name for name, number in zip(own, numbers, strict=True)]


def in_short(values: Sequence[Any]) -> str:
    """Format values, four of them at most.

    >>> in_short([8, 8, 4]), in_short(["a"] * 6)
    ('8, 8, 4', 'a, a, a, a, ... (6)')
    """
    return ", ".join(map(str, values[:4])) + (f", ... ({len(values)})" if len(values) > 4 else "")


def from_toml(text: str) -> tuple[Nodes, Network]:
    """Parse a file into the ranks of each node and the speeds.

    Numbers are decimal until they are in seconds, so that what `to_toml` writes is read as the same number.
    """
    values = tomllib.loads(text, parse_float=Decimal)
    refuse_unknown(values, ("levels", "rank", "ranks"), "")
    levels = values.get("levels", [])
    if not isinstance(levels, list) or not levels or not all(isinstance(level, dict) for level in levels):
        raise ValueError("there are no levels: write a table [[levels]] for a node's ranks, one for nodes, ...")
    for number, level in enumerate(levels, 1):
        refuse_unknown(level, KEYS if number > 1 else KEYS[:3], f"level {number}: ")
    sizes = [whole(level, "size", RANKS, f"level {number}: ") for number, level in enumerate(levels, 1)]
    ranks = whole({"ranks": math.prod(sizes)} | values, "ranks", RANKS, "")
    links = [link_of(level, f"level {number}: ") for number, level in enumerate(levels, 1)]
    ports = [port_of(level, f"level {number}: ") for number, level in enumerate(levels, 1)]
    nodes_of = [math.prod(sizes[1:level]) for level in range(2, len(levels))]
    tiers = tuple(map(Tier, nodes_of, links[2:], ports[2:]))
    network = rank_speeds(values.get("rank", {}))._replace(within=links[0], tiers=tiers)
    if len(levels) > 1:
        network = network._replace(between=links[1], nic=ports[1])
    return tuple(map(tuple, laid(0, node_lengths(ranks, sizes[0])))), network


def node_lengths(ranks: int, length: int) -> list[int]:
    return [min(length, ranks - first) for first in range(0, ranks, length)]


def refuse_unknown(table: Mapping[str, Any], keys: Sequence[str], where: str) -> None:
    for key in table:
        if key not in keys:
            raise ValueError(f"{where}{key} is not a key{nearest(key, keys)}: use {', '.join(keys)}")


def whole(table: Mapping[str, Any], key: str, values: Range, where: str) -> int:
    value = table.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value not in values:
        raise ValueError(f"{where}{key}={shown(value)} must be a whole number {values}")
    return value


def shown(value: Any) -> str:
    return "nothing" if value is None else str(value)


def seconds_of(table: Mapping[str, Any], key: str, where: str) -> float:
    """Return a time in seconds, of one in microseconds."""
    return float(decimal(table, key, TIME, where) / 10**6)


def s_per_byte_of(table: Mapping[str, Any], key: str, where: str) -> float:
    """Return the time of a byte, of a speed, which may be infinite."""
    if table.get(key) == Decimal("inf"):
        return 0.0
    return float(1 / (decimal(table, key, SPEED, where) * 10**9))


def decimal(table: Mapping[str, Any], key: str, values: Range, where: str) -> Decimal:
    value = table.get(key)
    if not isinstance(value, int | Decimal) or isinstance(value, bool) or float(value) not in values:
        raise ValueError(f"{where}{key}={shown(value)} must be a number {values}")
    return Decimal(value)


def link_of(level: Mapping[str, Any], where: str) -> Link:
    return Link(seconds_of(level, "latency_us", where), s_per_byte_of(level, "gb_per_s", where))


def port_of(level: Mapping[str, Any], where: str) -> Link | None:
    if not {"port_latency_us", "port_gb_per_s"} & level.keys():
        return None
    latency = seconds_of({"port_latency_us": 0} | dict(level), "port_latency_us", where)
    return Link(latency, s_per_byte_of(level, "port_gb_per_s", where))


def rank_speeds(table: Any) -> Network:
    """Parse the table of what a rank does by itself into a network with these speeds."""
    if not isinstance(table, dict):
        raise ValueError(f"rank={shown(table)} must be a table [rank]: write one, or remove it")
    refuse_unknown(table, OF_RANK, "rank: ")
    system = NETWORK.system
    if SYSTEM[0] in table or SYSTEM[1] in table:
        system = Link(seconds_of(table, SYSTEM[0], "rank: "), s_per_byte_of(table, SYSTEM[1], "rank: "))
    changes: dict[str, Any] = {RATES[key]: s_per_byte_of(table, key, "rank: ") for key in RATES if key in table}
    changes |= {TIMES[key]: seconds_of(table, key, "rank: ") for key in TIMES if key in table}
    changes |= {OTHERS[key]: whole(table, key, COUNTS, "rank: ") for key in OTHERS if key in table}
    return NETWORK._replace(system=system, **changes)


def to_toml(nodes: Nodes, network: Network) -> str:
    """Format a network as a file that `read` reads as the same.

    Raises: ValueError for nodes of different lengths, which have no levels.
    """
    ranks, length = sum(map(len, nodes)), len(nodes[0])
    if list(map(len, nodes)) != node_lengths(ranks, length):
        raise ValueError("nodes with different numbers of ranks are not a file's levels: pass --ranks")
    units = [length, *(tier.nodes * length for tier in network.tiers)]  # ranks of a node and of each group
    sizes = [length, *(outer // inner for inner, outer in pairwise(units)), -(-ranks // units[-1])]
    levels = [(network.within, None), (network.between, network.nic), *(tier[1:] for tier in network.tiers)]
    lines = [f"ranks = {ranks}"] * (ranks != math.prod(sizes))
    for size, (link, port) in zip(sizes, levels, strict=True):
        lines += ["", "[[levels]]", f"size = {size}", *link_lines("", link)]
        lines += link_lines("port_", port) if port else []
    lines += ["", "[rank]"]
    lines += [f"{key} = {gb_per_s(getattr(network, name))}" for key, name in RATES.items()]
    lines += [f"{key} = {in_us(getattr(network, name))}" for key, name in TIMES.items()]
    lines += [f"{key} = {text}" for key, text in zip(SYSTEM, in_units(network.system), strict=True)]
    lines += [f"{key} = {int(getattr(network, name))}" for key, name in OTHERS.items()]
    return "\n".join(lines).strip() + "\n"


def link_lines(prefix: str, link: Link) -> list[str]:
    latency, rate = in_units(link)
    return [f"{prefix}latency_us = {latency}", f"{prefix}gb_per_s = {rate}"]


def in_units(link: Link) -> tuple[str, str]:
    return in_us(link.alpha_s), gb_per_s(link.beta_s_per_byte)


def in_us(seconds: float) -> str:
    """Format a time in microseconds.

    >>> in_us(9.6e-6), in_us(0.0)
    ('9.6', '0.0')
    """
    return plain(Decimal(repr(seconds)) * 10**6)


def gb_per_s(s_per_byte: float) -> str:
    """Format a speed with as few digits as it takes to be read as the same.

    >>> gb_per_s(1 / (18 * 20.6e9)), gb_per_s(2e-11), gb_per_s(0.0)
    ('370.8', '50.0', 'inf')
    """
    if not s_per_byte:
        return "inf"
    rate = 1 / (Decimal(repr(s_per_byte)) * 10**9)
    texts = (f"{rate:.{digits}g}" for digits in range(1, DIGITS + 1))
    return plain(next((d for text in texts if float(1 / ((d := Decimal(text)) * 10**9)) == s_per_byte), rate))


def plain(number: Decimal) -> str:
    """Format a number without an exponent, as a float of TOML."""
    text = f"{number.normalize():f}"
    return text if "." in text else f"{text}.0"
