"""A training run, or two side by side, as one HTML page: charts, tables, the machine and the command.

mpirun -n 2 python -m training --report out/report.html
python -m training.report out out-2 --html both.html
"""

from __future__ import annotations

import sys
from pathlib import Path

from collectives.bench.page import Section, pairs
from collectives.job.settings import Parser
from collectives.job.system import write
from collectives.schedule import draw
from training.reports.html import report
from training.reports.jsonl import METRICS, SETTINGS
from training.reports.metrics import Record, from_json


def main() -> int:
    """Write a page from the metrics of one run or two."""
    parser = Parser("python -m training.report", __doc__)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help=f"one or two run folders with {METRICS}")
    parser.add_argument("--html", type=Path, required=True, metavar="FILE", help="output HTML file")
    try:
        flags = parser.parse_args()
        if len({*map(Path.resolve, flags.runs)}) < len(flags.runs):
            raise ValueError(f"{flags.runs[0]} is given twice: pass one run, or two to compare")
        if len(flags.runs) > 2:
            raise ValueError(f"{len(flags.runs)} runs can't be compared: pass one, or two")
        draw.refuse(str(flags.html), "--html ")
        records = {str(run): read(run) for run in flags.runs}
        settings = [settings_of(i, run) for i, run in enumerate(flags.runs) if (run / SETTINGS).exists()]
        page = report(records, settings)
        try:
            write(flags.html, page)
        except OSError as error:
            raise ValueError(f"--html {flags.html} can't be written ({error.strerror}): pass another path") from None
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def read(run: Path) -> list[Record]:
    """Read a run's records.

    Raises: ValueError with the remedy.
    """
    path = run / METRICS
    try:
        records = [from_json(line) for line in path.read_text().splitlines()]
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}: pass the folder that a run has written to") from None
    except ValueError:
        records = [None]
    if not all(isinstance(record, dict) and isinstance(record.get("iter"), int) for record in records):
        raise ValueError(f"{path}: has a line that is not a record of a run: pass another folder")
    if not records:
        raise ValueError(f"{path}: has no record: pass another folder")
    return records


def settings_of(number: int, run: Path) -> Section:
    lines = (line.partition(" = ") for line in (run / SETTINGS).read_text(encoding="utf-8").splitlines())
    entries = {name: value for name, mark, value in lines if mark}
    return Section(f"RunSettings of {run}", tables=[pairs(f"settings{number}", f"{SETTINGS} of {run}", entries)])


if __name__ == "__main__":
    sys.exit(main())
