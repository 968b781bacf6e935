"""Compare the simulator's all_reduce with published results (published_collectives.toml).  No MPI is needed.

    python benchmarks/published_collectives.py
    python benchmarks/published_collectives.py --rows

A network has the makers' peaks, times one efficiency for each kind of link: the one with which the median error is 0 in
half of the rows of that kind, drawn by a seed, which `--rows` prints; the other half is only for this report.  A row is
of the kind of its slowest links: those between nodes, if there are several.  GPUs reduce as fast as they receive.

The prediction is the price of the best of the library's schedules.  What switches reduce is listed apart, beside a
prediction without.
"""

from __future__ import annotations

import random
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from helpers.result_files import output, write

from collectives.job.settings import Parser
from collectives.schedule.cost import predict_best
from collectives.schedule.fabrics import NETWORK_HOP_S, NVLINK_HOP_S, in_nodes
from collectives.schedule.network import Link, Network, Nodes
from collectives.schedule.simulate import choose_algorithms

FILE = Path(__file__).with_name("published_collectives.toml")
SEED = 2026
GIB = 1 << 30
EFFICIENCY = {"nvlink": 0.777, "infiniband": 0.944, "slingshot": 0.892, "efa": 1.0}  # of the peak, at most all of it
HALVES = ("seen", "unseen", "in network")


class Row(NamedTuple):
    """A published result: its source and what it states, the fabric, and in which half it is."""

    source: str
    values: Mapping[str, Any]
    fabric: Mapping[str, Any]
    half: str

    @property
    def kind(self) -> str:
        """The kind of the slowest links."""
        return self.fabric["between" if self.values["nodes"] > 1 else "within"]

    @property
    def ranks_per_node(self) -> int:
        return self.values.get("gpus", self.fabric["gpus"])

    @property
    def nodes(self) -> Nodes:
        return in_nodes(self.values["nodes"] * self.ranks_per_node, self.ranks_per_node)

    @property
    def seconds(self) -> float:
        """The published time: a bus bandwidth is that of 2 (p-1)/p of the vector."""
        return self.bus_gb / self.values["busbw"]

    @property
    def bus_gb(self) -> float:
        size = self.values["nodes"] * self.ranks_per_node
        return 2 * (size - 1) / size * self.values["gib"] * GIB / 1e9

    @property
    def network(self) -> Network:
        """The network, in which a rank uses one of its node's ports, or its part of several if there are more."""
        fabric = self.fabric
        within = 1e9 * fabric["within_gb_per_s"] * EFFICIENCY[fabric["within"]]
        port = 1e9 * fabric["port_gb_per_s"] * EFFICIENCY[fabric["between"]]
        return Network(
            within=Link(NVLINK_HOP_S, 1 / within),
            between=Link(NETWORK_HOP_S, 1 / port / max(1, fabric["ports"] / self.ranks_per_node)),
            nic=Link(0.0, 1 / port / fabric["ports"]),
            gamma_s_per_byte=0.0,
            copy_s_per_byte=0.0,
            pull_s_per_byte=1 / within,
            meet_s=NVLINK_HOP_S,
        )

    def predicted(self) -> tuple[float, str]:
        """Return the seconds of the best schedule, and its name."""
        nodes, nbytes = self.nodes, round(self.values["gib"] * GIB)
        size = sum(map(len, nodes))
        rows = choose_algorithms("all_reduce", None, nodes)
        return min((predict_best(row, nbytes, size, nodes, 0, self.network)[1], row.name) for row in rows)


def rows() -> Iterator[Row]:
    """Yield the rows of the file, half of each kind of link as seen."""
    table = tomllib.loads(FILE.read_text(encoding="utf-8"))
    listed = []
    for source in table["sources"]:
        for values in source["rows"]:
            stated = source["common"] | dict(zip(source["columns"], values, strict=True))
            half = "in network" if stated.get("in_network") else "unseen"
            listed.append(Row(source["name"], stated, table["fabrics"][stated["fabric"]], half))
    draws = random.Random(SEED)
    seen: set[int] = set()
    for kind in EFFICIENCY:
        own = [number for number, row in enumerate(listed) if row.kind == kind and row.half == "unseen"]
        seen |= {*draws.sample(own, len(own) // 2)}
    for number, row in enumerate(listed):
        yield row._replace(half="seen") if number in seen else row


class Result(NamedTuple):
    """A row, the predicted seconds and the schedule's name."""

    row: Row
    seconds: float
    name: str

    @property
    def error(self) -> float:
        """The predicted bus bandwidth's relative difference from what was published."""
        return self.row.seconds / self.seconds - 1


def main(arguments: Sequence[str] | None = None) -> None:
    parser = Parser("python benchmarks/published_collectives.py", __doc__)
    parser.add_argument("--rows", action="store_true", help="print the rows on which efficiencies may be chosen, only")
    parser.add_argument("--output", type=output, help="JSON file for the results")
    flags = parser.parse_args(arguments)
    wanted = [row for row in rows() if row.half == "seen" or not flags.rows]
    results = [Result(row, *row.predicted()) for row in wanted]
    print(*map(line, sorted(results, key=lambda result: HALVES.index(result.row.half))), *report(results), sep="\n")
    if flags.output:
        write(flags.output, [record(result) for result in results])


def report(results: Sequence[Result]) -> Iterator[str]:
    """Yield a line for each half of the rows of each kind of link, and of all."""
    yield f"{'links':<12} {'half':<7} {'rows':>4} {'median':>7} {'worst':>7} {'within 15%':>10}"
    for kind in [*EFFICIENCY, "all"]:
        for half in HALVES[:2]:
            own = [abs(each.error) for each in results if each.row.half == half and kind in (each.row.kind, "all")]
            if own:
                good = f"{sum(error <= 0.15 for error in own)}/{len(own)}"
                yield f"{kind:<12} {half:<7} {len(own):>4} {median(own):>7.1%} {max(own):>7.1%} {good:>10}"


def line(result: Result) -> str:
    row = result.row
    size = f"{row.values['nodes']} x {row.ranks_per_node}, {row.values['gib']} GiB"
    busbw = f"{row.bus_gb / result.seconds:>6.1f} of {row.values['busbw']:>6.1f} GB/s {result.error:>+7.1%}"
    return f"{row.source:<22} {row.half:<10} {size:<18} {busbw}  {result.name}"


def record(result: Result) -> dict[str, Any]:
    row = result.row
    names = ("fabric", "nodes", "gib", "busbw")
    stated = {"source": row.source, "half": row.half, **{name: row.values[name] for name in names}}
    return stated | {
        "gpus": row.ranks_per_node,
        "predicted": round(row.bus_gb / result.seconds, 2),
        "schedule": result.name,
    }


if __name__ == "__main__":
    main(sys.argv[1:])
