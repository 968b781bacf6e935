"""Results of one run, or of two side by side, as one HTML page: charts, tables, the machine and the command.

mpirun -n 2 python -m collectives.bench all_reduce -A all --peers mpi,gloo --html report.html
python -m collectives.bench.html before.json after.json --html both.html
python -m collectives.bench.html benchmarks/results/peers-openmpi-4.json --html peers.html
"""

import json
import shlex
import sys
from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import log
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from collectives.bench.page import Chart, Column, Section, Table, page, pairs
from collectives.bench.report import SCHEMA, Document, Row, bus_factor, describe
from collectives.bench.trial import PEERS
from collectives.job.settings import Parser
from collectives.job.system import write
from collectives.runtime.choose.auto import parse_network
from collectives.schedule import draw
from collectives.schedule.spec import COLLECTIVES

CASE = ("collective", "memory", "device", "dtype", "op", "root", "in_place")  # the same within a section
PARTS = {"schema", "command", "started", "environment", "ranks", "nodes", "links", "results"}
FIELDS = {*CASE, "name", "algorithm", "bytes", "samples_us", "min_us", "median_us", "p99_us", "model_us", "busbw_gbps"}
PEERS_PARTS = {"ranks", "cores", "mpi", "numpy", "repeats", "results"}  # of a file of benchmarks/peers.py
DIGITS = 3
TIMES = ("min", "quartile 1", "median", "quartile 3", "p99", "model", "limit", "overall", "compute")
RATES = ("overlap, %", "messages/s", "busbw, GB/s", "of limit, %")
NUMBERS = [Column(name, digits=DIGITS) for name in (*(f"{time}, µs" for time in TIMES), *RATES)]
COLUMNS = Column("run"), Column("size", "bytes"), Column("name"), Column("algorithm"), *NUMBERS, Column("wrong")
BANDS = [["min, µs", "quartile 3, µs"], ["quartile 1, µs", "quartile 3, µs"]]
LEGEND = (
    "; bands reach from the first to the third quartile, and fainter ones down to the minimum. Thin dotted lines are "
    "the cost model's predictions; the limit is the time of copying, or sending between nodes, as many bytes. The "
    "bar on top has the fastest."
)
Times = dict[str, dict[int, float]]  # by contestant and size
INK = 7  # the limit's color; contestants have the preceding ones
MARKERS = 4


class Crossover(NamedTuple):
    """The sizes from one to another for which a contestant is the fastest."""

    name: str
    begin: float
    end: float


class Measured(NamedTuple):
    """A row of a run's document."""

    run: str
    document: Document
    row: Row


def main() -> int:
    """Write a page from the documents of one run or two."""
    parser = Parser("python -m collectives.bench.html", __doc__)
    parser.add_argument(
        "results",
        nargs="+",
        type=Path,
        metavar="JSON",
        help="one or two files of bench --json, or of benchmarks/peers.py",
    )
    parser.add_argument("--html", type=Path, required=True, metavar="FILE", help="path of the page")
    try:
        flags = parser.parse_args()
        if len(flags.results) > 2:
            raise ValueError(f"{len(flags.results)} files: pass one, or two to compare")
        draw.refuse(str(flags.html), "--html ")
        write(flags.html, report(dict(zip(names_of(flags.results), map(read, flags.results), strict=True))))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def names_of(paths: Sequence[Path]) -> list[str]:
    """Name runs by their files, in short where that tells them apart.

    >>> names_of([Path("a/r.json"), Path("a/s.json")]), names_of([Path("a/r.json"), Path("b/r.json")])
    (['r', 's'], ['a/r.json', 'b/r.json'])
    """
    short = [path.stem for path in paths]
    if len({*map(str, paths)}) < len(paths):
        raise ValueError(f"{paths[0]} is named twice: pass it once, or two files to compare")
    return short if len({*short}) == len(paths) else [*map(str, paths)]


def read(path: Path) -> Document:
    """Read a document.

    Raises: ValueError with the remedy.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        has_all = data.keys() >= PARTS and all(row.keys() >= FIELDS for row in data["results"])
        if has_all and data["schema"] == SCHEMA:
            return data
        if data.keys() == PEERS_PARTS:
            return peers_document(data)
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}: pass a file that collectives.bench --json has written") from None
    except (ValueError, TypeError, AttributeError, KeyError):
        pass  # refused below
    raise ValueError(
        f"{path}: no results of collectives.bench: pass a file that its --json or benchmarks/peers.py has written"
    )


def peers_document(data: dict[str, Any]) -> Document:
    """Convert a file of benchmarks/peers.py, where a name says the kind of memory, and a copy's time is the limit."""
    rows = []
    for result in data["results"]:
        collective, nbytes, seconds = result["collective"], result["bytes"], result["seconds"]
        in_place, op = collective in ("all_reduce", "broadcast"), "sum" if COLLECTIVES[collective].reduces else None
        case = dict(zip(CASE, (collective, "each kind of", "cpu", "float32", op, None, in_place), strict=True))
        for name in [name for name in seconds if name != "copy"]:
            times = {"min_us": None, "median_us": seconds[name] * 1e6, "p99_us": None, "model_us": None}
            busbw = 1e-9 * nbytes / seconds[name] * bus_factor(collective, data["ranks"])
            limit = {"bound_percent": 100 * seconds["copy"] / seconds[name], "wrong": 0}
            own = {"name": name, "algorithm": name, "bytes": nbytes, "samples_us": [], "busbw_gbps": busbw}
            rows.append(case | own | times | limit)
    return {
        "command": ["python", "benchmarks/peers.py"],
        "started": "",
        "environment": {name: data[name] for name in ("mpi", "numpy", "cores")},
        "ranks": data["ranks"],
        "nodes": [data["ranks"]],
        "times": f"medians of {data['repeats']} runs, slowest rank",
        "links": None,
        "results": rows,
    }


