"""Measured speeds of links, kept for the next job on the same hosts.

`python -m collectives.bench` measures and keeps them; `algorithm="auto"` uses them, and never measures.  There is a
file for each list of hosts, in the user's cache folder, or where COLLECTIVES_LINKS says.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from collectives.job import environment
from collectives.runtime.choose.auto import network_to_json, parse_network, take
from collectives.schedule.cost import Network

VERSION = 1
LONGEST_MEETING_S = 1e-3  # of a node's barrier, and of a short message inside it, with cores of its own
LEAST_BYTES_PER_S = 2e8  # at which a rank copies or reduces


class LinkKey(NamedTuple):
    """The hosts whose links were measured: each node's host name and number of ranks, and the MPI library."""

    hosts: tuple[tuple[str, int], ...]
    mpi: str

    @property
    def file(self) -> Path | None:
        """The file of these hosts; None if measurements are not to be kept."""
        return environment.kept_file("links", self)


class CachedLinks(NamedTuple):
    """Measured speeds, and where they were measured."""

    place: LinkKey
    network: Network


def place(names: Sequence[str], nodes: Sequence[Sequence[int]], mpi: str) -> LinkKey:
    """Make a key from the host name of every rank.

    >>> place(["a", "a", "b"], ((0, 1), (2,)), "MPICH 5.0.2").hosts
    (('a', 2), ('b', 1))
    """
    return LinkKey(tuple((names[node[0]], len(node)) for node in nodes), mpi)


def any_cached() -> bool:
    folder = environment.links_folder()
    try:
        return folder is not None and any(folder.glob("links-*.json"))
    except OSError:
        return False


def read(path: Path | None) -> str:
    """Return a file's text; nothing if it can't be read."""
    try:
        return path.read_text(errors="replace") if path else ""
    except OSError:
        return ""


def doubt(network: Network) -> str:
    """Return why speeds can't be those of an idle machine; empty if they can.

    >>> from collectives.schedule.cost import NETWORK
    >>> doubt(NETWORK), doubt(NETWORK._replace(meet_s=0.041))
    ('', 'a meeting in a node took 41 ms')
    """
    for what, seconds in (("a meeting", network.meet_s), ("a message", network.within.alpha_s)):
        if seconds > LONGEST_MEETING_S:
            return f"{what} in a node took {seconds * 1e3:.3g} ms"
    for what, s_per_byte in (("copied", network.copy_s_per_byte), ("reduced", network.gamma_s_per_byte)):
        if s_per_byte * LEAST_BYTES_PER_S > 1:
            return f"a rank {what} {1e-6 / s_per_byte:.3g} MB/s"
    return ""


def parse(text: str) -> CachedLinks | None:
    """Parse a file; None for one that is invalid or implausible, which the next measurement replaces."""
    try:
        data = json.loads(text)
        if take(data, "version", int) != VERSION:
            return None
        hosts = tuple((str(name), int(ranks)) for name, ranks in take(data, "hosts", list))
        network = parse_network(take(data, "network", dict))
        return None if doubt(network) else CachedLinks(LinkKey(hosts, take(data, "mpi", str)), network)
    except (ValueError, TypeError):
        return None


def save(links: CachedLinks) -> str:
    """Write the measured speeds; returns the path, or why they are not written."""
    path = links.place.file
    if path is None:
        return "not kept (COLLECTIVES_LINKS=0)"
    if why := doubt(links.network):
        return f"not kept ({why}, as where others use the cores): measure again when the machine is quiet"
    data: dict[str, Any] = {"version": VERSION, **links.place._asdict(), "network": network_to_json(links.network)}
    return environment.keep(path, data)


def load_latest() -> CachedLinks | None:
    """Return the latest measured speeds, of any hosts."""
    folder = environment.links_folder()
    files = sorted(folder.glob("links-*.json"), key=lambda path: path.stat().st_mtime) if folder else []
    return next((links for path in reversed(files) if (links := parse(read(path)))), None)
