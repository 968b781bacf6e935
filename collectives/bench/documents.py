"""What the benchmark's command line does with documents of earlier runs."""

import sys

from collectives.bench import compare, plots
from collectives.bench.flags import parser


def main() -> int:
    """Compare two documents, or draw some; the exit status is 1 where something got slower, 2 for bad input."""
    try:
        flags = parser().parse_args()
        if flags.compare:
            return compare.report(*flags.compare)
        if not flags.plots:
            raise ValueError("--from needs --plots: pass a folder for the pictures")
        plots.report(flags.plots, flags.documents)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0
