"""Measure collectives, as nccl-tests does, and compare them with a model's prediction and the machine's limit.

mpirun -n 4 python -m collectives.bench all_reduce all_gather -b 1K -e 16M --peers gloo --json results.json
mpirun -n 2 python -m collectives.bench all_reduce -A all --html report.html
mpirun -n 2 python -m collectives.bench latency bandwidth bidirectional message_rate iall_reduce
mpirun -n 4 python -m collectives.bench --tune tuning.json
mpirun -n 4 python -m collectives.bench all_reduce -A ring -b 1M --space-time ring.png

Sizes are of the whole vector: the input of all_reduce, reduce_scatter and all_to_all, the result of all_gather, one
message.  A bound is the time for copying, or sending between nodes, as much at the rates that are measured first.
Names with an i, as iall_reduce, are of non-blocking calls, with the share of a call that overlaps with computation.
"""

import argparse
import sys
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import NamedTuple

import numpy as np

from collectives import algorithms
from collectives.arrays import views
from collectives.bench.benchmarks import BENCHMARKS, GROUPS
from collectives.bench.trial import BLOCKING, EACH, PEERS, RANK_TIMES, Workload
from collectives.job.settings import Parser, Range, ladder, num_bytes
from collectives.runtime.choose import links
from collectives.runtime.choose.auto import MEMORIES
from collectives.schedule import draw
from collectives.schedule.spec import COLLECTIVES, OPS, SOURCES, Chunks

QUICK = ["auto", "mpi"]
ALL = "all"
# nccl-tests' names, where they differ.
NCCL_DTYPES = {"half": "float16", "float": "float32", "double": "float64"}
RUNS, FACTORS, BANDWIDTHS = Range(1, 10**6), Range(2, 2**30), Range(0, 10**9, unit="GB/s")
CALLS = Range(1, 1000)  # of a group, or messages of a window
CYCLES, ELEMENTS = Range(0, 10**6), Range(0, 10**6)
ALL_ROOTS = -1
KEPT_LINKS = ("show", "forget")
REGISTRATIONS = {"0": "ordinary", "2": "symmetric"}


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
    ForeignFlag("-x", "--cta_policy", "0", "it is a setting of NCCL's kernels, so leave it out"),
    ForeignFlag("-D", "--device_implementation", "0", "algorithms are named by -A, those on a device too"),
    ForeignFlag("-V", "--device_cta_count", "16", "kernels choose their numbers of blocks, so leave it out"),
)


def main() -> int:
    import collectives

    comm = collectives.world()  # before any import of MPI
    from collectives.bench import host_links, run

    with comm.agreed():
        flags = parse(comm.size)
        if flags.links in KEPT_LINKS:
            if comm.rank == 0:
                print(links_report(flags.links))
            return 0
        if comm.rank == 0:
            refuse_unwritable(flags)  # before minutes of measuring
    if flags.links:
        host_links.main(comm, Path(flags.links))
        return 0
    return run.run(comm, flags)


