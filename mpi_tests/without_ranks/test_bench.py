"""The benchmark's numbers, flags and rows."""

import doctest
import math
import re
from argparse import Namespace
from contextlib import nullcontext
from itertools import islice
from types import SimpleNamespace

import numpy as np
import pytest

from collectives.arrays.views import dtype_of
from collectives.bench import __main__ as bench
from collectives.bench import constants, overlap, run, timing
from collectives.bench import trial as numbers
from collectives.bench.constants import bound_s
from collectives.bench.report import average_gbps, bus_factor, fastest, footer, heading, lines
from collectives.bench.run import row_of
from collectives.bench.timing import Contestant, contestant
from collectives.bench.trial import Trial, Workload, element_counts, in_place_choices, trial_of
from collectives.job import system
from collectives.schedule.network import Link, Network
from mpi_tests.helpers.reference import (
    BITS,
    COLLECTIVES,
    DTYPES,
    INTEGERS,
    ROOTED,
    SCANS,
    TRUTHS,
    expected,
    ops_of,
    reduced,
    same,
    widened,
)
from mpi_tests.helpers.site import DOCS, table

EVERY = (*COLLECTIVES, *SCANS)
CASES = [(collective, in_place) for collective in EVERY for in_place in in_place_choices(collective)]


@pytest.mark.parametrize("dtype", DTYPES)
def test_numbers_are_exact_in_any_order(dtype):
    for op in ops_of(dtype):
        for size in (1, 2, 3, 8, 64):
            operands = [numbers.operand(30, dtype_of(dtype), rank, size, op) for rank in range(size)]
            same(numbers.reduction(30, dtype_of(dtype), size, op), exact_reduction(operands, op), (op, size))
            partial = np.prod if op == "prod" else np.sum
            largest = partial([np.abs(widened(x).real) for x in operands], axis=0).max()
            assert largest <= 64 or op in ("min", "max", *BITS, *TRUTHS)
            assert numbers.NEVER not in numbers.reduction(30, dtype_of(dtype), size, op)
            assert size == 1 or len({x.tobytes() for x in operands}) > 1
            whole = dtype in INTEGERS and op == "avg" and size > numbers.GIVERS  # all elements round to 0
            assert dtype == "bool" or whole or len(np.unique(numbers.reduction(30, dtype_of(dtype), size, op))) > 1


def exact_reduction(arrays: list[np.ndarray], op: str) -> np.ndarray:
    """Reduce exactly, which includes complex averages, whose quotients NumPy rounds twice."""
    if arrays[0].dtype.kind != "c" or op == "prod":
        return reduced(arrays, op)
    return (reduced([x.real for x in arrays], op) + 1j * reduced([x.imag for x in arrays], op)).astype(arrays[0].dtype)


def trials(workload: Workload, size: int, in_place: bool) -> list[Trial]:
    count = element_counts(workload, size, sizes=[100])[0]
    comms = [
        SimpleNamespace(rank=rank, size=size, empty=lambda count, dtype, device: np.empty(count, dtype))
        for rank in range(size)
    ]
    return [trial_of(comm, workload, count, in_place) for comm in comms]


@pytest.mark.parametrize(("collective", "in_place"), CASES)
@pytest.mark.parametrize("memory", ["symmetric", "ordinary"])
def test_what_a_trial_wants_is_what_the_collective_does(collective, in_place, memory):
    for size, root, (dtype, op) in (
        (1, 0, ("float32", "sum")),
        (3, 2, ("bfloat16", "avg")),
        (8, 5, ("int8", "prod")),
    ):
        op = "sum" if collective in SCANS and op == "avg" else op
        ranks = trials(Workload(collective, memory, "cpu", dtype_of(dtype), op, root), size, in_place)
        inputs = [ranks[root].input() if trial.x is None else trial.input() for trial in ranks]
        for trial in ranks:
            trial.fill()
            assert trial.x is None or np.array_equal(trial.x, trial.input())
            assert ("root" in trial.arguments) == (collective in ROOTED)
            want = expected(collective, inputs, trial.rank, op, root)
            same(trial.expected(), want)
            if want is None:
                assert trial.num_wrong() == 0
                continue
            unchanged = (collective == "reduce" and trial.rank != root) or (in_place and size == 1)
            unchanged |= trial.rank == 0 and (collective == "exscan" or (collective == "scan" and in_place))
            assert (trial.num_wrong() > 0) != (unchanged or (collective == "broadcast" and trial.rank == root))
            trial.out[:] = want
            assert trial.num_wrong() == 0
            trial.out[3:5] += 1
            assert trial.num_wrong() == 2


