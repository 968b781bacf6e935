"""What a run shows and leaves: a table as nccl-tests prints it, a JSON document, and a tuning file."""

import json
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from collectives.bench.trial import PEERS
from collectives.communicator import Communicator
from collectives.runtime.choose.auto import Case, Tuning, limits, network_to_json
from collectives.runtime.surroundings import surroundings
from collectives.schedule.cost import Network

SCHEMA = 1  # of the document
NOISE = 0.03  # of a time

HEAD = "{:>9} {:>8} {:>8} {:>5} {:>4} {:<20}"
PLACE = "{:>8} {:>6} {:>6} {:>6}"
TAIL = "{:>7} {:>8} {:>3} {:>8} {:>5}"
NAMES = ("size", "count", "type", "redop", "root", "algorithm"), ("min", "p99", "cv", "model", "of")
UNITS = ("(B)", *[""] * 5), ("(us)", "(us)", "%", "(us)", "bound")
PLACE_NAMES, PLACE_UNITS = ("time", "algbw", "busbw", "#wrong"), ("(us)", "(GB/s)", "(GB/s)", "")
EMPTY = ("-",) * 4

Row = dict[str, Any]  # a line of the document
Document = dict[str, Any]


def bus_factor(collective: str, size: int) -> float:
    """Compute what nccl-tests multiplies bytes of vector a second by, for the bytes that a rank's link carries.

    >>> [bus_factor(name, 4) for name in ("all_reduce", "all_gather", "broadcast")]
    [1.5, 0.75, 1.0]
    """
    if collective in ("broadcast", "reduce"):
        return 1.0
    return (2 if collective == "all_reduce" else 1) * (size - 1) / size


def average_gbps(rows: Sequence[Row]) -> float:
    """Average our algorithms, if any were run, else their peers; not barriers, which have no bytes."""
    ours = [row["busbw_gbps"] for row in rows if row["name"] not in PEERS and row["bytes"]]
    rates = ours or [row["busbw_gbps"] for row in rows if row["bytes"]]
    return sum(rates) / len(rates) if rates else 0.0


def fastest(rows: Sequence[Row]) -> str:
    """Name the fastest algorithm of ours, the registry's first of those that noise may tell apart; empty for none."""
    ours = {row["name"]: row["median_us"] for row in rows if row["name"] not in ("auto", *PEERS)}
    return next((name for name in ours if ours[name] <= (1 + NOISE) * min(ours.values())), "")


def describe(network: Network, nodes: Sequence[Sequence[int]]) -> str:
    """Describe the measured speeds."""
    links = {"in a node": network.within} if max(map(len, nodes)) > 1 else {}
    links |= {"between nodes": network.between} if len(nodes) > 1 else {}
    speeds = [
        f"a message {where}: {alpha_s * 1e6:.1f} us + {gbps(beta_s_per_byte)}"
        for where, (alpha_s, beta_s_per_byte) in links.items()
    ]
    speeds.append(f"reduce {gbps(network.gamma_s_per_byte)}, copy {gbps(network.copy_s_per_byte)}")
    return f"# {sum(map(len, nodes))} ranks, {len(nodes)} nodes, {network.cores} cores each; {'; '.join(speeds)}"


def gbps(seconds_per_byte: float) -> str:
    return f"{1e-9 / seconds_per_byte:.1f} GB/s"


def heading(row: Row) -> list[str]:
    """Format what stands above the rows of one collective and kind of memory."""
    where, times = f"{row['memory']} memory" if row["device"] == "cpu" else row["device"], len(row["samples_us"])
    over, width = len(HEAD.format(*[""] * 6)), len(PLACE.format(*EMPTY))
    return [
        "#",
        f"# {row['collective']}, {where}; time: median of {times}, slowest rank; *: by auto, <: our fastest",
        f"#{'':{over}}{'out-of-place':^{width}} {'in-place':^{width}}".rstrip(),
        "#" + line(NAMES[0], PLACE_NAMES, PLACE_NAMES, NAMES[1])[1:],
        "#" + line(UNITS[0], PLACE_UNITS, PLACE_UNITS, UNITS[1])[1:],
    ]