def parser() -> Parser:
    parser = Parser("python -m collectives.bench", __doc__)
    add, count = parser.add_argument, RUNS._replace(least=0).whole
    add(
        "names",
        nargs="*",
        type=collective,
        metavar="NAME",
        help="all_reduce, latency, ..., all or overlap (all_reduce)",
    )
    add(
        "-A",
        "--algorithms",
        nargs="+",
        metavar="NAME",
        help='or all, or module:function; "mpi" is the MPI library\'s own (auto mpi)',
    )
    add("-b", "--begin", "--minbytes", type=size, default="8", metavar="BYTES", help="smallest vector (8)")
    add("-e", "--end", "--maxbytes", type=size, default="64M", metavar="BYTES", help="largest vector (64M)")
    add("-f", "--factor", "--stepfactor", type=FACTORS.whole, default=4, metavar="N", help="between sizes (4)")
    add("-i", "--stepbytes", type=size, metavar="BYTES", help="between sizes, in place of a factor")
    add("-n", "--iters", type=RUNS.whole, default=20, metavar="N", help="timed runs (20)")
    add("-m", "--agg_iters", type=CALLS.whole, default=1, metavar="N", help="calls of a run, in one comm.group() (1)")
    add("-w", "--warmup_iters", type=count, default=3, metavar="N", help="runs before those (3)")
    add(
        "-N", "--run_cycles", type=CYCLES.whole, default=1, metavar="N", help="times through all sizes, 0: for ever (1)"
    )
    add(
        "-W", "--window_size", type=CALLS.whole, default=64, metavar="N", help="messages at once in bandwidth, ... (64)"
    )
    modes = "; ".join(f"{number}: {words}" for number, words in enumerate(BLOCKING))
    add("-z", "--blocking", type=blocking, default="3", metavar="0/1/2/3", help=f"how runs are timed: {modes} (3)")
    add("-I", "--per_iter_timing", type=switch, default="0", metavar="0/1", help="print min, max and p99 of runs (0)")
    add("-K", "--per_iter_skip", type=count, default=0, metavar="N", help="leave the first N runs out of those (0)")
    add("-a", "--average", type=average, default="3", metavar="0/1/2/3", help="time of rank 0, mean, least or most (3)")
    add("-c", "--check", type=count, default=1, metavar="N", help="calls whose results are checked (1)")
    add(
        "-d", "--dtype", "--datatype", default="float32", type=dtype, help="as in NumPy or nccl-tests, or all (float32)"
    )
    add("-o", "--op", default="sum", help=f"{', '.join(OPS)}, or all (sum)")
    add("-r", "--root", type=root, default=0, metavar="RANK", help="of collectives that have one; -1: each in turn (0)")
    add("-u", "--unalign", type=ELEMENTS.whole, default=0, metavar="N", help="begin arrays so many elements later (0)")
    add("--device", default="cpu", help="cpu or cuda (cpu)")
    add("--memory", choices=[*MEMORIES, "both"], help="arrays from comm.empty, or others (symmetric)")
    add(
        "-R",
        "--local_register",
        type=registration,
        dest="memory",
        metavar="0/2",
        help="0: ordinary, 2: symmetric memory",
    )
    add("--peers", type=peers, default=[], metavar="NAMES", help="to time as well: mpi,gloo,nccl")
    add("--wide", action="store_true", help="also print noise, and the share of the model's and the machine's speed")
    add(
        "-S",
        "--report_timestamps",
        type=switch,
        default="0",
        metavar="0/1",
        help="print when each line was measured (0)",
    )
    add("-M", "--memory_report", type=switch, default="0", metavar="0/1", help="print memory used (0)")
    add("--min-bw", type=BANDWIDTHS.number, metavar="GB/s", help="fail if the average bus bandwidth is below")
    json_help = "write everything, every iteration included, after each size"
    add("-J", "--json", "--output_file", type=Path, metavar="FILE", help=json_help)
    add("--html", type=Path, metavar="FILE", help="write charts and tables, with the machine and the command")
    add("--tune", type=Path, metavar="FILE", help="write a tuning file, for COLLECTIVES_TUNING, of all there is")
    text = "show or forget the kept speeds of links; or measure those between all hosts, and write them as a network"
    add("--links", nargs="?", const="show", type=links_action, metavar="show | forget | FILE.toml", help=text)
    add("--space-time", metavar="FILE", help="draw one run as planned and as it happened, of one algorithm and size")
    for foreign in FOREIGN:
        add(foreign.short, foreign.name, type=foreign.value, metavar=foreign.neutral or "FILE", help=foreign.remedy)
    return parser


def links_action(text: str) -> str:
    if text in KEPT_LINKS or text.endswith(".toml"):
        return text
    raise argparse.ArgumentTypeError(f"{text!r} must be {', '.join(KEPT_LINKS)}, or a FILE.toml to be written")


def collective(text: str) -> str:
    """Parse the name of a benchmark or a group of them, also in nccl-tests' spelling.

    >>> collective("allreduce"), collective("alltoallv"), collective("iall_gather")
    ('all_reduce', 'all_to_all_v', 'iall_gather')
    """
    names = (*GROUPS, *BENCHMARKS)
    plain = {name.replace("_", ""): name for name in names}
    name = plain.get(text.replace("_", ""))
    if name is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a benchmark: use {', '.join(names)}")
    return name


def size(text: str) -> int:
    """Parse a size, whose suffix may be small, as in nccl-tests.

    >>> size("64k"), size("64K")
    (65536, 65536)
    """
    return num_bytes(text.upper() if text[-1:] in "kmg" else text)