@pytest.mark.parametrize("size", [1, 2, 5])
def test_uneven_chunks_are_those_of_nccl_tests(size):
    """Rank s sends rank d an amount in proportion to how far on it is; all send and receive as much."""
    units = [[(d - s) % size if size > 1 else 1 for d in range(size)] for s in range(size)]
    ranks = trials(Workload("all_to_all_v", dtype=dtype_of("int32")), size, in_place=False)
    unit = ranks[0].count // sum(units[0])
    assert unit > 0
    pieces = {}
    for s, trial in enumerate(ranks):
        lengths, x = trial.arguments["send_counts"], iter(trial.input().tolist())
        assert lengths == [unit * number for number in units[s]]
        pieces |= {(s, d): list(islice(x, length)) for d, length in enumerate(lengths)}
        assert next(x, None) is None
    for d, trial in enumerate(ranks):
        assert trial.arguments["recv_counts"] == [unit * units[s][d] for s in range(size)]
        assert trial.expected().tolist() == [number for s in range(size) for number in pieces[s, d]]
        assert len(trial.out) == trial.count


MESSAGES = {  # on 5 ranks, whose vector arrives at each of them
    "sendrecv": {0: 4, 1: 0, 2: 1, 3: 2, 4: 3},
    "latency": {0: 2, 2: 0},
    "bandwidth": {2: 0},
    "bidirectional": {0: 2, 2: 0},
    "message_rate": {2: 0, 3: 1},
}


@pytest.mark.parametrize("name", MESSAGES)
def test_what_arrives_where(name):
    ranks = trials(Workload(name), 5, in_place=False)
    assert {rank for rank, trial in enumerate(ranks) if trial.out is not None} == {*MESSAGES[name]}
    for rank, source in MESSAGES[name].items():
        same(ranks[rank].expected(), ranks[source].input(), (name, rank))
        ranks[rank].fill()
        assert ranks[rank].num_wrong() == ranks[rank].count == 25
    assert trials(Workload("sendrecv"), 1, in_place=False)[0].partners == (0, 0)


def test_arrays_may_be_unaligned():
    comm = SimpleNamespace(rank=0, size=1, empty=lambda count, dtype, device: np.empty(count, dtype))
    trial = Trial(comm, Workload("all_reduce"), 8, in_place=False, unalign=3)
    for array in (trial.x, trial.out):
        assert (len(array), array.ctypes.data - array.base.ctypes.data) == (8, 12)


def test_bus_bandwidth_is_that_of_nccl_tests():
    factors = {"all_reduce": 14 / 8, "broadcast": 1, "reduce": 1}
    assert {name: bus_factor(name, 8) for name in EVERY} == dict.fromkeys(EVERY, 7 / 8) | factors
    assert {name: bus_factor(f"i{name}", 8) for name in EVERY} == dict.fromkeys(EVERY, 7 / 8) | factors
    assert bus_factor("all_to_all_v", 8) == 7 / 8
    links = {"sendrecv": 1, "latency": 1, "bandwidth": 1, "bidirectional": 2, "message_rate": 4}
    assert {name: bus_factor(name, 9) for name in links} == links


def test_a_bound_is_of_memory_in_a_node_and_of_the_wire_between_nodes():
    network = Network(between=Link(1e-5, 8e-9), copy_s_per_byte=1e-10, cores=2)
    one, four = (tuple(range(4)),), ((0, 1), (2, 3), (4, 5), (6, 7))
    assert bound_s("all_reduce", 1000, one, network) == pytest.approx(1000 * 1e-10 * 2)
    assert bound_s("all_reduce", 1000, four, network) == pytest.approx(1.5 * 1000 * 8e-9)
    assert bound_s("all_gather", 1000, ((0,), (1, 2, 3)), network) == pytest.approx(0.75 * 1000 * 8e-9)
    assert bound_s("all_reduce", 1000, ((0,),), network) is None
    assert bound_s("barrier", 0, one, network) is None