def report(runs: dict[str, Document]) -> str:
    """Write the page of one run or two, with their names."""
    cases: dict[tuple, list[Measured]] = {}
    for name, document in runs.items():
        for row in document["results"]:
            cases.setdefault(tuple(row[field] for field in CASE), []).append(Measured(name, document, row))
    sections = [section(i, case, rows, [*runs]) for i, (case, rows) in enumerate(cases.items())]
    collectives = ", ".join(dict.fromkeys(case[0] for case in cases)) or "no results"
    title = f"Collectives, measured: {collectives}" if len(cases) < 8 else "Collectives, measured"
    machines = [machine(i, name, document) for i, (name, document) in enumerate(runs.items())]
    return page(title, [*sections, *machines])


def machine(number: int, name: str, document: Document) -> Section:
    """Show the machine, the command and the date of a run."""
    entries = {"command": shlex.join(document["command"]), "started": document["started"], **document["environment"]}
    if document["links"]:
        nodes = [range(length) for length in document["nodes"]]
        entries["speeds"] = describe(parse_network(document["links"]), nodes).removeprefix("# ")
    return Section(f"Machine and command of {name}", tables=[pairs(f"m{number}", f"Run {name}", entries)])


def section(number: int, case: tuple, rows: Sequence[Measured], runs: Sequence[str]) -> Section:
    """Draw and list the results of one collective, on arrays of one kind."""
    collective, memory, device, dtype, op, root, in_place = case
    where = f"{memory} memory" if device == "cpu" else device
    more = [dtype, *([op] if op else []), *([] if root is None else [f"root {root}"])]
    mode = "in place" if in_place else "out of place"
    has_sizes = any(row["bytes"] for _, _, row in rows)
    heading = f"{collective}, {where}, {mode}: {' '.join(more)}" if has_sizes else collective
    table = Table(f"t{number}", heading, COLUMNS, [line(each) for each in rows])
    one_run = {"run"} if len(runs) == 1 else set()
    no_choice = {"algorithm"} if all(row["name"] == row["algorithm"] for _, _, row in rows) else set()
    table = table.without(one_run | no_choice | (table.empty & {each.name for each in NUMBERS}))
    if not has_sizes:
        return Section(heading, tables=[table])
    ranges = [crossovers(medians([row for name, _, row in rows if name == run])) for run in runs]
    times = dict.fromkeys(document.get("times", "medians, slowest rank") for _, document, _ in rows)
    text = f"Lines are {' and '.join(times)}{LEGEND}"
    if len(runs) > 1:
        text += f" Solid lines are of {runs[0]}, dashed ones of {runs[1]}; the bar is of {runs[0]}."
    charts = list(charts_of(table, rows, runs, ranges[0]))
    fastest = [(run, *each) for run, of_run in zip(runs, ranges, strict=True) for each in of_run]
    columns = Column("run"), Column("fastest"), Column("from", "bytes"), Column("to", "bytes")
    caption = "Fastest by size; between two sizes measured, where the lines cross"
    tables = [table, Table(f"f{number}", caption, columns, fastest).without(one_run)]
    if len(runs) > 1:
        tables.append(comparison(number, rows, runs))
    return Section(heading, [text], charts, tables)


def line(measured: Measured) -> tuple:
    """List the cells of a row; the limit is that of `bound_percent`."""
    run, _, row = measured
    samples, percent = row["samples_us"], row["bound_percent"]
    lower, upper = np.percentile(samples, [25, 75]).tolist() if samples else (None, None)
    limit = None if percent is None else percent / 100 * row["median_us"]
    times = row["min_us"], lower, row["median_us"], upper, row["p99_us"], row["model_us"], limit
    more = (row.get(name) for name in ("overall_us", "compute_us", "overlap_percent", "messages_per_s"))
    return run, row["bytes"], row["name"], row["algorithm"], *times, *more, row["busbw_gbps"], percent, row["wrong"]


