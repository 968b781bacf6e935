"""The benchmark's command line: that of nccl-tests, where both have the same."""

import argparse
import sys
from itertools import product
from pathlib import Path

import numpy as np

from collectives import algorithms, arrays
from collectives.algorithms import ROOTED
from collectives.arguments import OPERANDS, REDUCTIONS
from collectives.bench import documents
from collectives.bench.trial import Setting
from collectives.settings import Parser, Range
from collectives.sizes import MOST_BYTES, ladder, num_bytes
from collectives.tuning import MEMORIES

QUICK = ["auto", "mpi"]
PEERS = ("mpi", "gloo", "nccl")
ALL = "all"
# In nccl-tests' spelling, where that is another.
NCCL_DTYPES = {"half": "float16", "float": "float32", "double": "float64"}
RUNS, STEPS, FACTORS = Range(1, 10**6), Range(1, MOST_BYTES), Range(2, 2**30)
SIZES = Range(1, 10_000)
HANDICAPS, BANDWIDTHS = Range(1, 1000), Range(0, 10**9, unit="GB/s")


def collective(text: str) -> str:
    """A collective's name, in nccl-tests' spelling, too.

    >>> collective("allreduce"), collective("alltoall"), collective("all_gather")
    ('all_reduce', 'all_to_all', 'all_gather')
    """
    plain = {name.replace("_", ""): name for name in (*OPERANDS, ALL)}
    name = plain.get(text.replace("_", ""))
    if name is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no collective: use all, {', '.join(OPERANDS)}")
    return name


def dtype(text: str) -> str:
    """A dtype's name, in nccl-tests' spelling, too, where `float` is of 32 bits.

    >>> dtype("float"), dtype("double"), dtype("int8")
    ('float32', 'float64', 'int8')
    """
    name = NCCL_DTYPES.get(text, text)
    if name not in (known := [*map(str, arrays.DTYPES), ALL]):
        raise argparse.ArgumentTypeError(f"{text!r} is no dtype: use {', '.join([*known, *NCCL_DTYPES])}")
    return name


def peers(text: str) -> list[str]:
    names = text.split(",")
    if strange := [name for name in names if name not in PEERS]:
        raise argparse.ArgumentTypeError(f"{strange[0]!r} is no peer: use {', '.join(PEERS)}")
    return names


def parse(size: int) -> argparse.Namespace:
    """The flags, for so many ranks.

    Raises: ValueError for what makes no sense, with the remedy.
    """
    flags = parser().parse_args()
    flags.collectives = chosen_collectives(flags)
    if flags.begin > flags.end:
        raise ValueError(f"--begin {flags.begin} is above --end {flags.end}: exchange them")
    if not 0 <= flags.root < size:
        raise ValueError(f"--root {flags.root}: there are ranks 0 to {size - 1}")
    if flags.tune and ALL in (flags.dtype, flags.op):
        raise ValueError("--tune: a tuning file is of one dtype and op: name them")
    if flags.tune_openmpi and not flags.tune:
        raise ValueError("--tune-openmpi needs --tune: pass a tuning file to write, too")
    if flags.plots and not flags.json:
        raise ValueError("--plots needs --json: pass a document to write and draw, or --from for others")
    flags.algorithms = flags.algorithms or ([ALL] if flags.tune else QUICK)
    check_algorithms(flags, size)
    flags.memories = memories(flags)
    flags.sizes = range(flags.begin, flags.end + 1, flags.step) if flags.step else sizes(flags)
    if len(flags.sizes) not in SIZES:
        raise ValueError(
            f"--step {flags.step} makes {len(flags.sizes)} sizes: use a longer one, for {SIZES.most} at most"
        )
    flags.settings = settings(flags)
    return flags


