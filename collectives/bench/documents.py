"""Documents that `--json` has written: read and checked, compared, drawn.  No ranks are needed, and no MPI."""

import argparse
import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import geometric_mean
from typing import Any, NamedTuple

from collectives.runtime.choose.auto import take
from collectives.schedule import draw

SCHEMA = 1
PEERS = ("mpi", "gloo", "nccl")  # names in an algorithm's place: others' collectives
CHANGE = 1.25  # what differs by less may be noise
DATA = ("memory", "device", "dtype")
COLUMNS = "{:<15} {:<20} {:<45} {:>5} {:>6} {:>13}  {}"


class Series(NamedTuple):
    """A measurement at several sizes: a line of a picture or a table."""

    collective: str
    name: str  # of the algorithm, or one of `PEERS`
    data: str  # memory, device, dtype, op, root and place


class Document(NamedTuple):
    path: str
    ranks: int
    nodes: tuple[int, ...]  # ranks of each
    environment: Mapping[str, Any]
    rows: Mapping[tuple[Series, int], Mapping[str, Any]]  # by bytes


def main(flags: argparse.Namespace) -> int:
    """Compare or draw; return 1 where something got slower.

    Raises: ValueError with the remedy.
    """
    if flags.compare:
        lines, is_slower = compare(*map(read, flags.compare))
        print("\n".join(lines))
        return int(is_slower)
    if not flags.plots:
        raise ValueError("--from needs --plots DIR")
    print("\n".join(save_plots(flags.plots, [read(path) for path in flags.files])))
    return 0


def read(path: str | Path) -> Document:
    """Read a document.

    Raises: ValueError with the file's name, what is wrong with it, and the remedy.
    """
    try:
        return parse(json.loads(Path(path).read_text()), str(path))
    except OSError as error:
        raise ValueError(f"{path}: can't be read ({error.strerror}): check the path") from None
    except (ValueError, RecursionError) as error:
        remedy = "measure it anew by python -m collectives.bench --json"
        raise ValueError(f"{path}: no document of the benchmark ({error}): {remedy}") from None


def parse(data: Any, path: str) -> Document:
    if take(data, "schema", int) != SCHEMA:
        raise ValueError(f"schema is {data['schema']}, but this build reads {SCHEMA}")
    ranks, nodes = take(data, "ranks", int), take(data, "nodes", list)
    rows = [parse_row(number, row) for number, row in enumerate(take(data, "results", list))]
    for (series, nbytes), times in Counter(key for key, _ in rows).items():
        if times > 1:
            raise ValueError(f"two results are of {series.collective} {series.name}, {nbytes} bytes")
    return Document(path, ranks, tuple(nodes), take(data, "environment", dict), dict(rows))


def parse_row(number: int, row: Any) -> tuple[tuple[Series, int], Mapping[str, Any]]:
    try:
        collective, name, *words = (take(row, field, str) for field in ("collective", "name", *DATA))
        words += [row["op"]] * bool(row.get("op")) + [f"root {row.get('root')}"] * bool(row.get("root"))
        series = Series(collective, name, " ".join(words + ["in place"] * bool(row.get("in_place"))))
        median = take(row, "median_us", float)
        if not 0 < median < math.inf:
            raise ValueError(f"'median_us' is {json.dumps(median)}, but must be above 0")
        return (series, take(row, "bytes", int)), row
    except ValueError as error:
        raise ValueError(f"results[{number}]: {error}") from None