def row(name="ring", seconds=(1.0,), wrong=0, nbytes=8, skip=0, in_place=False, of="all_reduce", **more) -> dict:
    comm = SimpleNamespace(rank=0, size=2, empty=lambda count, dtype, device: np.empty(count, dtype))
    one = Contestant(name, name, trial_of(comm, Workload(of), nbytes // 4, in_place), None, None)
    samples = np.array(seconds)
    return row_of(one, np.median(samples), samples, model_s=1e-6, bound_s=1e-6, wrong=wrong, skip=skip) | more


def flags_of(wide=False, per_iter_timing=False, report_timestamps=False):
    return Namespace(wide=wide, per_iter_timing=per_iter_timing, report_timestamps=report_timestamps)


def test_the_fastest_is_ours_and_the_first_of_equals():
    def of(**seconds):
        return fastest([row(name, [s]) for name, s in seconds.items()])

    assert of(ring=1.0, binomial=0.9, mpi=0.1, auto=0.1) == "binomial"
    assert of(ring=1.0, binomial=0.98) == "ring"
    assert of(mpi=1.0) == ""


def test_a_row_in_numbers():
    measured = row(seconds=[1e-6, 3e-6, 2e-6], nbytes=4000)
    assert [measured[name] for name in ("median_us", "algbw_gbps", "busbw_gbps")] == pytest.approx([2, 2, 2])
    assert measured["cv_percent"] == pytest.approx(100 * math.sqrt(2 / 3) / 2)
    assert [measured[name] for name in ("min_us", "p99_us", "max_us")] == pytest.approx([1, 3, 3])
    assert (measured["samples_us"], measured["model_us"], measured["bound_percent"]) == ([1, 3, 2], 1, 50)
    (line,) = lines([measured], flags_of())
    assert line.split() == ["4000", "1000", "float32", "sum", "-1", "2.0", "2.00", "2.00", "0", "ring<"]
    (line,) = lines([measured], flags_of(per_iter_timing=True))
    assert line.split()[9:] == ["1.0", "3.0", "3.0", "41", "ring<"]
    (line,) = lines([measured | {"ended": "2026-01-01 00:00:00"}], flags_of(wide=True, report_timestamps=True))
    assert line.split()[9:] == ["1.0", "3.0", "3.0", "41", "1.0", "50", "ring<", "2026-01-01", "00:00:00"]


def test_the_99th_percentile_is_one_of_the_runs_and_the_first_may_be_skipped():
    """Source: NVIDIA/nccl-tests, src/util.cu: of n sorted runs, number ceil(0.99 n)."""
    seconds = [*range(200, 0, -1)]
    measured = row(seconds=[second * 1e-6 for second in seconds])
    assert measured["p99_us"] == sorted(seconds)[math.ceil(0.99 * 200) - 1] == 198
    skipped = row(seconds=[second * 1e-6 for second in seconds], skip=50)
    assert [skipped[name] for name in ("min_us", "p99_us", "max_us", "median_us")] == [1, 149, 150, 100.5]
    assert len(skipped["samples_us"]) == 200


def test_results_in_and_out_of_place_stand_side_by_side():
    rows = [
        row("auto", seconds=[2e-6], nbytes=4000),
        row("mpi", seconds=[4e-6], nbytes=4000),
        row("auto", seconds=[1e-6], nbytes=4000, in_place=True, algorithm="tree"),
    ]
    auto, mpi = (line.split() for line in lines(rows, flags_of()))
    assert auto == [
        "4000",
        "1000",
        "float32",
        "sum",
        "-1",
        "2.0",
        "2.00",
        "2.00",
        "0",
        "1.0",
        "4.00",
        "4.00",
        "0",
        "auto*/tree*",
    ]
    assert mpi[5:] == ["4.0", "1.00", "1.00", "0", "-", "-", "-", "-", "mpi"]
    *_, modes, titles, _ = heading(rows, "", flags_of())
    assert modes.split() == ["#", "out-of-place", "in-place"]
    results = ["time", "algbw", "busbw", "#wrong"]
    assert titles.split()[1:] == ["size", "count", "type", "redop", "root", *results, *results, "algorithm"]


def test_columns_stand_beneath_their_titles():
    longest = [
        row("hierarchical_direct", seconds=[99.9], nbytes=256 << 20, in_place=in_place, ended="2026-01-01 00:00:00")
        for in_place in (False, True)
    ]
    for is_wide in (False, True):
        flags = flags_of(wide=is_wide, report_timestamps=is_wide)
        *_, titles, units = heading(longest, "medians of 1000 groups of 100 calls, slowest rank", flags)
        (line,) = lines(longest, flags)
        for title, unit, cell in (
            ("time ", "(us)", "99900000"),
            ("busbw", "(GB/s)", "0.00"),
            ("#wrong", "(elem)", "0"),
        ):
            for end in (match.end() for match in re.finditer(title, titles)):
                assert (units[:end].split()[-1], line[:end].split()[-1]) == (unit, cell)
        assert ("p99" in titles, "model" in titles, "timestamp" in titles) == (is_wide, is_wide, is_wide)
        assert "algorithm" in titles
    above = heading(longest, "medians of 20 calls, slowest rank", flags_of())
    assert max(map(len, [*above, *lines(longest, flags_of())])) <= 125  # of nccl-tests 115, without the name
    assert above[1] == "# all_reduce, symmetric memory"


def test_messages_and_overlap_have_columns_of_their_own():
    messages = row(of="message_rate", seconds=[2e-6], nbytes=4000)
    (line,) = lines([messages], flags_of())
    assert line.split() == ["4000", "1000", "float32", "2.0", "2.00", "2.00", "500000", "0", "ring<"]
    overlapped = row(of="iall_reduce", seconds=[2e-6], nbytes=4000) | overlap.numbers(2e-6, 3e-6, 4e-6)
    (line,) = lines([overlapped], flags_of())
    assert line.split()[5:] == ["4.0", "3.0", "2.0", "50", "2.00", "2.00", "0", "ring<"]
    for rows in ([messages], [overlapped]):
        *_, titles, _ = heading(rows, "", flags_of())
        (line,) = lines(rows, flags_of())
        assert len(titles.split()) - 1 == len(line.split())
        assert ("redop" in titles) == (rows == [overlapped])


def test_the_average_is_of_our_algorithms_and_wrong_elements_fail():
    rows = [row(seconds=[1e-9]), row("mpi", [1e-10]), row(seconds=[1e-9 / 3], wrong=2)]
    assert average_gbps(rows) == pytest.approx(16, rel=1e-3)
    assert average_gbps(rows[1:2]) == pytest.approx(80, rel=1e-3)
    assert "2 FAILED" in footer(rows)
    assert "not checked" in footer([row(wrong=None)])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["-b", "3Q"],
            "argument -b/--begin/--minbytes: '3Q' is not a size: write one like 8, 64K, 1M or 1G, at most 1048576G",
        ),
        (["-b", "2K", "-e", "1K"], "--begin 2048 is above --end 1024: exchange them"),
        (["-n", "0"], "argument -n/--iters: '0' must be a whole number from 1 to 1000000; see --help"),
        (["-f", "1"], "argument -f/--factor/--stepfactor: '1' must be a whole number from 2 to 1073741824"),
        (["barrier", "--algorithms", "ring"], "--algorithms ring: there are dissemination, direct, auto, mpi, all"),
        (
            ["all_gather", "-A", "neighbor"],
            "algorithm 'neighbor' needs an even number of ranks, or one: on 3 ",
        ),
        (["allsum"], "argument NAME: 'allsum' is not a benchmark: use all, overlap, all_reduce, "),
        (["latency", "-A", "ring"], "--algorithms ring: there are auto, mpi, all"),
        (["all_to_all_v", "-A", "bruck"], "algorithm 'bruck' needs equal chunks: on 3 ranks with uneven chunks, use "),
        (["iscan", "-z", "0"], "--blocking 0 is not for iscan, timed run by run: leave it out, or pass 3"),
        (["latency", "--tune", "t.json"], "--tune is for collectives: leave latency out"),
        (["iall_reduce", "-A", "ring", "--space-time", "x.png"], "--space-time is for collectives: leave iall_reduce"),
        (["-r", "3"], "--root 3: there are ranks 0 to 2"),
        (["-o", "avg", "-d", "bool"], "op 'avg' of bool: use 'max' for any"),
        (["-o", "mean"], "op 'mean' is unknown: use one of sum, "),
        (["-d", "float8"], "argument -d/--dtype/--datatype: 'float8' is not a dtype: use "),
        (["--peers", "mpi,rccl"], "argument --peers: 'rccl' is not a peer: use mpi, gloo, nccl"),
        (["--space-time", "x.png"], "--space-time draws one algorithm of one collective: name it by -A"),
        (["--device", "tpu"], "device 'tpu' is unknown"),
        (["--min-bw", "nan"], "argument --min-bw: 'nan' must be a number from 0 to 1000000000 GB/s"),
        (
            ["-a", "ring"],
            "argument -a/--average: 'ring': write 0 for rank 0, 1 for mean of ranks, 2 for fastest rank, 3 ",
        ),
        (["-z", "4"], "argument -z/--blocking: '4': write 0 for in a row, 1 for in a row with a barrier after each, "),
        (["-I", "2"], "argument -I/--per_iter_timing: '2': write 0 for no, 1 for yes; see --help"),
        (["-S", "x"], "argument -S/--report_timestamps: 'x': write 0 for no, 1 for yes; see --help"),
        (["-M", ""], "argument -M/--memory_report: '': write 0 for no, 1 for yes; see --help"),
        (["-K", "2"], "--per_iter_skip 2 has no effect without --per_iter_timing 1: add it"),
        (["-I", "1", "-K", "20"], "--per_iter_skip 20 leaves none of --iters 20: pass less"),
        (["-I", "1", "-z", "0", "--device", "cuda"], "--per_iter_timing 1 cannot tell calls on a device apart in "),
        (
            ["-R", "1"],
            "argument -R/--local_register: '1': write 0 for ordinary, 2 for symmetric; MPI registers memory ",
        ),
        (["-N", "-1"], "argument -N/--run_cycles: '-1' must be a whole number from 0 to 1000000"),
        (["-W", "0"], "argument -W/--window_size: '0' must be a whole number from 1 to 1000"),
        (["-u", "-1"], "argument -u/--unalign: '-1' must be a whole number from 0 to 1000000"),
        (["-r", "-2"], "argument -r/--root: '-2' must be a whole number from 0 to 1000000"),
        (["-x", "1"], "argument -x/--cta_policy: '1' is not available here: it is a setting of NCCL's kernels, so "),
        (["-D", "1"], "argument -D/--device_implementation: '1' is not available here: algorithms are named by -A"),
        (["-V", "8"], "argument -V/--device_cta_count: '8' is not available here: kernels choose their numbers of "),
        (["-m", "0"], "argument -m/--agg_iters: '0' must be a whole number from 1 to 1000"),
        (["-g", "8"], "argument -g/--ngpus: '8' is not available here: a rank has one GPU, so start a rank for each"),
        (
            ["-t", "2"],
            "argument -t/--nthreads: '2' is not available here: a rank is one thread, so start more ranks by",
        ),
        (["-p", "1"], "argument -p/--parallel_init: '1' is not available here: ranks are processes, which start at"),
        (["-G", "5"], "argument -G/--cudagraph: '5' is not available here: calls are not captured in CUDA graphs, so"),
        (["-y", "1"], "argument -y/--stream_null: '1' is not available here: calls follow CuPy's current stream, so"),
        (["-C", "1"], "argument -C/--report_cputime: '1' is not available here: times are of the wall clock, so leave"),
        (["-T", "60"], "argument -T/--timeout: '60' is not available here: set COLLECTIVES_TIMEOUT_S to the seconds"),
        (["-n", "9" * 9], "argument -n/--iters: '999999999' must be a whole number from 1 to 1000000"),
        (["-e", "9" * 20 + "G"], f"argument -e/--end/--maxbytes: '{'9' * 20}G' is not a size"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, list) else "",
)
def test_flags_that_make_no_sense(monkeypatch, words, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        parsed(monkeypatch, *words, size=3)


@pytest.mark.parametrize("flag", ["--tune", "--json", "--html"])
def test_a_file_that_cannot_be_written_is_refused_before_anything_is_measured(monkeypatch, tmp_path, flag):
    for path, why in ((tmp_path / "none" / "file", "No such file or directory"), (tmp_path, "not a regular file")):
        message = f"{flag} {path} can't be written ({why}): pass a path in an existing, writable folder"
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            bench.refuse_unwritable(parsed(monkeypatch, flag, str(path)))


def parsed(monkeypatch, *words, size=4):
    monkeypatch.setattr("sys.argv", ["bench", *words])
    return bench.parse(size)


def test_default_flags(monkeypatch):
    flags = parsed(monkeypatch)
    assert (flags.sizes[0], flags.sizes[-1], flags.factor, flags.tune) == (8, 32 << 20, 4, None)
    assert (flags.names, flags.workloads) == ({"all_reduce": ["auto", "mpi"]}, [Workload("all_reduce")])
    tuning = parsed(monkeypatch, "--tune", "t.json")
    assert tuning.algorithms == ["all"]
    assert {workload.memory for workload in tuning.workloads} == {"symmetric", "ordinary"}
    assert {workload.collective for workload in tuning.workloads} == {*EVERY, "barrier"}


def test_names_are_timed_where_there_are_such_and_peers_last(monkeypatch):
    flags = parsed(monkeypatch, "all_gather", "broadcast", "-A", "mpi", "bruck", "ring", "--peers", "gloo")
    assert flags.names == {"all_gather": ["ring", "bruck", "mpi", "gloo"], "broadcast": ["mpi", "gloo"]}
    assert "mpi" in parsed(monkeypatch, "-A", "all").names["all_reduce"]
    assert "mpi" not in parsed(monkeypatch, "-A", "all", "--tune", "t.json").names["all_reduce"]


def test_one_algorithm_of_one_size_is_drawn(monkeypatch):
    flags = parsed(monkeypatch, "all_gather", "-A", "ring", "-b", "1M", "--space-time", "x.png")
    assert (flags.sizes, flags.names) == ((1 << 20,), {"all_gather": ["ring"]})


@pytest.mark.parametrize(
    ("spelling", "dtype"), [("half", "float16"), ("float", "float32"), ("double", "float64"), ("uint8", "uint8")]
)
def test_flags_are_spelled_as_in_nccl_tests(monkeypatch, spelling, dtype):
    """Source: NVIDIA/nccl-tests, src/common.cu, test_typenames."""
    flags = parsed(monkeypatch, "allreduce", "alltoall", "-b", "8", "-e", "32", "-f", "2", "-d", spelling, "-o", "max")
    assert list(flags.sizes) == [8, 16, 32]
    assert [(each.collective, str(each.dtype), each.op) for each in flags.workloads] == [
        ("all_reduce", dtype, "max"),
        ("all_to_all", dtype, "sum"),
    ]


# Source: NVIDIA/nccl-tests of 2026-07-09, src/common.cu, `longopts`; with a value that is taken here.
FLAGS = {
    "-t --nthreads": "1", "-g --ngpus": "1", "-b --minbytes": "8", "-e --maxbytes": "40m", "-i --stepbytes": "16",
    "-f --stepfactor": "2", "-n --iters": "9", "-m --agg_iters": "4", "-w --warmup_iters": "1", "-N --run_cycles": "0",
    "-p --parallel_init": "0", "-c --check": "0", "-o --op": "max", "-d --datatype": "half", "-r --root": "-1",
    "-z --blocking": "2", "-y --stream_null": "0", "-T --timeout": "0", "-G --cudagraph": "0",
    "-C --report_cputime": "0", "-S --report_timestamps": "1", "-J --output_file": "x.json", "-a --average": "1",
    "-R --local_register": "2", "-x --cta_policy": "0", "-D --device_implementation": "0",
    "-V --device_cta_count": "16", "-M --memory": "1", "-u --unalign": "1", "-I --per_iter_timing": "1",
    "-K --per_iter_skip": "3",
}  # fmt: skip


@pytest.mark.parametrize("form", [0, 1])
def test_the_command_lines_of_nccl_tests_are_taken(monkeypatch, form):
    short = {"-M --memory": "-M"}  # our --memory is the kind of arrays
    words = [word for names, value in FLAGS.items() for word in (short.get(names, names.split()[form]), value)]
    flags = parsed(monkeypatch, *words)
    assert (flags.sizes[0], flags.sizes[-1], flags.sizes[1]) == (8, (40 << 20) - 8, 24)
    assert (flags.iters, flags.agg_iters, flags.warmup_iters, flags.check) == (9, 4, 1, 0)
    assert (flags.blocking, flags.average, flags.run_cycles, flags.unalign) == (2, "mean of ranks", 0, 1)
    assert (flags.report_timestamps, flags.memory_report, flags.per_iter_timing, flags.per_iter_skip) == (1, 1, 1, 3)
    assert (str(flags.json), flags.memory, flags.op, flags.root) == ("x.json", "symmetric", "max", -1)
    assert timing.timed_as(flags) == "means of 9 groups of 4 calls in a row, waiting for each, mean of ranks"
    assert timing.timed_as(parsed(monkeypatch)) == "medians of 20 calls, slowest rank"
    assert parsed(monkeypatch, "-R", "0").memory == "ordinary"


def test_every_flag_of_nccl_tests_is_in_the_guide():
    rows = table(DOCS / "guide" / "tools.md", "Flags of nccl-tests")
    assert {" ".join(re.findall("`(.*?)`", names)): kind for names, kind, _ in rows} == {
        names: f"`{value}` only" if names.split()[0] in {each.short for each in bench.FOREIGN} else "ours"
        for names, value in FLAGS.items()
    }


def test_roots_ops_and_dtypes_may_be_all(monkeypatch):
    flags = parsed(monkeypatch, "broadcast", "all_reduce", "barrier", "-r", "-1", size=3)
    assert [(each.collective, each.root) for each in flags.workloads] == [
        ("broadcast", 0), ("broadcast", 1), ("broadcast", 2), ("all_reduce", 0), ("barrier", 0),
    ]  # fmt: skip
    assert parsed(monkeypatch, "reduce", "-r", "all").workloads == parsed(monkeypatch, "reduce", "-r", "-1").workloads
    able = {(str(each.dtype), each.op) for each in parsed(monkeypatch, "-o", "all", "-d", "all").workloads}
    assert able == {(dtype, op) for dtype in DTYPES for op in ops_of(dtype)}
    assert {each.op for each in parsed(monkeypatch, "scan", "-o", "all").workloads} == {"sum", "prod", "min", "max"}
    assert {str(each.dtype) for each in parsed(monkeypatch, "ibroadcast", "-d", "all").workloads} == {*DTYPES}
    assert "bool" not in {str(each.dtype) for each in parsed(monkeypatch, "-d", "all").workloads}


def test_names_of_benchmarks(monkeypatch):
    flags = parsed(
        monkeypatch, "alltoallv", "latency", "message_rate", "iallreduce", "-A", "all", "--peers", "gloo", size=3
    )
    assert flags.names["all_to_all_v"] == ["pairwise", "direct", "staged", "mpi", "gloo"]
    assert flags.names["latency"] == flags.names["message_rate"] == ["auto", "mpi", "gloo"]
    assert flags.names["iall_reduce"] == parsed(monkeypatch, "-A", "all", "--peers", "gloo", size=3).names["all_reduce"]
    assert {*parsed(monkeypatch, "overlap").collectives} == {f"i{name}" for name in (*EVERY, "barrier")}
    assert {*parsed(monkeypatch, "all").collectives} == {*EVERY, "barrier"}
    for name in ("latency", "bandwidth", "bidirectional", "message_rate"):
        with pytest.raises(ValueError, match=f"^{name} needs two ranks: start it by mpirun -n 2$"):
            parsed(monkeypatch, name, size=1)


def test_cycles_go_through_all_sizes(monkeypatch):
    flags = parsed(monkeypatch, "all_reduce", "reduce", "-e", "32", "-N", "2")
    assert [(workload.collective, count, cycle) for workload, count, cycle in run.planned(4, flags)] == [
        (name, count, cycle) for name in ("all_reduce", "reduce") for cycle in (0, 1) for count in (2, 8)
    ]
    endless = run.planned(4, parsed(monkeypatch, "-e", "32", "-N", "0"))
    assert [(count, cycle) for _, count, cycle in islice(endless, 5, 8)] == [(8, 2), (2, 3), (8, 3)]


class Clock:
    """Seconds that pass only in the actions of a test, and a communicator whose barriers take 100 of them."""

    def __init__(self, monkeypatch, rank=0, size=2):
        self.now, self.rank, self.size, self.log = 0.0, rank, size, []
        for module in (constants, overlap, timing):
            monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: self.now))

    def taking(self, seconds, result=None):
        def act(*arguments):
            self.now += seconds
            return result

        return act

    def plan(self, name):
        barrier = self.taking(100)
        barrier.free = lambda: None
        return barrier

    def all_reduce(self, x, op="sum"):
        return x

    def empty(self, count, dtype, device):
        return np.zeros(count, dtype)

    agreed = staticmethod(nullcontext)

    def send(self, x, dest, blocking=True):
        self.log.append(("send", dest, len(x), blocking))
        return self.taking(3 if blocking else 1)() or SimpleNamespace(wait=self.taking(2))

    def recv(self, x, source, blocking=True):
        self.log.append(("recv", source, len(x), blocking))
        return self.taking(5 if blocking else 1)() or SimpleNamespace(wait=self.taking(2))


