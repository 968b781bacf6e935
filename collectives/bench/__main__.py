"""Measure collectives, as nccl-tests does, and compare them with a model's prediction and the machine's limit.

mpirun -n 4 python -m collectives.bench all_reduce all_gather -b 1K -e 16M --peers gloo --json results.json
mpirun -n 2 python -m collectives.bench all_reduce -A all --html report.html
mpirun -n 4 python -m collectives.bench --tune tuning.json
mpirun -n 4 python -m collectives.bench all_reduce -A ring -b 1M --space-time ring.png

Sizes are of the whole vector: the input of all_reduce, reduce_scatter and all_to_all, the result of all_gather.  A
bound is the time for copying, or sending between nodes, as much at the rates that are measured first.
"""

import argparse
import sys
from itertools import product
from pathlib import Path
from typing import NamedTuple

import numpy as np

from collectives import algorithms
from collectives.arrays import views
from collectives.bench.trial import PEERS, RANK_TIMES, Workload
from collectives.job.settings import Parser, Range, ladder, num_bytes
from collectives.runtime.choose import links
from collectives.runtime.choose.auto import MEMORIES
from collectives.schedule import draw
from collectives.schedule.spec import COLLECTIVES, OPS, Chunks

QUICK = ["auto", "mpi"]
ALL = "all"
# nccl-tests' names, where they differ.
NCCL_DTYPES = {"half": "float16", "float": "float32", "double": "float64"}
RUNS, FACTORS, BANDWIDTHS = Range(1, 10**6), Range(2, 2**30), Range(0, 10**9, unit="GB/s")
GROUPS = Range(1, 1000)


class ForeignFlag(NamedTuple):
    """A flag of nccl-tests for a feature that is missing here: its neutral value, if any, and the remedy."""

    short: str
    name: str
    neutral: str
    remedy: str

    def value(self, text: str) -> str:
        if text != self.neutral:
            raise argparse.ArgumentTypeError(f"{text!r} is not available here: {self.remedy}")
        return text


FOREIGN = (
    ForeignFlag("-t", "--nthreads", "1", "a rank is one thread, so start more ranks by mpirun -n"),
    ForeignFlag("-g", "--ngpus", "1", "a rank has one GPU, so start a rank for each GPU by mpirun -n"),
    ForeignFlag("-p", "--parallel_init", "0", "ranks are processes, which start at once, so leave it out"),
    ForeignFlag("-y", "--stream_null", "0", "calls follow CuPy's current stream, so leave it out"),
    ForeignFlag("-T", "--timeout", "0", "set COLLECTIVES_TIMEOUT_S to the seconds after which a hang ends the job"),
    ForeignFlag("-G", "--cudagraph", "0", "calls are not captured in CUDA graphs, so leave it out"),
    ForeignFlag("-C", "--report_cputime", "0", "times are of the wall clock, so leave it out"),
    ForeignFlag("-F", "--output_file", "", "use --json FILE or --html FILE"),
)


def main() -> int:
    import collectives

    comm = collectives.world()  # before any import of MPI
    from collectives.bench import run

    with comm.agreed():
        flags = parse(comm.size)
        if flags.links:
            if comm.rank == 0:
                print(links_report(flags.links))
            return 0
        if comm.rank == 0:
            refuse_unwritable(flags)  # before minutes of measuring
    return run.run(comm, flags)


