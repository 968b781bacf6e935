"""Measured speeds of links, kept for the next job on the same hosts.

`python -m collectives.bench` measures and keeps them; `algorithm="auto"` uses them, and never measures.  There is a
file for each list of hosts, in the user's cache folder, or where COLLECTIVES_LINKS says.
"""

import json
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import median_low
from typing import Any, NamedTuple

from collectives.job import environment
from collectives.runtime.choose.auto import network_to_json, parse_network, take
from collectives.schedule.network import NETWORK, Link, Network

VERSION = 1
LONGEST_BARRIER_S = 2e-5  # of a node's ranks, with cores of their own; two cores of a server take 0.5 us
LONGEST_MESSAGE_S = 6e-5  # of a few bytes, inside a node; two cores of a server take 3 us
LEAST_BYTES_PER_S = 2e8  # at which a rank copies or reduces
MOST_APART = 2  # the second least time of several rounds, as a multiple of the least
DIFFERENCES = ("system", "staged_s_per_byte")  # of measured times, which may be near 0

# What is shown of them beside the defaults: between nodes, where there are several; in this unit.
SHOWN: tuple[tuple[str, bool, float, str, Callable[[Network], float]], ...] = (
    ("barrier of a node", False, 1e6, "us", lambda network: network.meet_s),
    ("message in a node", False, 1e6, "us", lambda network: network.within.alpha_s),
    ("  and each KB", False, 1e9, "us", lambda network: network.within.beta_s_per_byte),
    ("message between nodes", True, 1e6, "us", lambda network: network.between.alpha_s),
    ("  and each KB", True, 1e9, "us", lambda network: network.between.beta_s_per_byte),
    ("copy of a KB", False, 1e9, "us", lambda network: network.copy_s_per_byte),
    ("reduction of a KB", False, 1e9, "us", lambda network: network.gamma_s_per_byte),
)


class LinkKey(NamedTuple):
    """The hosts whose links were measured: each node's host name and number of ranks, and the MPI library."""

    hosts: tuple[tuple[str, int], ...]
    mpi: str

    @property
    def file(self) -> Path | None:
        """The file of these hosts; None if measurements are not to be kept."""
        return environment.kept_file("links", self)


class CachedLinks(NamedTuple):
    """Measured speeds, and where and when they were measured."""

    key: LinkKey
    network: Network
    measured: str = ""  # date and time in UTC; earlier versions did not write it


def key_of(names: Sequence[str], nodes: Sequence[Sequence[int]], mpi: str) -> LinkKey:
    """Make a key from the host name of every rank.

    >>> key_of(["a", "a", "b"], ((0, 1), (2,)), "MPICH 5.0.2").hosts
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

    >>> from collectives.schedule.network import NETWORK
    >>> doubt(NETWORK), doubt(NETWORK._replace(meet_s=47e-6))
    ('', 'a barrier of a node took 47 us')
    """
    for what, seconds, longest_s in (
        ("a barrier of", network.meet_s, LONGEST_BARRIER_S),
        ("a message in", network.within.alpha_s, LONGEST_MESSAGE_S),
    ):
        if seconds > longest_s:
            return f"{what} a node took {seconds * 1e6:.3g} us"
    for what, s_per_byte in (("copied", network.copy_s_per_byte), ("reduced", network.gamma_s_per_byte)):
        if s_per_byte * LEAST_BYTES_PER_S > 1:
            return f"a rank {what} {1e-6 / s_per_byte:.3g} MB/s"
    return ""