HOST = SimpleNamespace(device=SimpleNamespace(is_async=False))


@pytest.mark.parametrize("agg_iters", [1, 4])
@pytest.mark.parametrize("blocking", [0, 1, 2, 3])
@pytest.mark.parametrize("per_iter", [0, 1])
def test_the_time_is_of_one_call(monkeypatch, blocking, agg_iters, per_iter):
    """A call takes a second; only in nccl-tests' mode 1 does the time include a run's barrier."""
    clock, calls = Clock(monkeypatch), []
    words = f"-n 5 -w 2 -z {blocking} -m {agg_iters} -I {per_iter}"
    contestants = [
        Contestant(name, name, HOST, lambda: calls.append(clock.taking(1)()), None) for name in ("mpi", "gloo")
    ]
    calls_s, samples = timing.samples_s(clock, contestants, parsed(monkeypatch, *words.split()))
    call_s = 1 + (100 / agg_iters if blocking == 1 else 0)
    assert samples.shape == ((5, 2) if per_iter or blocking == 3 else (1, 2))
    assert [*calls_s, *samples.flat] == pytest.approx([call_s] * (2 + samples.size))
    assert len(calls) == 2 * (5 + 2) * agg_iters


@pytest.mark.parametrize("name", ["latency", "bandwidth", "message_rate"])
def test_the_second_of_a_pair_replies(monkeypatch, name):
    clock = Clock(monkeypatch, rank=3, size=6)
    contestant(clock, trial_of(clock, Workload(name), 1000), "auto", WINDOW).call()
    one_back = [("recv", 0, 1000, True), ("send", 0, 1000, True)]
    assert clock.log == (
        one_back if name == "latency" else [("recv", 0, 1000, False)] * WINDOW + [("send", 0, 1, True)]
    )
    idle = contestant(clock, trial_of(Clock(monkeypatch, rank=6, size=7), Workload(name), 1000), "auto", WINDOW)
    clock.log.clear()
    idle.call()
    assert clock.log == []