def line(head: Sequence[Any], apart: Sequence[str], in_place: Sequence[str], tail: Sequence[str]) -> str:
    return " ".join([HEAD.format(*head), PLACE.format(*apart), PLACE.format(*in_place), TAIL.format(*tail)]).rstrip()


def lines(rows: Sequence[Row]) -> Iterator[str]:
    """Format a line for each contestant; what is after the places is of the first of them."""
    best = fastest(rows)
    for name in dict.fromkeys(row["name"] for row in rows):
        apart, in_place = (
            next((row for row in rows if (row["name"], row["in_place"]) == (name, place)), None)
            for place in (False, True)
        )
        row: Row = apart or in_place or {}
        root, algorithm = -1 if row["root"] is None else row["root"], row["algorithm"] + "*" * (name == "auto")
        head = row["bytes"], row["count"], row["dtype"], row["op"] or "none", root, algorithm
        percent = "-" if row["bound_percent"] is None else f"{row['bound_percent']:.0f}%"
        model = "-" if row["model_us"] is None else number(row["model_us"])
        tail = number(row["min_us"]), number(row["p99_us"]), f"{row['cv_percent']:.0f}", model, percent
        yield line(head, cells(apart), cells(in_place), tail) + " <" * (name == best)


def cells(row: Row | None) -> Sequence[str]:
    if row is None:
        return EMPTY
    wrong = "N/A" if row["wrong"] is None else str(row["wrong"])
    return number(row["median_us"]), f"{row['algbw_gbps']:.2f}", f"{row['busbw_gbps']:.2f}", wrong


def number(microseconds: float) -> str:
    """Format a time, without digits that say nothing."""
    return f"{microseconds:.{1 if microseconds < 1e4 else 0}f}"


def footer(rows: Sequence[Row]) -> str:
    wrong = sum(row["wrong"] or 0 for row in rows)
    words = "not checked" if all(row["wrong"] is None for row in rows) else f"{wrong} {'FAILED' if wrong else 'OK'}"
    return f"# Wrong elements    : {words}\n# Avg bus bandwidth : {average_gbps(rows):.4f} GB/s"


def conditions(comm: Communicator, started: str, network: Network, device: str) -> Document:
    """Collect what a document says ahead of its results.  Collective; every rank gets the same."""
    return {
        "schema": SCHEMA,
        "command": sys.orig_argv,
        "started": started,
        "environment": surroundings(comm, device),
        "ranks": comm.size,
        "nodes": [len(node) for node in comm.topology.nodes],
        "links": network_to_json(network),
    }


def to_json(document: Document) -> str:
    """Write everything about a run as JSON, with a line for each result."""
    results = ",\n".join(f"  {json.dumps(row)}" for row in document["results"])
    parts = [f' "{name}": {json.dumps(value)}' for name, value in document.items() if name != "results"]
    parts += [f' "results": [\n{results}\n ]', f' "average_busbw_gbps": {average_gbps(document["results"])}']
    return "{\n" + ",\n".join(parts) + "\n}\n"


def tuning(
    comm: Communicator, around: dict[str, Any], network: Network, source: str, sizes: Sequence[Sequence[Row]]
) -> Tuning:
    """Choose what `auto` is to follow, from the rows of each size."""
    winners: dict[Case, list[tuple[int, str]]] = defaultdict(list)
    for rows in sizes:
        if best := fastest(rows):
            case = Case(rows[0]["collective"], rows[0]["memory"], comm.size, len(comm.topology.nodes))
            winners[case].append((rows[0]["bytes"], best))
    fastest_up_to = {case: limits(of_case) for case, of_case in winners.items()}
    return Tuning(network, source, fastest_up_to, around)
