"""Output of a run: a table as nccl-tests prints it, a JSON document, and a tuning file."""

import json
import sys
from argparse import Namespace
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from collectives.bench.benchmarks import BENCHMARKS
from collectives.bench.surroundings import surroundings
from collectives.bench.trial import PEERS
from collectives.communicator import Communicator
from collectives.runtime.choose.auto import Case, Tuning, limits, network_to_json
from collectives.schedule import spec
from collectives.schedule.network import Network

SCHEMA = 1  # of the document
NOISE = 0.03  # of a time

Row = dict[str, Any]  # a line of the document
Document = dict[str, Any]


class TableColumn(NamedTuple):
    """A column of the table that is printed, for rows and flags for which it `stands` there."""

    title: str
    unit: str
    form: str  # of str.format
    cell: Callable[[Row], Any]
    stands: Callable[[Row, Namespace], bool] = lambda row, flags: True

    def text(self, row: Row | None) -> str:
        return self.form.format("-" if row is None else self.cell(row))


def has(name: str) -> Callable[[Row, Namespace], bool]:
    return lambda row, flags: name in row


def has_collectives(row: Row, flags: Namespace) -> bool:
    return "messages_per_s" not in row


def has_each_run(row: Row, flags: Namespace) -> bool:
    return flags.wide or flags.per_iter_timing


def wide(row: Row, flags: Namespace) -> bool:
    return flags.wide


def number(microseconds: float | None) -> str:
    """Format a time, with its significant digits only.

    >>> number(1.234), number(12345.6), number(None)
    ('1.2', '12346', '-')
    """
    return "-" if microseconds is None else f"{microseconds:.{1 if microseconds < 1e4 else 0}f}"


def percent(fraction: float | None) -> str:
    return "-" if fraction is None else f"{fraction:.0f}"


# nccl-tests' columns, in its order: programs that read its tables read ours.  The name stands behind them.
FIRST = (
    TableColumn("size", "(B)", "{:>10}", lambda row: row["bytes"]),
    TableColumn("count", "(elem)", "{:>10}", lambda row: row["count"]),
    TableColumn("type", "", "{:>8}", lambda row: row["dtype"]),
    TableColumn("redop", "", "{:>6}", lambda row: row["op"] or "none", has_collectives),
    TableColumn("root", "", "{:>5}", lambda row: -1 if row["root"] is None else row["root"], has_collectives),
)
RESULTS = (  # once out of place, once in place
    TableColumn("overall", "(us)", "{:>8}", lambda row: number(row["overall_us"]), has("overall_us")),
    TableColumn("compute", "(us)", "{:>8}", lambda row: number(row["compute_us"]), has("compute_us")),
    TableColumn("time", "(us)", "{:>8}", lambda row: number(row["median_us"])),
    TableColumn("overlap", "(%)", "{:>7}", lambda row: percent(row["overlap_percent"]), has("overlap_percent")),
    TableColumn("algbw", "(GB/s)", "{:>6}", lambda row: f"{row['algbw_gbps']:.2f}"),
    TableColumn("busbw", "(GB/s)", "{:>6}", lambda row: f"{row['busbw_gbps']:.2f}"),
    TableColumn("messages", "(1/s)", "{:>9}", lambda row: f"{row['messages_per_s']:.0f}", has("messages_per_s")),
    TableColumn("#wrong", "(elem)", "{:>6}", lambda row: "N/A" if row["wrong"] is None else row["wrong"]),
    TableColumn("min", "(us)", "{:>8}", lambda row: number(row["min_us"]), has_each_run),
    TableColumn("max", "(us)", "{:>8}", lambda row: number(row["max_us"]), has_each_run),
    TableColumn("p99", "(us)", "{:>8}", lambda row: number(row["p99_us"]), has_each_run),
    TableColumn("cv", "(%)", "{:>4}", lambda row: percent(row["cv_percent"]), has_each_run),
    TableColumn("model", "(us)", "{:>8}", lambda row: number(row["model_us"]), wide),
    TableColumn("limit", "(%)", "{:>5}", lambda row: percent(row["bound_percent"]), wide),
)
LAST = (
    TableColumn("algorithm", "", "{:<20}", lambda row: row["algorithm"]),
    TableColumn("timestamp", "", "{:<19}", lambda row: row["ended"], lambda row, flags: flags.report_timestamps),
)


