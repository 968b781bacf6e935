"""The benchmark's numbers, flags and rows."""

import doctest
import math
import re
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest

from collectives.arrays.views import dtype_of
from collectives.bench import __main__ as bench
from collectives.bench import run
from collectives.bench import trial as numbers
from collectives.bench.constants import bound_s
from collectives.bench.report import average_gbps, bus_factor, fastest, footer, heading, lines
from collectives.bench.run import Contestant, row_of
from collectives.bench.trial import Trial, Workload, element_counts, places
from collectives.job import system
from collectives.schedule.cost import Link, Network
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

EVERY = (*COLLECTIVES, *SCANS)
PLACES = [(collective, in_place) for collective in EVERY for in_place in places(collective)]


@pytest.mark.parametrize("dtype", DTYPES)
def test_numbers_are_exact_in_any_order(dtype):
    for op in ops_of(dtype):
        for size in (1, 2, 3, 8, 64):
            operands = [numbers.operand(30, dtype_of(dtype), rank, size, op) for rank in range(size)]
            same(numbers.reduction(30, dtype_of(dtype), size, op), of_parts(operands, op), (op, size))
            partial = np.prod if op == "prod" else np.sum
            largest = partial([np.abs(widened(x).real) for x in operands], axis=0).max()
            assert largest <= 64 or op in ("min", "max", *BITS, *TRUTHS)
            assert numbers.NEVER not in numbers.reduction(30, dtype_of(dtype), size, op)
            assert size == 1 or len({x.tobytes() for x in operands}) > 1
            whole = dtype in INTEGERS and op == "avg" and size > numbers.GIVERS  # all elements round to 0
            assert dtype == "bool" or whole or len(np.unique(numbers.reduction(30, dtype_of(dtype), size, op))) > 1


def of_parts(arrays: list[np.ndarray], op: str) -> np.ndarray:
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
    return [Trial(comm, workload, count, in_place) for comm in comms]


@pytest.mark.parametrize(("collective", "in_place"), PLACES)
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


def test_bus_bandwidth_is_that_of_nccl_tests():
    share = {"all_reduce": 14 / 8, "broadcast": 1, "reduce": 1}
    assert {name: bus_factor(name, 8) for name in EVERY} == dict.fromkeys(EVERY, 7 / 8) | share


def test_a_bound_is_of_memory_in_a_node_and_of_the_wire_between_nodes():
    network = Network(between=Link(1e-5, 8e-9), copy_s_per_byte=1e-10, cores=2)
    one, four = (tuple(range(4)),), ((0, 1), (2, 3), (4, 5), (6, 7))
    assert bound_s("all_reduce", 1000, one, network) == pytest.approx(1000 * 1e-10 * 2)
    assert bound_s("all_reduce", 1000, four, network) == pytest.approx(1.5 * 1000 * 8e-9)
    assert bound_s("all_gather", 1000, ((0,), (1, 2, 3)), network) == pytest.approx(0.75 * 1000 * 8e-9)
    assert bound_s("all_reduce", 1000, ((0,),), network) is None
    assert bound_s("barrier", 0, one, network) is None


