"""Draw what benchmarks have measured.

python -m collectives.bench --plots out --from 2ranks.json 4ranks.json

A document gives, for each collective, kind of memory and kind of data: bandwidth by size and time by size; and what
was predicted against what was measured.  All together give the fastest algorithm by size and ranks.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from collectives import draw
from collectives.bench.document import PEERS, Document, Group, Row, read
from collectives.simulate.pictures import size_in_words

BAND = 0.25  # of the measured time, within which a prediction should be
Rows = Sequence[Row]


def panels(rows: Rows) -> dict[Group, dict[str, list[Row]]]:
    """What belongs in one picture, by name of the algorithm and ascending size; keys have no name."""
    found: dict[Group, dict[str, list[Row]]] = defaultdict(lambda: defaultdict(list))
    for row in sorted(rows, key=lambda row: row.nbytes):
        found[row.group._replace(name="")][row.group.name].append(row)
    return found


def title(group: Group) -> str:
    root = "" if group.root is None else f"root {group.root}"
    words = (group.memory, group.device, group.dtype, group.op or "", root, "in place" if group.in_place else "")
    return f"{group.collective}, {' '.join(filter(None, words))}"


def by_size(heading: str, lines: dict[str, list[tuple[int, float]]], ylabel: str, log: bool) -> Any:
    """A line for each algorithm; the peers' are dashed."""
    figure, axes = canvas(heading, "bytes", ylabel)
    for name, points in lines.items():
        axes.plot(*zip(*points, strict=True), marker=".", linestyle="--" if name in PEERS else "-", label=name)
    axes.set_xscale("symlog" if any(not x for points in lines.values() for x, _ in points) else "log", base=2)
    if log:
        axes.set_yscale("log")
    axes.grid(alpha=0.3)
    axes.legend()
    return figure


def canvas(heading: str, xlabel: str, ylabel: str) -> tuple[Any, Any]:
    from matplotlib.figure import Figure  # as in draw.py

    figure = Figure(figsize=(8, 5), layout="constrained")
    return figure, figure.add_subplot(title=heading, xlabel=xlabel, ylabel=ylabel)


def bandwidth(heading: str, names: dict[str, list[Row]]) -> Any:
    """Bus bandwidth by size; None where there is none, as for a barrier."""
    points = {name: [(row.nbytes, row.busbw_gbps) for row in rows if row.busbw_gbps] for name, rows in names.items()}
    shown = {name: line for name, line in points.items() if line}
    return by_size(heading, shown, "bus bandwidth (GB/s)", log=False) if shown else None


def latency(heading: str, names: dict[str, list[Row]]) -> Any:
    points = {name: [(row.nbytes, row.median_us) for row in rows] for name, rows in names.items()}
    return by_size(heading, points, "median time (us)", log=True)


def predictions(heading: str, rows: Rows) -> Any:
    """Predicted against measured, with the band in which predictions should be; None without predictions."""
    shown = [row for row in rows if row.model_us is not None]
    if not shown:
        return None
    figure, axes = canvas(heading, "measured (us)", "predicted (us)")
    for collective in dict.fromkeys(row.group.collective for row in shown):
        points = [(row.median_us, row.model_us) for row in shown if row.group.collective == collective]
        axes.plot(*zip(*points, strict=True), ".", label=collective)
    ends = [min(row.median_us for row in shown) / 2, max(row.median_us for row in shown) * 2]
    axes.plot(ends, ends, color="gray")
    low, high = ([factor * end for end in ends] for factor in (1 - BAND, 1 + BAND))
    axes.fill_between(ends, low, high, color="gray", alpha=0.2, label=f"within {BAND:.0%}")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.legend()
    return figure


def winners(documents: Sequence[Document], panel: Group) -> dict[tuple[int, str], str]:
    """Our fastest algorithm by bytes and ranks, these with the number of nodes."""
    best: dict[tuple[int, str], Row] = {}
    for document in documents:
        for row in document.rows:
            if row.group._replace(name="") == panel and row.group.name not in PEERS:
                best_there = best.setdefault((row.nbytes, label(document)), row)
                if row.median_us < best_there.median_us:
                    best[row.nbytes, label(document)] = row
    return {place: row.group.name for place, row in best.items()}


def label(document: Document) -> str:
    nodes = len(document.nodes)
    return f"{document.ranks} on {nodes} nodes" if nodes > 1 else str(document.ranks)


def winner_map(documents: Sequence[Document], panel: Group) -> Any:
    """A field for each size and number of ranks, coloured by the fastest algorithm; None where all is the peers'."""
    from matplotlib.patches import Patch

    best = winners(documents, panel)
    if not best:
        return None
    known = {at for _, at in best}
    ordered = sorted(documents, key=lambda document: (document.ranks, len(document.nodes)))
    ranks = [at for at in dict.fromkeys(map(label, ordered)) if at in known]
    sizes, names = sorted({nbytes for nbytes, _ in best}), sorted(set(best.values()))
    codes = [[names.index(best[x, y]) if (x, y) in best else float("nan") for x in sizes] for y in ranks]
    figure, axes = canvas(f"fastest: {title(panel)}", "bytes", "ranks")
    image = axes.imshow(codes, aspect="auto", origin="lower", cmap="tab20", vmin=-0.5, vmax=19.5, interpolation="none")
    axes.set_xticks(range(len(sizes)), map(size_in_words, sizes), rotation=60)
    axes.set_yticks(range(len(ranks)), ranks)
    handles = [Patch(color=image.cmap(image.norm(code)), label=name) for code, name in enumerate(names)]
    figure.legend(handles=handles, loc="outside right upper")
    return figure


def pictures(documents: Sequence[Document]) -> Iterator[tuple[str, Any]]:
    """Names of files, and figures."""
    for document in documents:
        stem = f"{Path(document.path).stem}-" if len(documents) > 1 else ""
        where = f"{label(document)} ranks"
        for panel, names in panels(document.rows).items():
            heading = f"{title(panel)}, {where}"
            yield f"{stem}bandwidth-{slug(panel)}", bandwidth(heading, names)
            yield f"{stem}latency-{slug(panel)}", latency(heading, names)
        yield f"{stem}predicted", predictions(f"predicted and measured, {where}", document.rows)
    for panel in dict.fromkeys(panel for document in documents for panel in panels(document.rows)):
        yield f"fastest-{slug(panel)}", winner_map(documents, panel)


def slug(panel: Group) -> str:
    return title(panel).replace(",", "").replace(" ", "-")


def save(folder: str | Path, documents: Sequence[Document]) -> list[str]:
    """Draw all pictures as PNG files in a folder, which is made if need be; return their paths.

    Raises: ValueError for a folder that can't be written, and for documents whose files would have one name.
    """
    stems = [Path(document.path).stem for document in documents]
    if len(set(stems)) < len(stems):
        raise ValueError(f"documents named {', '.join(stems)}: pictures are named after them, so rename one")
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"{folder} can't be made ({error.strerror}): pass another folder") from None
    paths = []
    for name, figure in pictures(documents):
        if figure is not None:
            path = str(Path(folder, f"{name}.png"))
            draw.refuse(path)
            draw.save(figure, path)
            paths.append(path)
    return paths


def report(folder: str | Path, paths: Sequence[str]) -> None:
    """Draw documents and print the pictures' names.

    Raises: ValueError with the remedy.
    """
    for path in save(folder, [read(path) for path in paths]):
        print(path)