def combine(rounds: Sequence[Network]) -> tuple[Network, str]:
    """Combine the speeds that were measured in several rounds, and return why they can't be used, if so.

    Each is the least of the rounds, with which another round must agree; of differences it is the median.

    >>> from collectives.schedule.network import NETWORK
    >>> rounds = [NETWORK._replace(meet_s=seconds) for seconds in (47e-6, 1e-6, 20e-6)]
    >>> network, why = combine(rounds)
    >>> network.meet_s, why
    (1e-06, 'rounds of a barrier took 1 to 47 us')
    """
    values = {name: [getattr(network, name) for network in rounds] for name in Network._fields}
    combined = Network(
        **{name: middle(times) if name in DIFFERENCES else least(times) for name, times in values.items()}
    )
    if combined.nic:  # of which the latency is a difference
        combined = combined._replace(nic=combined.nic._replace(alpha_s=middle([nic.alpha_s for nic in values["nic"]])))
    for what, times in (
        ("a barrier", values["meet_s"]),
        ("a message in a node", [link.alpha_s for link in values["within"]]),
        ("copying a MB", [1e6 * seconds for seconds in values["copy_s_per_byte"]]),
        ("reducing a MB", [1e6 * seconds for seconds in values["gamma_s_per_byte"]]),
    ):
        ascending = sorted(times)
        if len(times) > 1 and ascending[1] > MOST_APART * ascending[0]:
            return combined, f"rounds of {what} took {ascending[0] * 1e6:.3g} to {ascending[-1] * 1e6:.3g} us"
    return combined, doubt(combined)


def least(times: Sequence[Any]) -> Any:
    """Return the least time, or the link with the least of each, or None where one was not measured."""
    if None in times:
        return None
    return Link(*map(min, zip(*times, strict=True))) if isinstance(times[0], Link) else min(times)


def middle(times: Sequence[Any]) -> Any:
    if None in times:
        return None
    return Link(*map(median_low, zip(*times, strict=True))) if isinstance(times[0], Link) else median_low(times)


def parse(text: str) -> CachedLinks | None:
    """Parse a file; None for one that is invalid or implausible, which the next measurement replaces."""
    try:
        data = json.loads(text)
        if take(data, "version", int) != VERSION:
            return None
        hosts = tuple((str(name), int(ranks)) for name, ranks in take(data, "hosts", list))
        network = parse_network(take(data, "network", dict))
        links = CachedLinks(LinkKey(hosts, take(data, "mpi", str)), network, str(data.get("measured", "")))
        return None if doubt(network) else links
    except (ValueError, TypeError):
        return None


def save(links: CachedLinks, why_not: str = "") -> str:
    """Write the measured speeds, unless there is a reason not to; return the path, or why they are not written."""
    path = links.key.file
    if path is None:
        return "not kept (COLLECTIVES_LINKS=0)"
    if why := why_not or doubt(links.network):
        return f"not kept ({why}, as where others use the cores): measure again when the machine is quiet"
    data: dict[str, Any] = {"version": VERSION, **links.key._asdict(), "network": network_to_json(links.network)}
    return environment.keep(path, data | {"measured": datetime.now(UTC).strftime("on %Y-%m-%d %H:%M UTC")})


def files() -> list[Path]:
    """Return the files of all hosts, the latest last."""
    folder = environment.links_folder()
    return sorted(folder.glob("links-*.json"), key=lambda path: path.stat().st_mtime) if folder else []


def load_latest() -> CachedLinks | None:
    """Return the latest measured speeds, of any hosts."""
    return next((links for path in reversed(files()) if (links := parse(read(path)))), None)


def describe(path: Path) -> str:
    """Return what a file has, its age, and the default speeds beside it, in a few lines.

    The age is that of the file.
    """
    days = (datetime.now(UTC) - datetime.fromtimestamp(path.stat().st_mtime, UTC)).total_seconds() / 86400
    head = f"{path}: {days:.1f} days old"
    links = parse(read(path))
    if links is None:
        return f"{head}, not used: invalid, or measured on a busy machine"
    hosts = ", ".join(f"{ranks} ranks on {name}" for name, ranks in links.key.hosts)
    lines = [f"{head}: {hosts}; {links.key.mpi}", f"  {'measured':>34}{'default':>10}"]
    for what, is_between, scale, unit, of in SHOWN:
        if not is_between or len(links.key.hosts) > 1:
            measured, default = (of(network) * scale for network in (links.network, NETWORK))
            lines.append(f"  {what:<24}{measured:10.3g}{default:10.3g} {unit}")
    return "\n".join(lines)


def forget() -> list[Path]:
    """Delete all that is kept; return the deleted files."""
    deleted = files()
    for path in deleted:
        path.unlink(missing_ok=True)
    return deleted