def compare(before: Document, after: Document) -> tuple[list[str], bool]:
    """Make a table of how many times as long each series takes, and say whether one of ours got slower.

    A ratio is the geometric mean over the sizes that both documents have.  What the peers changed by at a collective is
    the machine's doing, and no part of the verdict.

    Raises: ValueError where they have nothing in common, with the reason.
    """
    for name in ("ranks", "nodes"):
        if (was := getattr(before, name)) != (now := getattr(after, name)):
            raise ValueError(f"{name} are {was} in {before.path}, {now} in {after.path}: measure both alike")
    ratios: dict[Series, list[float]] = defaultdict(list)
    machine: dict[str, list[float]] = defaultdict(list)
    for key, row in after.rows.items():
        if key in before.rows:
            ratios[key[0]].append(row["median_us"] / before.rows[key]["median_us"])
            machine[key[0].collective] += ratios[key[0]][-1:] if key[0].name in PEERS else []
    if all(series.name in PEERS for series in ratios):
        raise ValueError(f"{before.path} and {after.path} share no row of ours: measure both alike")
    lines, verdicts = [*differences(before, after)], Counter[str]()
    lines.append(COLUMNS.format("collective", "algorithm", "", "sizes", "ratio", "from - to", "").rstrip())
    for series, each in ratios.items():
        ours = geometric_mean(each) / geometric_mean(machine[series.collective] or [1.0])
        verdict = "slower" if ours > CHANGE else "faster" if ours < 1 / CHANGE else ""
        verdict = "peer" if series.name in PEERS else verdict
        verdicts[verdict] += 1
        numbers = len(each), f"{geometric_mean(each):.2f}", f"{min(each):.2f} - {max(each):.2f}"
        lines.append(COLUMNS.format(series.collective, series.name, series.data, *numbers, verdict).rstrip())
    lines.append(f"{verdicts['slower']} slower, {verdicts['faster']} faster, of {verdicts.total()} lines")
    if verdicts["slower"] and not any(machine.values()):
        lines.append("without peers in both documents this may be the machine: measure with --peers mpi to know")
    return lines, bool(verdicts["slower"])


def differences(before: Document, after: Document) -> Iterator[str]:
    """Say what is not compared, and what else differs."""
    for mine, other in ((before, after), (after, before)):
        if alone := mine.rows.keys() - other.rows.keys():
            names = sorted({f"{series.collective} {series.name}" for series, _ in alone})
            yield f"only in {mine.path}: {len(alone)} rows ({', '.join(names[:4])}{', ...' * (len(names) > 4)})"
    if changed := [name for name in before.environment if before.environment[name] != after.environment.get(name)]:
        yield f"the environments differ in {', '.join(changed)}"


def save_plots(folder: str | Path, documents: Sequence[Document]) -> list[str]:
    """Draw pictures as PNG files in a folder, which is made if need be; return their paths.

    Raises: OSError for a folder that can't be made, ValueError for documents whose files would have one name.
    """
    stems = [Path(document.path).stem for document in documents]
    if len(set(stems)) < len(stems):
        raise ValueError(f"documents named {', '.join(stems)}: pictures are named after them, so rename one")
    Path(folder).mkdir(parents=True, exist_ok=True)
    paths = []
    for document, stem in zip(documents, stems, strict=True):
        for name, figure in plots(document):
            paths.append(str(Path(folder, f"{stem}-{name}.png")))
            draw.refuse(paths[-1])
            draw.save(figure, paths[-1])
    return paths


def plots(document: Document) -> Iterator[tuple[str, Any]]:
    """Draw bandwidth and time by size of each kind of data: names of files, and figures."""
    lines: dict[tuple[str, str, str], dict[str, list[tuple[int, float]]]] = defaultdict(lambda: defaultdict(list))
    for (series, nbytes), row in sorted(document.rows.items(), key=lambda item: item[0][1]):
        heading = f"{series.collective}, {series.data}"
        lines["latency", heading, "median time (us)"][series.name].append((nbytes, row["median_us"]))
        if row.get("busbw_gbps"):
            lines["bandwidth", heading, "bus bandwidth (GB/s)"][series.name].append((nbytes, row["busbw_gbps"]))
    for (kind, heading, ylabel), of_kind in lines.items():
        title = f"{heading}, {document.ranks} ranks on {len(document.nodes)} nodes"
        yield f"{kind}-{heading.replace(',', '').replace(' ', '-')}", draw.by_size(title, of_kind, ylabel, PEERS)