def test_each_run_in_a_row_is_timed(monkeypatch):
    clock = Clock(monkeypatch)
    lengths = iter(range(1, 6))
    one = Contestant("mpi", "mpi", HOST, lambda: clock.taking(next(lengths))(), None)
    calls_s, samples = timing.samples_s(
        clock, [one], parsed(monkeypatch, *["-n", "5", "-w", "0", "-z", "0", "-I", "1"])
    )
    assert (calls_s.tolist(), samples.tolist()) == ([3], [[1], [2], [3], [4], [5]])


WINDOW = 4
MESSAGE_S = {  # of rank 0: blocking, send takes 3 s, recv 5 s; else each starts in 1 s and is awaited in 2 s
    "sendrecv": (2 * 1 + 2 * 2, 1),
    "latency": ((3 + 5) / 2, 1),
    "bandwidth": ((4 * 1 + 4 * 2 + 5) / 4, 1),
    "bidirectional": ((8 * 1 + 8 * 2) / 4, 2),
    "message_rate": ((4 * 1 + 4 * 2 + 5) / 4, 3),
}


@pytest.mark.parametrize("name", MESSAGE_S)
def test_messages_in_numbers(monkeypatch, name):
    clock = Clock(monkeypatch, size=6)
    one = contestant(clock, trial_of(clock, Workload(name), 1000), "auto", WINDOW)
    clock.log.clear()
    one.call()
    peer = 1 if name == "sendrecv" else 3
    source = 5 if name == "sendrecv" else 3
    sends, recvs = [("send", peer, 1000, False)], [("recv", source, 1000, False)]
    assert clock.log == {
        "sendrecv": recvs + sends,
        "latency": [("send", 3, 1000, True), ("recv", 3, 1000, True)],
        "bidirectional": recvs * WINDOW + sends * WINDOW,
    }.get(name, sends * WINDOW + [("recv", 3, 1, True)])
    calls_s, samples = timing.samples_s(clock, [one], parsed(monkeypatch, "-n", "3", "-w", "0"))
    measured = row_of(one, calls_s[0], samples[:, 0], None, None, 0)
    message_s, links = MESSAGE_S[name]
    assert measured["median_us"] == pytest.approx(message_s * 1e6)
    assert measured["messages_per_s"] == pytest.approx(links / message_s, abs=1e-6)
    assert measured["algbw_gbps"] == pytest.approx(4000 / message_s * 1e-9, abs=1e-6)
    assert measured["busbw_gbps"] == pytest.approx(links * 4000 / message_s * 1e-9, abs=1e-6)


