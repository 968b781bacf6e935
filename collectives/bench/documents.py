"""What the benchmark's command line does with files of earlier runs, on no ranks and without MPI."""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from collectives.bench import compare, openmpi_rules, plots
from collectives.settings import Parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare, draw or convert; the exit status is 1 where something got slower, 2 for bad input."""
    parser = Parser("python -m collectives.bench", description=__doc__)
    add_flags(parser.add_argument)
    try:
        return work(parser.parse_args(arguments))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def add_flags(add: Callable[..., Any]) -> None:
    add("--plots", type=Path, metavar="DIR", help="draw the document that --json writes, or those given by --from")
    add("--tune-openmpi", type=Path, metavar="FILE", help="write what --tune writes as rules for Open MPI's own, too")
    add("--from", dest="files", nargs="+", metavar="JSON", help="for --plots and --tune-openmpi: nothing is measured")
    add("--compare", nargs=2, metavar="JSON", help="say what got slower from one to the other: nothing is measured")


def work(flags: argparse.Namespace) -> int:
    if flags.compare:
        return compare.report(*flags.compare)
    if flags.plots:
        plots.report(flags.plots, flags.files)
    elif flags.tune_openmpi and len(flags.files) == 1:
        openmpi_rules.report(flags.files[0], flags.tune_openmpi)
    else:
        raise ValueError("--from needs --plots DIR, or one tuning file and --tune-openmpi FILE")
    return 0
