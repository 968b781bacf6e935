"""A cluster file: hosts of different speed, memory and links, in TOML, as the planner measures or a user writes them.

    [[hosts]]
    name = "node1"
    ranks = 8
    tflops = 1.5        # of a rank, as the model's blocks achieve them
    memory = 16.0       # of a rank, in GB
    gbit = 100.0        # of the link to other hosts, in Gbit/s; by default the network's

An optional table `network` has the fields of `collectives.schedule.cost.Network`; `least_pass` is the least time of a
block's pass in us, `sync` the time in us for which busy ranks wait for each other in a collective, and `update` that of
an element's update in ns; `overlaps = false` says that no communication proceeds while a rank computes, as on CPUs.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

from collectives.job.settings import Range, check, nearest, refusal
from collectives.runtime.choose.auto import network_to_json, parse_network
from collectives.schedule.network import Network, Nodes, with_rate
from parallelism.planner import ranges
from parallelism.planner.place import Host, Machine
from parallelism.planner.settings import read_toml

GIGABYTE, GIGABIT = 1e9, 1e9 / 8  # in bytes
TIMES = {"least_pass": 1e6, "sync": 1e6, "update": 1e9}  # keys, and the units in a second
KEYS = ("hosts", "network", *TIMES, "overlaps")
LEAST_PASS_S = 5e-5  # a typical value, from no source
MICROSECONDS = Range(0, 10**9, unit="us")
NANOSECONDS = Range(0, 10**9, unit="ns")


def number(unit: str, most: float = 10**6, **more: Any) -> Any:
    return field(metadata={"range": Range(0, most, open="above", unit=unit)}, **more)


@dataclass(frozen=True)
class ClusterHost:
    """A host: its number of ranks, the speed and memory of each, and the rate of the host's link to others.

    Raises: ValueError for invalid values.
    """

    name: str
    ranks: int = field(metadata={"range": ranges.RANKS})
    tflops: float = number("TFLOP/s")
    memory: float = number("GB")
    gbit: float | None = number("Gbit/s", default=None)

    def __post_init__(self) -> None:
        check(self)


class Cluster(NamedTuple):
    """Hosts in the order of their ranks, the network if it has been measured, and times as of `Machine`."""

    hosts: Sequence[ClusterHost]
    network: Network | None = None
    least_pass_s: float = LEAST_PASS_S
    overlaps: bool = True
    update_s: float = 0.0
    sync_s: float = 0.0

    @property
    def nodes(self) -> Nodes:
        begins = [sum(host.ranks for host in self.hosts[:index]) for index in range(len(self.hosts))]
        return tuple(tuple(range(begin, begin + host.ranks)) for begin, host in zip(begins, self.hosts, strict=True))

    def machine(self, network: Network, spare: float) -> Machine:
        """Return the planner's machine with a network that has the rate of the fastest host's link."""
        tflops, memory = (max(getattr(host, name) for host in self.hosts) for name in ("tflops", "memory"))
        gbit = max((host.gbit for host in self.hosts if host.gbit), default=None)
        hosts = tuple(
            Host(host.tflops / tflops, host.memory / memory, host.gbit / gbit if host.gbit and gbit else 1.0)
            for host in self.hosts
        )
        if gbit:
            network = with_rate(network, gbit * GIGABIT * network.gate.beta_s_per_byte)
        usable = memory * GIGABYTE * (1 - spare)
        is_even = len({*hosts}) == 1
        hosts = () if is_even else hosts
        own = Machine(self.nodes, network, tflops * 1e12, usable, self.least_pass_s, hosts, self.overlaps)
        return own._replace(update_s=self.update_s, sync_s=self.sync_s)

    def refuse_other_hosts(self, hostfile: Path) -> None:
        """Raise ValueError if the job's hostfile has other hosts."""
        names, own = hosts_in(hostfile), [host.name for host in self.hosts]
        for name in own:
            if name not in names:
                has = f"which has {', '.join(names)}"
                raise ValueError(f"host {name} is not in {hostfile}, {has}: remove it, or add it there")
        for name in names:
            if name not in own:
                raise ValueError(f"host {name} of {hostfile} is missing: add it, or measure the cluster again")

    def __str__(self) -> str:
        """Format the cluster as a file that `read` reads."""
        lines = [f"{name} = {units * getattr(self, f'{name}_s'):.4g}" for name, units in TIMES.items()]
        lines.append(f"overlaps = {in_toml(self.overlaps)}")
        for host in self.hosts:
            stated = {name: value for name, value in asdict(host).items() if value is not None}
            lines += ["", "[[hosts]]", *(f"{name} = {in_toml(value)}" for name, value in stated.items())]
        if self.network:
            stated = {name: value for name, value in network_to_json(self.network).items() if value is not None}
            lines += ["", "[network]", *(f"{name} = {in_toml(value)}" for name, value in stated.items())]
        return "\n".join(lines).strip() + "\n"