def row(name="ring", seconds=(1.0,), wrong=0, nbytes=8) -> dict:
    comm = SimpleNamespace(rank=0, size=2, empty=lambda count, dtype, device: np.empty(count, dtype))
    contestant = Contestant(name, name, Trial(comm, Workload("all_reduce"), nbytes // 4, in_place=False), None, None)
    return row_of(contestant, np.array(seconds), model_s=1e-6, bound_s=1e-6, wrong=wrong)


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
    assert measured["p99_us"] == pytest.approx(2.98)
    assert (measured["samples_us"], measured["model_us"], measured["bound_percent"]) == ([1, 3, 2], 1, 50)
    (line,) = lines([measured], is_wide=False)
    assert line.split() == ["4000", "1000", "sum", "-1", "2.0", "2.00", "2.00", "0", "ring<"]
    (line,) = lines([measured], is_wide=True)
    assert line.split()[:3] == ["4000", "1000", "float32"]
    assert line.split()[9:] == ["ring<", "1.0", "3.0", "41", "1.0", "50"]


def test_columns_stand_beneath_their_titles_in_80_columns():
    longest = row("hierarchical_direct", seconds=[99.9], nbytes=256 << 20)
    for is_wide in (False, True):
        *_, titles, units = heading(longest, "medians of 1000 groups of 100 calls, slowest rank", is_wide)
        (line,) = lines([longest], is_wide)
        for title, unit, cell in (("time", "(us)", "99900000"), ("busbw", "(GB/s)", "0.00"), ("#wrong", "(elem)", "0")):
            end = titles.index(title) + len(title)
            assert (units[:end].split()[-1], line[:end].split()[-1]) == (unit, cell)
        assert ("p99" in titles, "type" in titles) == (is_wide, is_wide)
        assert "algorithm" in titles
    above = heading(longest, "medians of 20 calls, slowest rank", is_wide=False)
    assert max(map(len, [*above, *lines([longest], is_wide=False)])) <= 80
    assert above[1] == "# all_reduce of float32, out of place, symmetric memory"


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
        (["allsum"], "argument COLLECTIVE: 'allsum' is not a collective: use all, all_reduce, "),
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
        (["-z", "2"], "argument -z/--blocking: '2': write 1 to time each run by itself, or 0 to time all in a row"),
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
        (["-F", "x.csv"], "argument -F/--output_file: 'x.csv' is not available here: use --json FILE or --html FILE"),
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


def test_the_command_lines_of_nccl_tests_are_taken(monkeypatch):
    """Source: NVIDIA/nccl-tests, README.md, "Arguments"."""
    long = (
        "--minbytes 8 --maxbytes 40 --stepbytes 16 --datatype half --iters 9 --agg_iters 4 --warmup_iters 1 --check 0"
    )
    short = "-g 1 -t 1 -p 0 -G 0 -y 0 -T 0 -C 0 -z 0 -a 1"
    flags = parsed(monkeypatch, *long.split(), *short.split())
    assert list(flags.sizes) == [8, 24, 40]
    assert (flags.iters, flags.agg_iters, flags.warmup_iters, flags.check) == (9, 4, 1, 0)
    assert (flags.blocking, flags.average) == (False, "mean of ranks")
    assert run.timed_as(flags) == "means of 9 groups of 4 calls in a row, mean of ranks"
    flags = parsed(monkeypatch)
    assert run.timed_as(flags) == "medians of 20 calls, slowest rank"


@pytest.mark.parametrize(("blocking", "shape"), [("1", (5, 2)), ("0", (1, 2))])
@pytest.mark.parametrize("agg_iters", ["1", "4"])
def test_the_time_is_of_one_call(monkeypatch, blocking, shape, agg_iters):
    """Each call advances the test's clock by a second."""
    calls = []

    def samples(comm, actions, repeats, warmups, rank_time=""):
        times = np.empty((warmups + repeats, len(actions)))
        for i, j in np.ndindex(times.shape):
            begin = len(calls)
            actions[j]()
            times[i, j] = len(calls) - begin
        return times[warmups:]

    monkeypatch.setattr(run.constants, "samples", samples)
    flags = parsed(monkeypatch, "-n", "5", "-w", "2", "-z", blocking, "-m", agg_iters)
    host = SimpleNamespace(device=SimpleNamespace(is_async=False))
    contestants = [Contestant(name, name, host, lambda: calls.append(1), None) for name in ("mpi", "gloo")]
    times = run.samples_s(None, contestants, flags)
    assert times.shape == shape
    assert (times == 1).all()
    assert len(calls) == 2 * (5 + 2) * int(agg_iters)


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
    assert doctest.testmod(bench) == (0, 3)