def parser() -> Parser:
    parser = Parser("python -m collectives.bench", __doc__)
    add, count = parser.add_argument, RUNS._replace(least=0).whole
    add("names", nargs="*", type=collective, metavar="COLLECTIVE", help="all_reduce, ..., or all (all_reduce)")
    add("-A", "--algorithms", nargs="+", metavar="NAME", help='or all; "mpi" is the MPI library\'s own (auto mpi)')
    add("-b", "--begin", "--minbytes", type=num_bytes, default="8", metavar="BYTES", help="smallest vector (8)")
    add("-e", "--end", "--maxbytes", type=num_bytes, default="64M", metavar="BYTES", help="largest vector (64M)")
    add("-f", "--factor", "--stepfactor", type=FACTORS.whole, default=4, metavar="N", help="between sizes (4)")
    add("-i", "--stepbytes", type=num_bytes, metavar="BYTES", help="between sizes, in place of a factor")
    add("-n", "--iters", type=RUNS.whole, default=20, metavar="N", help="timed runs (20)")
    add("-m", "--agg_iters", type=GROUPS.whole, default=1, metavar="N", help="calls of a run, in one comm.group() (1)")
    add("-w", "--warmup_iters", type=count, default=3, metavar="N", help="runs before those (3)")
    add("-z", "--blocking", type=blocking, default="1", metavar="0/1", help="0: time all runs in a row, 1: each (1)")
    add("-a", "--average", type=average, default="3", metavar="0/1/2/3", help="time of rank 0, mean, least or most (3)")
    add("-c", "--check", type=count, default=1, metavar="N", help="calls whose results are checked (1)")
    add("-d", "--dtype", "--datatype", default="float32", type=dtype, help="as in NumPy or nccl-tests (float32)")
    add("-o", "--op", default="sum", help=f"{', '.join(OPS)} (sum)")
    add("-r", "--root", type=count, default=0, metavar="RANK", help="of collectives that have one (0)")
    add("--device", default="cpu", help="cpu or cuda (cpu)")
    add("--memory", choices=[*MEMORIES, "both"], help="arrays from comm.empty, or others (symmetric)")
    add("--peers", type=peers, default=[], metavar="NAMES", help="to time as well: mpi,gloo,nccl")
    add("--wide", action="store_true", help="also print noise, and the share of the model's and the machine's speed")
    add("--min-bw", type=BANDWIDTHS.number, metavar="GB/s", help="fail if the average bus bandwidth is below")
    add("--json", type=Path, metavar="FILE", help="write everything, every iteration included, after each size")
    add("--html", type=Path, metavar="FILE", help="write charts and tables, with the machine and the command")
    add("--tune", type=Path, metavar="FILE", help="write a tuning file, for COLLECTIVES_TUNING, of all there is")
    add("--links", nargs="?", const="show", choices=["show", "forget"], help="show or delete the kept speeds of links")
    add("--space-time", metavar="FILE", help="draw one run as planned and as it happened, of one algorithm and size")
    for foreign in FOREIGN:
        add(foreign.short, foreign.name, type=foreign.value, metavar=foreign.neutral or "FILE", help=foreign.remedy)
    return parser


def collective(text: str) -> str:
    """Parse a collective's name, also in nccl-tests' spelling.

    >>> collective("allreduce"), collective("alltoall"), collective("all_gather")
    ('all_reduce', 'all_to_all', 'all_gather')
    """
    plain = {name.replace("_", ""): name for name in (*COLLECTIVES, ALL)}
    name = plain.get(text.replace("_", ""))
    if name is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a collective: use all, {', '.join(COLLECTIVES)}")
    return name


def dtype(text: str) -> np.dtype:
    """Parse a dtype's name, also in nccl-tests' spelling, where `float` has 32 bits.

    >>> dtype("float"), dtype("double"), dtype("int8")
    (dtype('float32'), dtype('float64'), dtype('int8'))
    """
    name, names = NCCL_DTYPES.get(text, text), [*map(str, views.DTYPES)]
    if name not in names:
        raise argparse.ArgumentTypeError(f"{text!r} is not a dtype: use {', '.join([*names, *NCCL_DTYPES])}")
    return views.dtype_of(name)


def blocking(text: str) -> bool:
    if text not in ("0", "1"):
        raise argparse.ArgumentTypeError(f"{text!r}: write 1 to time each run by itself, or 0 to time all in a row")
    return text == "1"


def average(text: str) -> str:
    """Parse the choice of the rank whose time counts, in nccl-tests' numbering.

    >>> average("1"), average("3")
    ('mean of ranks', 'slowest rank')
    """
    names = dict(zip("0123", RANK_TIMES, strict=True))
    if text not in names:
        words = ", ".join(f"{number} for {name}" for number, name in names.items())
        raise argparse.ArgumentTypeError(f"{text!r}: write {words}; algorithms are named by -A")
    return names[text]


