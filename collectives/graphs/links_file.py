"""A graph of links as a file that people write: links.toml.

    ranks = ["a", "b"]          # each vertex that is a rank, in the ranks' order
    switches = ["tor"]          # each that isn't

    [[host]]                    # a vertex that isn't a rank, with ranks of its own, which are named fat.0 and fat.1
    name = "fat"
    ranks = 2
    gb_per_s = 50               # of the link between the host and each of its ranks
    us = 0.5

    [[link]]
    between = ["fat", "tor"]    # in both directions; or a list of such pairs, which are links alike
    gb_per_s = 12.5
    us = 1.0

    [[link]]
    from = "a"                  # in one direction
    to = "tor"
    gb_per_s = 12.5
    us = 1.0

The ranks of hosts follow those of `ranks`.
"""

import json
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from collectives.graphs.graph import LinkGraph, directed

MOST_RANKS = 1024
NUMBER = (int, float)
KEYS: dict[str, dict[str, Any]] = {
    "": {"ranks": list, "switches": list, "host": list, "link": list},
    "host": {"name": str, "ranks": int, "gb_per_s": NUMBER, "us": NUMBER},
    "link": {"between": list, "from": str, "to": str, "gb_per_s": NUMBER, "us": NUMBER},
}
KINDS: dict[Any, str] = {list: "a list", str: "a string", int: "a whole number", NUMBER: "a number"}
Edge = tuple[str, str, float, float]


def read_links(path: str | Path) -> LinkGraph:
    """Read a graph from a file.

    Raises: ValueError for a file that isn't such a graph, in one line with the value and the remedy; OSError.
    """
    try:
        return parse_links(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def parse_links(text: str) -> LinkGraph:
    """Return the graph that a file's text describes.

    >>> graph = parse_links('ranks = ["a", "b"]\\n[[link]]\\nbetween = ["a", "b"]\\ngb_per_s = 10\\nus = 1')
    >>> graph.names, [link.gb_per_s for link in graph.links]
    (('a', 'b'), [10.0, 10.0])
    """
    try:
        table = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ValueError(f"it is not TOML: {error}: write it like examples/links/ring.toml") from None
    check_table(table, "")
    ranks, switches = names_of(table, "ranks"), names_of(table, "switches")
    edges: list[Edge] = []
    for host in tables(table, "host"):
        if not 1 <= required(host, "ranks", "host") <= MOST_RANKS:
            raise ValueError(f"[[host]] ranks = {host['ranks']} must be from 1 to {MOST_RANKS}")
        name, speed = required(host, "name", "host"), speed_of(host, "host")
        own = [f"{name}.{rank}" for rank in range(host["ranks"])]
        ranks += own
        switches.append(name)
        edges += [edge for rank in own for edge in ((rank, name, *speed), (name, rank, *speed))]
    for link in tables(table, "link"):
        speed = speed_of(link, "link")
        edges += [(*ends, *speed) for ends in ends_of(link)]
    if len(ranks) > MOST_RANKS:
        raise ValueError(f"it has {len(ranks)} ranks: use {MOST_RANKS} at most")
    return directed(ranks, switches, edges)


def tables(table: Mapping[str, Any], name: str) -> Iterator[Mapping[str, Any]]:
    """Yield the tables of a name."""
    for each in table.get(name, []):
        if not isinstance(each, dict):
            raise ValueError(f"{name} = {each!r} must be a table: begin it with [[{name}]]")
        check_table(each, name)
        yield each


def check_table(table: Mapping[str, Any], name: str) -> None:
    """Refuse keys that have no meaning, and values of another type."""
    where = f"[[{name}]] " if name else ""
    for key, value in table.items():
        if key not in KEYS[name]:
            raise ValueError(f"{where}{key} is unknown: use {', '.join(KEYS[name])}")
        if not isinstance(value, KEYS[name][key]) or isinstance(value, bool):
            raise ValueError(f"{where}{key} = {value!r} must be {KINDS[KEYS[name][key]]}")


def names_of(table: Mapping[str, Any], key: str) -> list[str]:
    """Return a list of vertices."""
    for name in table.get(key, []):
        if not isinstance(name, str) or not name:
            raise ValueError(f"{key} has {name!r}, which is not a name: write strings")
    return list(table.get(key, []))


def required(table: Mapping[str, Any], key: str, name: str) -> Any:
    if key not in table:
        raise ValueError(f"[[{name}]] {dict(table)} lacks {key}: add it")
    return table[key]


def speed_of(table: Mapping[str, Any], name: str) -> tuple[float, float]:
    return required(table, "gb_per_s", name), required(table, "us", name)


def ends_of(link: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the two ends of each direction."""
    if ("between" in link) == ("from" in link or "to" in link):
        raise ValueError(f"[[link]] {dict(link)} needs between, or from and to: add one of these")
    if "between" not in link:
        yield required(link, "from", "link"), required(link, "to", "link")
        return
    pairs = link["between"]
    for pair in pairs if all(isinstance(each, list) for each in pairs) else [pairs]:
        if len(pair) != 2 or not all(isinstance(name, str) for name in pair):
            raise ValueError(f"[[link]] between = {pair!r} must be two vertices, or a list of such pairs")
        yield pair[0], pair[1]
        yield pair[1], pair[0]


def links_text(graph: LinkGraph) -> str:
    """Return the text of a file with a graph, without hosts.

    >>> print(links_text(parse_links('ranks = ["a", "b"]\\n[[link]]\\nbetween = ["a", "b"]\\ngb_per_s = 10\\nus = 1')))
    ranks = ["a", "b"]
    switches = []
    <BLANKLINE>
    [[link]]
    between = [["a", "b"]]
    gb_per_s = 10.0
    us = 1.0
    <BLANKLINE>
    """
    ranks, switches = (list_of(names) for names in (graph.names[: graph.size], graph.switches))
    speeds = {link[:2]: link[2:] for link in graph.links}
    both = [link for link in graph.links if speeds.get((link.dest, link.source)) == link[2:]]
    text = f"ranks = {ranks}\nswitches = {switches}\n"
    in_order = sorted((link for link in both if link.source < link.dest), key=lambda link: link[2:])
    for speed, links in groupby(in_order, key=lambda link: link[2:]):
        pairs = ", ".join(list_of([graph.names[link.source], graph.names[link.dest]]) for link in links)
        text += f"\n[[link]]\nbetween = [{pairs}]\n" + in_lines(speed)
    for link in (link for link in graph.links if link not in both):
        source, dest = (json.dumps(graph.names[end], ensure_ascii=False) for end in link[:2])
        text += f"\n[[link]]\nfrom = {source}\nto = {dest}\n" + in_lines(link[2:])
    return text


def list_of(names: Sequence[str]) -> str:
    return json.dumps(list(names), ensure_ascii=False)


def in_lines(speed: tuple[float, ...]) -> str:
    return f"gb_per_s = {speed[0]}\nus = {speed[1]}\n"


def write_links(path: str | Path, graph: LinkGraph) -> None:
    """Write a graph to a file."""
    Path(path).write_text(links_text(graph), encoding="utf-8")