def dtype(text: str) -> np.dtype | str:
    """Parse a dtype's name, also in nccl-tests' spelling, where `float` has 32 bits; or `all`.

    >>> dtype("float"), dtype("double"), dtype("int8")
    (dtype('float32'), dtype('float64'), dtype('int8'))
    """
    name, names = NCCL_DTYPES.get(text, text), sorted(map(str, views.DTYPES))
    if name == ALL:
        return name
    if name not in names:
        raise argparse.ArgumentTypeError(f"{text!r} is not a dtype: use {', '.join([*names, *NCCL_DTYPES, ALL])}")
    return views.dtype_of(name)


def root(text: str) -> int:
    return ALL_ROOTS if text in (ALL, str(ALL_ROOTS)) else RUNS._replace(least=0).whole(text)


def chosen(text: str, choices: Mapping[str, str], remedy: str = "") -> str:
    """Return what a number stands for.

    Raises: argparse.ArgumentTypeError with the choices.
    """
    if text not in choices:
        words = ", ".join(f"{number} for {name}" for number, name in choices.items())
        raise argparse.ArgumentTypeError(f"{text!r}: write {words}{remedy}")
    return choices[text]


def blocking(text: str) -> int:
    return BLOCKING.index(chosen(text, dict(zip("0123", BLOCKING, strict=True))))


def switch(text: str) -> bool:
    return chosen(text, {"0": "no", "1": "yes"}) == "yes"


def registration(text: str) -> str:
    return chosen(text, REGISTRATIONS, "; MPI registers memory by itself where it must")


def average(text: str) -> str:
    """Parse the choice of the rank whose time counts, in nccl-tests' numbering.

    >>> average("1"), average("3")
    ('mean of ranks', 'slowest rank')
    """
    return chosen(text, dict(zip("0123", RANK_TIMES, strict=True)), "; algorithms are named by -A")


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
    flags.collectives = list(dict.fromkeys(each for name in names for each in GROUPS.get(name, [name])))
    flags.algorithms = flags.algorithms or ([ALL] if flags.tune else QUICK)
    if flags.space_time:
        flags.end = flags.begin
    check(flags, size)
    check_algorithms(flags, size)
    step = flags.stepbytes
    flags.sizes = range(flags.begin, flags.end + 1, step) if step else ladder(flags.begin, flags.end, flags.factor)
    flags.workloads = workloads(flags, size)
    flags.names = {name: names_of(name, size, flags) for name in flags.collectives}
    if flags.space_time and (len(flags.workloads), *map(len, flags.names.values())) != (1, 1):
        raise ValueError("--space-time draws one algorithm of one collective: name it by -A")
    return flags


def check(flags: argparse.Namespace, size: int) -> None:
    """Refuse flags that contradict each other, or the number of ranks."""
    if flags.begin > flags.end:
        raise ValueError(f"--begin {flags.begin} is above --end {flags.end}: exchange them")
    if not ALL_ROOTS <= flags.root < size:
        raise ValueError(f"--root {flags.root}: there are ranks 0 to {size - 1}")
    if flags.per_iter_skip and not flags.per_iter_timing:
        raise ValueError(f"--per_iter_skip {flags.per_iter_skip} has no effect without --per_iter_timing 1: add it")
    if flags.per_iter_skip >= flags.iters:
        raise ValueError(f"--per_iter_skip {flags.per_iter_skip} leaves none of --iters {flags.iters}: pass less")
    if flags.per_iter_timing and flags.blocking == 0 and flags.device != "cpu":
        raise ValueError("--per_iter_timing 1 cannot tell calls on a device apart in --blocking 0: use 1, 2 or 3")
    for name in flags.collectives:
        if BENCHMARKS[name].messages and name != "sendrecv" and size == 1:
            raise ValueError(f"{name} needs two ranks: start it by mpirun -n 2")
        if BENCHMARKS[name].overlaps and flags.blocking != EACH:  # as computation is timed that way, too
            remedy = "leave it out, or pass 3"
            raise ValueError(f"--blocking {flags.blocking} is not for {name}, timed run by run: {remedy}")
        if (flags.tune or flags.space_time) and name not in COLLECTIVES:
            raise ValueError(f"{'--tune' if flags.tune else '--space-time'} is for collectives: leave {name} out")