def charts_of(
    table: Table, rows: Sequence[Measured], runs: Sequence[str], ranges: Sequence[Crossover]
) -> Iterator[Chart]:
    """Draw bandwidth and time against size, and the overlap and the rate of messages that the table may have."""
    names, has = list(dict.fromkeys(row["name"] for _, _, row in rows)), {column.name for column in table.columns}
    rates = {run: bus_factor(row["collective"], document["ranks"]) for run, document, row in rows}
    looks = {name: {"color": i % INK, "marker": (i + 2 * (i // INK)) % MARKERS} for i, name in enumerate(names)}
    times = medians([row for run, _, row in rows if run == runs[0]])
    ours = {name: of_name for name, of_name in times.items() if name not in PEERS}
    predicted = ["auto"] if "auto" in names else list(dict.fromkeys(each.name for each in crossovers(ours)))
    lines: list[dict[str, Any]] = []
    for run, rate in rates.items():
        suffix, of_run = (f" ({run})", {"run": run}) if len(runs) > 1 else ("", {})
        of_all = {
            "column": "median, µs",
            "bands": [pair for pair in BANDS if has.issuperset(pair)],
            "dash": runs.index(run),
            "rate": rate,
        }
        lines += [{"name": name + suffix, "where": {**of_run, "name": name}, **of_all, **looks[name]} for name in names]
    of_first = {"run": runs[0]} if len(runs) > 1 else {}
    thin_lines = [(name, f"model of {name}", "model, µs", looks[name]["color"], 2) for name in predicted]
    thin_lines.append((names[0], "limit", "limit, µs", INK, 1))
    for name, words, column, color, dash in [line for line in thin_lines if line[2] in has]:
        look = {"color": color, "dash": dash, "thin": True, "rate": rates.get(runs[0])}
        lines.append({"name": words, "where": {**of_first, "name": name}, "column": column, **look})
    strip = [
        {"name": each.name, "from": each.begin, "to": each.end, "color": looks[each.name]["color"]} for each in ranges
    ]
    x = {"column": "size", "log": True, "unit": "B", "label": "size of the vector", "name": "size"}
    both = {"kind": "lines", "table": table.key, "x": x, "lines": lines, "ranges": strip}
    if all(rates.values()):
        yield {**both, "title": "Bus bandwidth", "y": {"log": True, "unit": "GB/s", "rate": True}}
    yield {**both, "title": "Time", "y": {"log": True, "unit": "µs"}}
    for column, title, y in (
        ("overlap, %", "Overlap with computation", {"unit": "%", "zero": True}),
        ("messages/s", "Messages at all links", {"log": True, "unit": "/s"}),
    ):
        if column in has:
            of_column = [line | {"column": column, "bands": []} for line in lines if not line.get("thin")]
            yield {**both, "title": title, "lines": of_column, "y": y, "ranges": []}


def comparison(number: int, rows: Sequence[Measured], runs: Sequence[str]) -> Table:
    """List the medians of two runs side by side, and the ratio of the second's time to the first's."""
    times = {(run, row["bytes"], row["name"]): row["median_us"] for run, _, row in rows}
    lines = []
    for size, name in dict.fromkeys((size, name) for _, size, name in times):
        first, second = (times.get((run, size, name)) for run in runs)
        lines.append((size, name, first, second, second / first if first and second else None))
    numbers = [Column(name, digits=DIGITS) for name in (*(f"{run}, µs" for run in runs), "ratio")]
    columns = Column("size", "bytes"), Column("name"), *numbers
    return Table(f"c{number}", f"Medians side by side; ratio: {runs[1]} over {runs[0]}", columns, lines)


def medians(rows: Sequence[Row]) -> Times:
    """Sort medians by contestant and size: without `auto`, which is one of the others, if these were measured."""
    ours = {row["name"] for row in rows if row["name"] not in ("auto", *PEERS)}
    contestants = [row for row in rows if not (ours and row["name"] == "auto")]
    names = dict.fromkeys(row["name"] for row in contestants)
    return {name: {row["bytes"]: row["median_us"] for row in contestants if row["name"] == name} for name in names}


def crossovers(times: Times) -> list[Crossover]:
    """List the fastest contestant by ranges of sizes; between two measured sizes, lines cross as in a log-log chart.

    >>> crossovers({"tree": {1: 1.0, 4: 2.0, 16: 8.0}, "ring": {1: 2.0, 4: 4.0, 16: 4.0}})
    [Crossover(name='tree', begin=1.0, end=8.0), Crossover(name='ring', begin=8.0, end=16.0)]
    """
    sizes = sorted({size for of_name in times.values() for size in of_name})
    best = [min((of_name[size], name) for name, of_name in times.items() if size in of_name)[1] for size in sizes]
    winners: list[Crossover] = []
    begin = float(min(sizes, default=0))
    for (size, name), (following, other) in pairwise(zip(sizes, best, strict=True)):
        if name != other:
            end = crossing(times[name], times[other], size, following)
            winners.append(Crossover(name, begin, end))
            begin = end
    return [*winners, Crossover(best[-1], begin, float(sizes[-1]))] if sizes else []


def crossing(before: dict[int, float], after: dict[int, float], size: int, following: int) -> float:
    """Compute where two lines cross between two sizes; half-way where one of them lacks a size."""
    if not {size, following} <= before.keys() & after.keys():
        return (size * following) ** 0.5
    first, second = (log(after[at] / before[at]) for at in (size, following))
    return size * (following / size) ** (first / (first - second)) if first > second else float(following)


if __name__ == "__main__":
    sys.exit(main())
