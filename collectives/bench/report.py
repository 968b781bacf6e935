"""Output of a run: a table as nccl-tests prints it, a JSON document, and a tuning file."""

import json
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from collectives.bench.trial import PEERS
from collectives.communicator import Communicator
from collectives.runtime.choose.auto import Case, Tuning, limits, network_to_json
from collectives.runtime.surroundings import surroundings
from collectives.schedule.cost import Network

SCHEMA = 1  # of the document
NOISE = 0.03  # of a time

Row = dict[str, Any]  # a line of the document
Document = dict[str, Any]


class TableColumn(NamedTuple):
    """A column of the table that is printed; of `is_wide` ones only under --wide."""

    title: str
    unit: str
    form: str  # of str.format
    cell: Callable[[Row], Any]
    is_wide: bool = False


def number(microseconds: float | None) -> str:
    """Format a time, with its significant digits only.

    >>> number(1.234), number(12345.6), number(None)
    ('1.2', '12346', '-')
    """
    return "-" if microseconds is None else f"{microseconds:.{1 if microseconds < 1e4 else 0}f}"


def percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.0f}"


# nccl-tests' columns in 80 characters, without the type, which is in the heading; plus model, limit and noise.
COLUMNS = (
    TableColumn("size", "(B)", "{:>9}", lambda row: row["bytes"]),
    TableColumn("count", "(elem)", "{:>8}", lambda row: row["count"]),
    TableColumn("type", "", "{:>8}", lambda row: row["dtype"], is_wide=True),
    TableColumn("redop", "", "{:>5}", lambda row: row["op"] or "none"),
    TableColumn("root", "", "{:>4}", lambda row: -1 if row["root"] is None else row["root"]),
    TableColumn("time", "(us)", "{:>8}", lambda row: number(row["median_us"])),
    TableColumn("algbw", "(GB/s)", "{:>6}", lambda row: f"{row['algbw_gbps']:.2f}"),
    TableColumn("busbw", "(GB/s)", "{:>6}", lambda row: f"{row['busbw_gbps']:.2f}"),
    TableColumn("#wrong", "(elem)", "{:>6}", lambda row: "N/A" if row["wrong"] is None else row["wrong"]),
    TableColumn("algorithm", "", "{:<20}", lambda row: row["algorithm"] + row["mark"]),
    TableColumn("min", "(us)", "{:>8}", lambda row: number(row["min_us"]), is_wide=True),
    TableColumn("p99", "(us)", "{:>8}", lambda row: number(row["p99_us"]), is_wide=True),
    TableColumn("cv", "(%)", "{:>4}", lambda row: percent(row["cv_percent"]), is_wide=True),
    TableColumn("model", "(us)", "{:>8}", lambda row: number(row["model_us"]), is_wide=True),
    TableColumn("limit", "(%)", "{:>5}", lambda row: percent(row["bound_percent"]), is_wide=True),
)


def bus_factor(collective: str, size: int) -> float:
    """Compute nccl-tests' factor from a vector's bytes per second to those of a rank's link.

    >>> [bus_factor(name, 4) for name in ("all_reduce", "all_gather", "broadcast")]
    [1.5, 0.75, 1.0]
    """
    if collective in ("broadcast", "reduce"):
        return 1.0
    return (2 if collective == "all_reduce" else 1) * (size - 1) / size


def average_gbps(rows: Sequence[Row]) -> float:
    """Average the bandwidth of our algorithms, if any were run, else of peers; barriers are skipped: no bytes."""
    ours = [row["busbw_gbps"] for row in rows if row["name"] not in PEERS and row["bytes"]]
    rates = ours or [row["busbw_gbps"] for row in rows if row["bytes"]]
    return sum(rates) / len(rates) if rates else 0.0


def fastest(rows: Sequence[Row]) -> str:
    """Name our fastest algorithm: among those within noise of it, the registry's first; empty for none."""
    ours = {row["name"]: row["median_us"] for row in rows if row["name"] not in ("auto", *PEERS)}
    return next((name for name in ours if ours[name] <= (1 + NOISE) * min(ours.values())), "")


def describe(network: Network, nodes: Sequence[Sequence[int]]) -> str:
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


def heading(row: Row, times: str, is_wide: bool) -> list[str]:
    """Format the heading above the rows of one collective, place of the result and kind of memory."""
    where = f"{row['memory']} memory" if row["device"] == "cpu" else row["device"]
    place = "in place" if row["in_place"] else "out of place"
    what = f"{row['collective']} of {row['dtype']}, {place}, {where}" if row["bytes"] else row["collective"]
    titles, units = (
        " ".join(column.form.format(getattr(column, field)) for column in COLUMNS if is_wide or not column.is_wide)
        for field in ("title", "unit")
    )
    above = ["#", f"# {what}", f"# time: {times}", "# algorithm: * is chosen by auto, < is the fastest of ours"]
    return [*above, *(f"#{line[1:]}".rstrip() for line in (titles, units))]


def lines(rows: Sequence[Row], is_wide: bool) -> Iterator[str]:
    """Format a line for each contestant of one size."""
    columns, best = [column for column in COLUMNS if is_wide or not column.is_wide], fastest(rows)
    for row in rows:
        marked = row | {"mark": "*" if row["name"] == "auto" else "<" if row["name"] == best else ""}
        yield " ".join(column.form.format(column.cell(marked)) for column in columns).rstrip()


def footer(rows: Sequence[Row]) -> str:
    wrong = sum(row["wrong"] or 0 for row in rows)
    words = "not checked" if all(row["wrong"] is None for row in rows) else f"{wrong} {'FAILED' if wrong else 'OK'}"
    return f"# Wrong elements    : {words}\n# Avg bus bandwidth : {average_gbps(rows):.4f} GB/s"


def conditions(comm: Communicator, started: str, network: Network, device: str, times: str) -> Document:
    """Collect the conditions that a document begins with.  Collective; every rank gets the same."""
    return {
        "schema": SCHEMA,
        "command": sys.orig_argv,
        "started": started,
        "environment": surroundings(comm, device),
        "ranks": comm.size,
        "nodes": [len(node) for node in comm.topology.nodes],
        "times": times,
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
    """Choose the algorithms that `auto` is to take, from the rows of each size."""
    winners: dict[Case, list[tuple[int, str]]] = defaultdict(list)
    for rows in sizes:
        if best := fastest(rows):
            case = Case(rows[0]["collective"], rows[0]["memory"], comm.size, len(comm.topology.nodes))
            winners[case].append((rows[0]["bytes"], best))
    fastest_up_to = {case: limits(of_case) for case, of_case in winners.items()}
    return Tuning(network, source, fastest_up_to, around)