@pytest.mark.parametrize(("rest_s", "percent"), [(0, 100), (4, 60), (10, 0), (13, 0)])
def test_overlap_in_numbers(monkeypatch, rest_s, percent):
    """A call takes 10 s; after as long a computation, its wait takes the rest."""
    clock = Clock(monkeypatch)
    arrays = {"ones": np.ones, "zeros": np.zeros}
    monkeypatch.setattr(overlap, "np", SimpleNamespace(matmul=lambda *_, out: clock.taking(0.5)(), **arrays))
    started = []

    def start():
        started.append(clock.now)
        return lambda: clock.taking(10 if clock.now == started[-1] else rest_s)()

    one = Contestant("auto", "ring", HOST, overlap.waited(start), None, start)
    flags = parsed(monkeypatch, "-n", "3", "-w", "1")
    calls_s, _ = timing.samples_s(clock, [one], flags)
    (measured,) = timing.overlaps(clock, [one], calls_s, flags)
    assert measured == {"compute_us": 10e6, "overall_us": (10 + rest_s) * 1e6, "overlap_percent": percent}


def test_sizes_beyond_memory_are_refused_with_what_would_fit(monkeypatch):
    comm = SimpleNamespace(topology=SimpleNamespace(nodes=(tuple(range(4)),)), agreed=nullcontext)
    monkeypatch.setattr(system, "available_memory_bytes", lambda: 40 << 30)
    flags = parsed(monkeypatch, "all_reduce", "-e", "8G", "-A", "ring", "mpi")
    with pytest.raises(ValueError, match=r"^--end 8G: 10 vectors .* 4 ranks don't fit .*: use --end 1048576K at most$"):
        run.refuse_too_large(comm, flags)
    flags.end = 1 << 30  # as the error message suggests
    run.refuse_too_large(comm, flags)


def test_examples_of_the_command_line():
    """pytest does not collect the doctests of a __main__ module."""
    assert doctest.testmod(bench) == (0, 4)
