"""The benchmark's command line."""

import argparse
from pathlib import Path

from collectives import algorithms
from collectives.arguments import OPERANDS

SUFFIXES = {"K": 10, "M": 20, "G": 30}


class Parser(argparse.ArgumentParser):
    """A parser that raises where argparse would end the process, so that ranks can agree on the error first."""

    def error(self, message: str):
        raise ValueError(f"{message}; see --help")


def num_bytes(text: str) -> int:
    """A size, with K, M or G for 2^10, 2^20 or 2^30.

    >>> num_bytes("8"), num_bytes("64K")
    (8, 65536)
    """
    digits, shift = (text[:-1], SUFFIXES[text[-1]]) if text[-1:] in SUFFIXES else (text, 0)
    if not digits.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is no size: write one like 8, 64K, 1M or 1G")
    return int(digits) << shift


def positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number above 0")
    return int(text)


def parse(description: str) -> argparse.Namespace:
    """The flags.

    Raises: ValueError for what makes no sense, with the remedy.
    """
    parser = Parser(
        "python -m collectives.bench", None, description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tune", type=Path, metavar="FILE", help="write a tuning file, for COLLECTIVES_TUNING")
    parser.add_argument("--collectives", nargs="+", default=list(OPERANDS), choices=OPERANDS, metavar="NAME")
    parser.add_argument("--algorithms", nargs="+", metavar="NAME", help='these only; "mpi" is the MPI library\'s own')
    parser.add_argument("-b", "--begin", type=num_bytes, default="8", help="smallest vector, as in 8, 64K, 1M (8)")
    parser.add_argument("-e", "--end", type=num_bytes, default="64M", help="largest vector (64M)")
    parser.add_argument("-f", "--factor", type=positive, default=4, help="from one size to the next (4)")
    parser.add_argument("-n", "--repeats", type=positive, default=15, help="of which the median counts (15)")
    parser.add_argument("-w", "--warmups", type=positive, default=2, help="that do not count (2)")
    flags = parser.parse_args()
    if flags.factor < 2:
        raise ValueError("--factor 1 would never end: use 2 or more")
    if flags.begin > flags.end:
        raise ValueError(f"--begin {flags.begin} is above --end {flags.end}: exchange them")
    known = dict.fromkeys(name for collective in flags.collectives for name in algorithms.names(collective))
    if strange := [name for name in flags.algorithms or [] if name not in (*known, "mpi")]:
        raise ValueError(f"--algorithms {strange[0]}: there are {', '.join(known)}, mpi")
    return flags