def peers(text: str) -> list[str]:
    names = text.split(",")
    if strange := [name for name in names if name not in PEERS]:
        raise argparse.ArgumentTypeError(f"{strange[0]!r} is not a peer: use {', '.join(PEERS)}")
    return names


def parse(size: int) -> argparse.Namespace:
    """Parse the flags, for so many ranks, and add the workloads, names of contestants and sizes that follow.

    Raises: ValueError for invalid flags, with the remedy.
    """
    flags = parser().parse_args()
    names = flags.names or [ALL if flags.tune else "all_reduce"]
    flags.collectives = list(COLLECTIVES) if ALL in names else list(dict.fromkeys(names))
    flags.algorithms = flags.algorithms or ([ALL] if flags.tune else QUICK)
    if flags.space_time:
        flags.end = flags.begin
    if flags.begin > flags.end:
        raise ValueError(f"--begin {flags.begin} is above --end {flags.end}: exchange them")
    if not 0 <= flags.root < size:
        raise ValueError(f"--root {flags.root}: there are ranks 0 to {size - 1}")
    check_algorithms(flags, size)
    step = flags.stepbytes
    flags.sizes = range(flags.begin, flags.end + 1, step) if step else ladder(flags.begin, flags.end, flags.factor)
    flags.workloads = workloads(flags)
    flags.names = {name: names_of(name, size, flags) for name in flags.collectives}
    if flags.space_time and (len(flags.workloads), *map(len, flags.names.values())) != (1, 1):
        raise ValueError("--space-time draws one algorithm of one collective: name it by -A")
    return flags


def check_algorithms(flags: argparse.Namespace, size: int) -> None:
    """Refuse names that no collective has, and algorithms asked for by name that need other numbers of ranks."""
    names = dict.fromkeys(name for collective in flags.collectives for name in algorithms.names(collective))
    others = ("auto", "mpi", ALL)
    if strange := [name for name in flags.algorithms if name not in (*names, *others)]:
        raise ValueError(f"--algorithms {strange[0]}: there are {', '.join([*names, *others])}")
    for row in algorithms.REGISTRY:
        if row.collective in flags.collectives and row.name in flags.algorithms:
            algorithms.check(row, size)


def names_of(collective: str, size: int, flags: argparse.Namespace) -> list[str]:
    """List the contestants: algorithms that can run on so many ranks, then peers."""
    ours, selection = algorithms.names(collective, size), {*flags.algorithms, *flags.peers}
    if ALL in selection:
        selection |= {*ours} if flags.tune else {*ours, "mpi"}
    return [name for name in dict.fromkeys(("auto", *ours, *PEERS)) if name in selection]


def workloads(flags: argparse.Namespace) -> list[Workload]:
    """List the workloads to be measured, in order."""
    views.device(flags.device)
    flags.memory = flags.memory or ("both" if flags.tune else "symmetric")
    memories, selection = MEMORIES if flags.memory == "both" else (flags.memory,), []
    for name, memory in product(flags.collectives, memories):
        spec = COLLECTIVES[name]
        if spec.reduces:
            views.check_op(flags.op, flags.dtype)
        op, root = flags.op if spec.reduces else "sum", flags.root if spec.rooted else 0
        without_arrays = Workload(name, "ordinary")
        with_arrays = Workload(name, memory, flags.device, flags.dtype, op, root)
        selection.append(without_arrays if spec.gives is Chunks.NONE else with_arrays)
    return list(dict.fromkeys(selection))


def links_report(action: str) -> str:
    """Show what `auto` knows of links, by file, or delete it."""
    if action == "forget":
        return "\n".join(f"deleted {path}" for path in links.forget()) or "nothing is kept"
    return "\n".join(map(links.describe, links.files())) or "nothing is kept: auto uses default speeds"


def refuse_unwritable(flags: argparse.Namespace) -> None:
    for name in ("tune", "json", "html"):
        if getattr(flags, name) is not None:
            draw.refuse(str(getattr(flags, name)), f"--{name} ")
    if flags.space_time is not None:
        draw.refuse_picture(str(flags.space_time), "--space-time ")


if __name__ == "__main__":
    sys.exit(main())