def bus_factor(name: str, size: int) -> float:
    """Compute nccl-tests' factor from a vector's bytes per second to those of a rank's link; of messages, all links'.

    >>> [bus_factor(name, 4) for name in ("all_reduce", "all_gather", "broadcast", "message_rate")]
    [1.5, 0.75, 1.0, 2]
    """
    benchmark = BENCHMARKS.get(name)
    if benchmark and benchmark.messages:
        return benchmark.messages.num_links(size)
    return spec.bus_factor(benchmark.spec.name if benchmark else name, size)


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


def heading(rows: Sequence[Row], times: str, flags: Namespace) -> list[str]:
    """Format the heading above the rows of one collective and kind of memory."""
    row, modes = rows[0], in_place_choices(rows)
    where = f"{row['memory']} memory" if row["device"] == "cpu" else row["device"]
    first, results, last = columns(row, flags)
    titles, units = (
        " ".join(column.form.format(getattr(column, field)) for column in [*first, *results * len(modes), *last])
        for field in ("title", "unit")
    )
    indent, width = (sum(len(column.text(None)) + 1 for column in part) for part in (first, results))
    groups = "".join(f"{'in-place' if in_place else 'out-of-place':^{width}}" for in_place in modes)
    marks = "# algorithm: * is chosen by auto, < is the fastest of ours"
    above = ["#", f"# {row['collective']}, {where}" if row["bytes"] else f"# {row['collective']}", f"# time: {times}"]
    return [*above, marks, *(f"#{line[1:]}".rstrip() for line in (" " * indent + groups, titles, units))]


def columns(row: Row, flags: Namespace) -> list[list[TableColumn]]:
    """List the first columns, those of the results, which are shown for each mode, and the last ones."""
    return [[column for column in part if column.stands(row, flags)] for part in (FIRST, RESULTS, LAST)]


def in_place_choices(rows: Sequence[Row]) -> list[bool]:
    """List whether rows are in place: out of place first, if there are both."""
    return sorted({row["in_place"] for row in rows})


def lines(rows: Sequence[Row], flags: Namespace) -> Iterator[str]:
    """Format a line for each contestant of one size: its results out of place and in place side by side."""
    first, results, last = columns(rows[0], flags)
    best = {mode: fastest([row for row in rows if row["in_place"] == mode]) for mode in in_place_choices(rows)}
    for name in dict.fromkeys(row["name"] for row in rows):
        own = {row["in_place"]: row for row in rows if row["name"] == name}
        any_row = next(iter(own.values()))
        marks = {mode: "*" if name == "auto" else "<" if name == best[mode] else "" for mode in own}
        algorithm = "/".join(dict.fromkeys(row["algorithm"] + marks[mode] for mode, row in own.items()))
        cells = [column.text(any_row) for column in first]
        cells += [column.text(own.get(mode)) for mode in best for column in results]
        yield " ".join([*cells, *(column.text(any_row | {"algorithm": algorithm}) for column in last)]).rstrip()


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
    results = ",\n".join(f"  {json.dumps(row, allow_nan=False)}" for row in document["results"])
    parts = [
        f' "{name}": {json.dumps(value, allow_nan=False)}' for name, value in document.items() if name != "results"
    ]
    parts += [f' "results": [\n{results}\n ]', f' "average_busbw_gbps": {average_gbps(document["results"])}']
    return "{\n" + ",\n".join(parts) + "\n}\n"


def tuning(
    comm: Communicator, around: dict[str, Any], network: Network, source: str, sizes: Iterable[Sequence[Row]]
) -> Tuning:
    """Choose the algorithms that `auto` is to take, from the rows of each size."""
    winners: dict[Case, list[tuple[int, str]]] = defaultdict(list)
    for rows in sizes:
        if best := fastest(rows):
            case = Case(rows[0]["collective"], rows[0]["memory"], comm.size, len(comm.topology.nodes))
            winners[case].append((rows[0]["bytes"], best))
    fastest_up_to = {case: limits(of_case) for case, of_case in winners.items()}
    return Tuning(network, source, fastest_up_to, around)