def parser() -> Parser:
    made = Parser("python -m collectives.bench", sys.modules["__main__"].__doc__)
    add = made.add_argument
    add("names", nargs="*", type=collective, metavar="COLLECTIVE", help="all_reduce, ..., or all (all_reduce)")
    add("--collectives", nargs="+", type=collective, metavar="NAME", help="the same")
    add("-a", "--algorithms", nargs="+", metavar="NAME", help='or all; "mpi" is the MPI library\'s own (auto mpi)')
    add("-b", "--begin", type=num_bytes, default="8", help="smallest vector, as in 8, 64K, 1M (8)")
    add("-e", "--end", type=num_bytes, default="64M", help="largest vector (64M)")
    ladder = made.add_mutually_exclusive_group()
    ladder.add_argument("-f", "--factor", type=FACTORS.whole, default=4, help="from one size to the next (4)")
    ladder.add_argument("-i", "--step", type=STEPS.whole, help="bytes from one size to the next, instead of a factor")
    add("-n", "--iters", "--repeats", dest="repeats", type=RUNS.whole, default=20, help="timed runs (20)")
    add(
        "-w",
        "--warmup_iters",
        "--warmups",
        dest="warmups",
        type=RUNS._replace(least=0).whole,
        default=3,
        help="runs before those (3)",
    )
    add("-c", "--check", type=RUNS._replace(least=0).whole, default=1, help="runs whose results are checked (1)")
    add(
        "-d",
        "--dtype",
        default="float32",
        type=dtype,
        help="float32, float in nccl-tests' spelling, ..., or all (float32)",
    )
    add("-o", "--op", default="sum", help=f"{', '.join(arrays.OPS)}, or all (sum)")
    add("-r", "--root", type=RUNS._replace(least=0).whole, default=0, help="of collectives that have one (0)")
    add("--device", default="cpu", help="cpu or cuda (cpu)")
    add("--memory", choices=[*MEMORIES, "both"], help="arrays from comm.empty, or others (symmetric)")
    add("--peers", type=peers, default=[], metavar="NAMES", help="to time as well: mpi,gloo,nccl")
    add("--json", type=Path, metavar="FILE", help="write everything, every iteration included")
    add("--csv", type=Path, metavar="FILE", help="write the results")
    add("--tune", type=Path, metavar="FILE", help="write a tuning file, for COLLECTIVES_TUNING, of all there is")
    documents.add_flags(add)
    add("--min-bw", type=BANDWIDTHS.number, metavar="GB/s", help="fail if the average bus bandwidth is below")
    add(
        "--handicap",
        type=HANDICAPS.number,
        default=1.0,
        metavar="F",
        help="make our runs F times as long, to try --compare",
    )
    return made


def chosen_collectives(flags: argparse.Namespace) -> list[str]:
    names = flags.names + (flags.collectives or [])
    if ALL in names or (flags.tune and not names):
        return list(OPERANDS)
    return list(dict.fromkeys(names)) or ["all_reduce"]


def check_algorithms(flags: argparse.Namespace, size: int) -> None:
    """Refuse names that no collective has, and algorithms asked for by name that need other numbers of ranks."""
    known = dict.fromkeys(name for collective in flags.collectives for name in algorithms.names(collective))
    others = ("auto", "mpi", ALL)
    if strange := [name for name in flags.algorithms if name not in (*known, *others)]:
        raise ValueError(f"--algorithms {strange[0]}: there are {', '.join([*known, *others])}")
    for row in algorithms.REGISTRY:
        if row.collective in flags.collectives and row.name in flags.algorithms:
            row.check(size)


def memories(flags: argparse.Namespace) -> tuple[str, ...]:
    memory = flags.memory or ("both" if flags.tune else "symmetric")
    return MEMORIES if memory == "both" else (memory,)


def sizes(flags: argparse.Namespace) -> tuple[int, ...]:
    return ladder(flags.begin, flags.end, flags.factor)


def settings(flags: argparse.Namespace) -> list[Setting]:
    """What is measured, in order; of dtypes and ops what goes together, unless both are asked for by name."""
    arrays.device(flags.device)
    dtypes = (
        sorted(map(arrays.dtype_of, arrays.DTYPES), key=str) if flags.dtype == ALL else [arrays.dtype_of(flags.dtype)]
    )
    ops = arrays.OPS if flags.op == ALL else (flags.op,)
    made = []
    for name in flags.collectives:
        for memory, dtype, op in product(flags.memories, dtypes, ops):
            made += [setting(flags, name, memory, dtype, op)] if usable(name, dtype, op, flags) else []
    return list(dict.fromkeys(made))


def setting(flags: argparse.Namespace, name: str, memory: str, dtype: np.dtype, op: str) -> Setting:
    root = flags.root if name in ROOTED else 0
    if name == "barrier":
        return Setting(name, "ordinary")
    return Setting(name, memory, flags.device, dtype, op if name in REDUCTIONS else "sum", root)


def usable(name: str, dtype: np.dtype, op: str, flags: argparse.Namespace) -> bool:
    """Whether an op makes sense for a dtype.

    Raises: ValueError with the remedy, where it was asked for.
    """
    try:
        if name in REDUCTIONS:
            arrays.check_op(op, dtype)
    except ValueError:
        if ALL in (flags.dtype, flags.op) and op in arrays.OPS:
            return False
        raise
    return True