def in_toml(value: Any) -> str:
    """Format a text, a number, a table without what is None in it, or a list.

    >>> in_toml("node 1"), in_toml(8), in_toml(0.123456789), in_toml([{"alpha_s": 3e-06, "port": None}])
    ('"node 1"', '8', '0.12346', '[{ alpha_s = 3e-06 }]')
    """
    if isinstance(value, dict):
        stated = {name: each for name, each in value.items() if each is not None}
        return f"{{ {', '.join(f'{name} = {in_toml(each)}' for name, each in stated.items())} }}"
    if isinstance(value, list):
        return f"[{', '.join(map(in_toml, value))}]"
    return f"{value:.5g}" if isinstance(value, float) else json.dumps(value, ensure_ascii=False)


def read(path: Path) -> Cluster:
    """Read a cluster file; raise ValueError with its name, the fault and the remedy."""
    values = read_toml(path)
    try:
        for key in values:
            if key not in KEYS:
                raise ValueError(f"{key} is not a key{nearest(key, KEYS)}: use {', '.join(KEYS)}")
        tables = values.get("hosts", [])
        if not tables or not all(isinstance(table, dict) for table in tables):
            raise ValueError("there are no hosts: write a table [[hosts]] for each")
        hosts = [host_of(table, index) for index, table in enumerate(tables, 1)]
        names = [host.name for host in hosts]
        ranks = sum(host.ranks for host in hosts)
        if ranks not in ranges.RANKS:
            raise ValueError(f"the hosts have {ranks} ranks: use {ranges.RANKS.most} at most")
        if twice := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"host {twice[0]} is there twice: write one table, with all of its ranks")
        if not isinstance(values.get("network", {}), dict):
            raise ValueError(f"network={values['network']!r} must be a table [network]: write one, or remove it")
        network = parse_network(values["network"]) if "network" in values else None
        times_s = {}
        for name, units in TIMES.items():
            value = values.get(name, units * Cluster._field_defaults[f"{name}_s"])
            if why := refusal(name, value, float, {"range": NANOSECONDS if units == 1e9 else MICROSECONDS}):
                raise ValueError(why)
            times_s[f"{name}_s"] = value / units
        if why := refusal("overlaps", overlaps := values.get("overlaps", True), bool, {}):
            raise ValueError(why)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return Cluster(hosts, network, overlaps=overlaps, **times_s)


def host_of(table: dict[str, Any], index: int) -> ClusterHost:
    who = f"host {table.get('name', index)}"
    names = [each.name for each in fields(ClusterHost)]
    for key in table:
        if key not in names:
            raise ValueError(f"{who}: {key} is not a key{nearest(key, names)}: use {', '.join(names)}")
    if missing := [name for name in names if name not in table and name != "gbit"]:
        raise ValueError(f"{who}: {missing[0]} is missing: add it")
    try:
        return ClusterHost(**table)
    except ValueError as error:
        raise ValueError(f"{who}: {error}") from None


def hosts_in(hostfile: Path) -> list[str]:
    """Return the names in a hostfile of Open MPI ("node1 slots=2") or MPICH ("node1:2")."""
    try:
        lines = [line.partition("#")[0].split() for line in hostfile.read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{hostfile}: can't be read ({error}); check the path") from None
    return list(dict.fromkeys(words[0].partition(":")[0] for words in lines if words))