def check_algorithms(flags: argparse.Namespace, size: int) -> None:
    """Refuse names that no collective has, and algorithms asked for by name that need other numbers of ranks."""
    benchmarks = [BENCHMARKS[name] for name in flags.collectives if not BENCHMARKS[name].messages]
    rows = [(row, each) for each in benchmarks for row in algorithms.rows(each.spec.name)]
    names, others = dict.fromkeys(row.name for row, _ in rows), ("auto", "mpi", ALL)
    composed = [name for name in flags.algorithms if is_composed(name)]
    if strange := [name for name in flags.algorithms if name not in (*names, *others, *composed)]:
        words = f"{', '.join([*names, *others])}, and schedules of your own as module:function"
        raise ValueError(f"--algorithms {strange[0]}: there are {words}")
    rows += [(algorithms.find(each.spec.name, name), each) for name in composed for each in benchmarks]
    for row, each in rows:
        if row.name in flags.algorithms:
            algorithms.check(row, size, equal=not each.is_uneven)


def is_composed(name: str) -> bool:
    """Return whether a name is that of a variant, as double_tree/4, or of a program's function."""
    return "/" in name or ":" in name


def names_of(name: str, size: int, flags: argparse.Namespace) -> list[str]:
    """List the contestants: algorithms that can run on so many ranks, then peers."""
    _, spec, is_uneven, _, messages = BENCHMARKS[name]
    ours = [] if messages else algorithms.names(spec.name, size, equal=not is_uneven)
    selection = {*flags.algorithms, *flags.peers}
    if ALL in selection:
        selection |= {*ours} if flags.tune else {*(ours or ["auto"]), "mpi"}
    composed = [] if messages else filter(is_composed, flags.algorithms)
    return [name for name in dict.fromkeys(("auto", *ours, *composed, *PEERS)) if name in selection]


def workloads(flags: argparse.Namespace, size: int) -> list[Workload]:
    """List the workloads to be measured, in order."""
    views.device(flags.device)
    flags.memory = flags.memory or ("both" if flags.tune else "symmetric")
    memories, selection = MEMORIES if flags.memory == "both" else (flags.memory,), []
    dtypes = sorted(views.DTYPES, key=str) if flags.dtype == ALL else [flags.dtype]
    for name, memory, dtype in product(flags.collectives, memories, dtypes):
        spec = BENCHMARKS[name].spec
        ops = ops_of(name, dtype, flags) if spec.reduces else ["sum"]
        roots = [0] if not spec.rooted else range(size) if flags.root == ALL_ROOTS else [flags.root]
        of_arrays = [Workload(name, memory, flags.device, dtype, op, root) for op, root in product(ops, roots)]
        selection += [Workload(name, "ordinary")] if spec.gives is Chunks.NONE else of_arrays
    return list(dict.fromkeys(selection))


def links_report(action: str) -> str:
    """Show what `auto` knows of links, by file, or delete it."""
    if action == "forget":
        return "\n".join(f"deleted {path}" for path in links.forget()) or "nothing is kept"
    return "\n".join(map(links.describe, links.files())) or "nothing is kept: auto uses default speeds"


def ops_of(name: str, dtype: np.dtype, flags: argparse.Namespace) -> list[str]:
    """List the ops to be measured: under `all`, of ops or dtypes, those that the dtype and the collective have.

    Raises: ValueError for an op that makes no sense for the one dtype.
    """
    able = []
    for op in [*OPS] if flags.op == ALL else [flags.op]:
        try:
            views.check_op(op, dtype)
        except ValueError:
            if op not in OPS or ALL not in (flags.op, flags.dtype):
                raise
            continue
        is_of_some = BENCHMARKS[name].spec.sources is not SOURCES["everyone"]
        able += [] if flags.op == ALL and op == "avg" and is_of_some else [op]
    return able


def refuse_unwritable(flags: argparse.Namespace) -> None:
    for name in ("tune", "json", "html"):
        if getattr(flags, name) is not None:
            draw.refuse(str(getattr(flags, name)), f"--{name} ")
    if flags.space_time is not None:
        draw.refuse_picture(str(flags.space_time), "--space-time ")


if __name__ == "__main__":
    sys.exit(main())
