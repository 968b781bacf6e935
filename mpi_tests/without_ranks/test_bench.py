"""The benchmark's numbers, flags and rows."""

import math
import re
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest

from collectives.arrays import dtype_of
from collectives.bench import exact, flags, room, run, timing
from collectives.bench.bound import bound_s
from collectives.bench.measure import Contestant, Result, action, bus_factor, fastest
from collectives.bench.report import average_gbps, footer
from collectives.bench.trial import Setting, Trial, element_counts, places
from collectives.cost import Link, Network
from mpi_tests.helpers.reference import (
    BITS,
    COLLECTIVES,
    DTYPES,
    INTEGERS,
    ROOTED,
    expected,
    ops_of,
    reduced,
    same,
    widened,
)

PLACES = [(collective, in_place) for collective in COLLECTIVES for in_place in places(collective)]


@pytest.mark.parametrize("dtype", DTYPES)
def test_numbers_are_exact_in_any_order(dtype):
    for op in ops_of(dtype):
        for size in (1, 2, 3, 8, 64):
            given = [exact.vector(30, dtype_of(dtype), rank, size, op) for rank in range(size)]
            same(exact.reduced(30, dtype_of(dtype), size, op), of_parts(given, op), (op, size))
            partial = np.prod if op == "prod" else np.sum
            largest = partial([np.abs(widened(x).real) for x in given], axis=0).max()
            assert largest <= 64 or op in ("min", "max", *BITS)
            assert exact.NEVER not in exact.reduced(30, dtype_of(dtype), size, op)
            assert size == 1 or len({x.tobytes() for x in given}) > 1
            whole = dtype in INTEGERS and op == "avg" and size > exact.GIVERS  # all of it rounds to 0
            assert dtype == "bool" or whole or len(np.unique(exact.reduced(30, dtype_of(dtype), size, op))) > 1


def of_parts(given: list[np.ndarray], op: str) -> np.ndarray:
    """As a reduction should be; NumPy divides complex numbers with a rounding more than it takes."""
    if given[0].dtype.kind != "c" or op == "prod":
        return reduced(given, op)
    return (reduced([x.real for x in given], op) + 1j * reduced([x.imag for x in given], op)).astype(given[0].dtype)


def trials(setting: Setting, size: int, in_place: bool) -> list[Trial]:
    count = element_counts(setting.collective, size, sizes=[100], dtype=setting.dtype)[0]
    comms = [
        SimpleNamespace(rank=rank, size=size, empty=lambda count, dtype, device: np.empty(count, dtype))
        for rank in range(size)
    ]
    return [Trial(comm, setting.collective, count, setting.memory, in_place, setting) for comm in comms]


@pytest.mark.parametrize(("collective", "in_place"), PLACES)
@pytest.mark.parametrize("memory", ["symmetric", "ordinary"])
def test_what_a_trial_wants_is_what_the_collective_does(collective, in_place, memory):
    for size, root, (dtype, op) in (
        (1, 0, ("float32", "sum")),
        (3, 2, ("bfloat16", "avg")),
        (8, 5, ("int8", "prod")),
    ):
        ranks = trials(Setting(collective, memory, "cpu", dtype_of(dtype), op, root), size, in_place)
        given = [ranks[root].given() if trial.x is None else trial.given() for trial in ranks]
        for trial in ranks:
            trial.fill()
            assert trial.x is None or np.array_equal(trial.x, trial.given())
            assert ("root" in trial.arguments) == (collective in ROOTED)
            want = expected(collective, given, trial.rank, op, root)
            same(trial.wanted(), want)
            if want is None:
                assert trial.num_wrong() == 0
                continue
            unchanged = (collective == "reduce" and trial.rank != root) or (in_place and size == 1)
            assert (trial.num_wrong() > 0) != (unchanged or (collective == "broadcast" and trial.rank == root))
            trial.out[:] = want
            assert trial.num_wrong() == 0
            trial.out[3:5] += 1
            assert trial.num_wrong() == 2


def test_bus_bandwidth_is_that_of_nccl_tests():
    share = {"all_reduce": 14 / 8, "broadcast": 1, "reduce": 1}
    assert {name: bus_factor(name, 8) for name in COLLECTIVES} == dict.fromkeys(COLLECTIVES, 7 / 8) | share


def test_a_bound_is_of_memory_in_a_node_and_of_the_wire_between_nodes():
    network = Network(between=Link(1e-5, 8e-9), copy_s_per_byte=1e-10, cores=2)
    one, four = (tuple(range(4)),), ((0, 1), (2, 3), (4, 5), (6, 7))
    assert bound_s("all_reduce", 1000, one, network) == pytest.approx(1000 * 1e-10 * 2)
    assert bound_s("all_reduce", 1000, four, network) == pytest.approx(1.5 * 1000 * 8e-9)
    assert bound_s("all_gather", 1000, ((0,), (1, 2, 3)), network) == pytest.approx(0.75 * 1000 * 8e-9)
    assert bound_s("all_reduce", 1000, ((0,),), network) is None
    assert bound_s("barrier", 0, one, network) is None


def row(name="ring", seconds=(1.0,), wrong=0, nbytes=8) -> Result:
    setting = Setting("all_reduce")
    return Result(setting, 2, name, name, nbytes // 4, True, np.array(seconds), wrong=wrong)


def test_the_fastest_is_ours_and_the_first_of_equals():
    def of(**seconds):
        return fastest([row(name, [s]) for name, s in seconds.items()])

    assert of(ring=1.0, binomial=0.9, mpi=0.1, auto=0.1) == "binomial"
    assert of(ring=1.0, binomial=0.98) == "ring"
    assert of(mpi=1.0) == ""


def test_a_row_in_numbers():
    measured = row(seconds=[1e-6, 3e-6, 2e-6], nbytes=4000)
    assert (measured.median_s, measured.algbw_gbps, measured.busbw_gbps) == pytest.approx((2e-6, 2, 2))
    assert measured.cv_percent == pytest.approx(100 * math.sqrt(2 / 3) / 2)
    assert measured.p99_s == pytest.approx(2.98e-6)


def test_the_average_is_of_our_algorithms_and_wrong_elements_fail():
    rows = [row(seconds=[1e-9]), row("mpi", [1e-10]), row(seconds=[1e-9 / 3], wrong=2)]
    assert average_gbps(rows) == pytest.approx(16)
    assert average_gbps(rows[1:2]) == pytest.approx(80)
    assert "2 FAILED" in "".join(footer(rows))
    assert "not checked" in "".join(footer([row(wrong=None)]))


def test_a_handicap_keeps_a_rank_busy_for_longer(monkeypatch):
    clock = iter(range(1000))
    monkeypatch.setattr(timing.time, "perf_counter", lambda: next(clock))
    timing.stretched(lambda: [next(clock) for _ in range(99)], factor=3.0)()
    assert next(clock) == 301


def test_peers_have_no_handicap():
    def act():
        pass

    contestants = [Contestant(name, name, None, act, free=act) for name in ("mpi", "ring")]
    assert [action(one, handicap=1.2) is act for one in contestants] == [True, False]
    assert [action(one, handicap=1.0) is act for one in contestants] == [True, True]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["-b", "3Q"], "argument -b/--begin: '3Q' is no size: write one like 8, 64K, 1M or 1G, at most 1048576G"),
        (["-b", "2K", "-e", "1K"], "--begin 2048 is above --end 1024: exchange them"),
        (["-n", "0"], "argument -n/--iters/--repeats: '0' must be a whole number from 1 to 1000000; see --help"),
        (["-i", "0"], "argument -i/--step: '0' must be a whole number from 1 to"),
        (["-f", "1"], "argument -f/--factor: '1' must be a whole number from 2 to 1073741824"),
        (["barrier", "--algorithms", "ring"], "--algorithms ring: there are dissemination, direct, auto, mpi, all"),
        (
            ["all_gather", "-a", "neighbor"],
            "algorithm 'neighbor' needs an even number of ranks, or one: on 3 ",
        ),
        (["allsum"], "argument COLLECTIVE: 'allsum' is no collective: use all, all_reduce, "),
        (["-r", "3"], "--root 3: there are ranks 0 to 2"),
        (["-o", "avg", "-d", "bool"], "op 'avg' of bool: use 'max' for any"),
        (["-o", "mean", "-d", "all"], "op 'mean' is unknown: use one of sum, "),
        (["-d", "float8"], "argument -d/--dtype: 'float8' is no dtype: use "),
        (["--peers", "mpi,rccl"], "argument --peers: 'rccl' is no peer: use mpi, gloo, nccl"),
        (["--handicap", "0.9"], "argument --handicap: '0.9' must be a number from 1 to 1000"),
        (["--tune", "t.json", "-d", "all"], "--tune: a tuning file is of one dtype and op: name them"),
        (["--device", "tpu"], "device 'tpu' is unknown"),
        (["--min-bw", "nan"], "argument --min-bw: 'nan' must be a number from 0 to 1000000000 GB/s"),
        (["-e", "1G", "-i", "1"], "--step 1 makes 1073741817 sizes: use a longer one, for 10000 at most"),
        (["-n", "9" * 9], "argument -n/--iters/--repeats: '999999999' must be a whole number from 1 to 1000000"),
        (["-e", "9" * 20 + "G"], f"argument -e/--end: '{'9' * 20}G' is no size"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, list) else "",
)
def test_flags_that_make_no_sense(monkeypatch, words, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        parsed(monkeypatch, *words, size=3)


@pytest.mark.parametrize("flag", ["--tune", "--csv"])
def test_a_file_that_cannot_be_written_is_refused_before_anything_is_measured(monkeypatch, tmp_path, flag):
    path = tmp_path / "none" / "file"
    reason = f"{flag} {path} can't be written (No such file or directory): pass another path"
    with pytest.raises(ValueError, match=f"^{re.escape(reason)}$"):
        run.refuse_unwritable(parsed(monkeypatch, flag, str(path)))
    with pytest.raises(ValueError, match=r"can't be written \(Is a directory\): pass another path"):
        run.refuse_unwritable(parsed(monkeypatch, flag, str(tmp_path)))


def parsed(monkeypatch, *words, size=4):
    monkeypatch.setattr("sys.argv", ["bench", *words])
    return flags.parse(size)


def test_default_flags(monkeypatch):
    given = parsed(monkeypatch)
    assert (given.sizes[0], given.sizes[-1], given.factor, given.tune) == (8, 32 << 20, 4, None)
    assert (given.algorithms, given.settings) == (["auto", "mpi"], [Setting("all_reduce")])
    tuning = parsed(monkeypatch, "--tune", "t.json")
    assert tuning.algorithms == ["all"]
    assert {setting.memory for setting in tuning.settings} == {"symmetric", "ordinary"}
    assert {setting.collective for setting in tuning.settings} == {*COLLECTIVES, "barrier"}


@pytest.mark.parametrize(
    ("spelling", "dtype"), [("half", "float16"), ("float", "float32"), ("double", "float64"), ("uint8", "uint8")]
)
def test_dtypes_are_spelled_as_in_nccl_tests(monkeypatch, spelling, dtype):
    """Source: NVIDIA/nccl-tests, src/common.cu, test_typenames."""
    (setting,) = parsed(monkeypatch, "-d", spelling).settings
    assert str(setting.dtype) == dtype


def test_flags_of_nccl_tests(monkeypatch):
    given = parsed(monkeypatch, "allreduce", "alltoall", "-b", "8", "-e", "32", "-i", "8", "-d", "all", "-o", "all")
    assert list(given.sizes) == [8, 16, 24, 32]
    of = {name: [s for s in given.settings if s.collective == name] for name in ("all_reduce", "all_to_all")}
    assert len(of["all_to_all"]) == len(DTYPES)
    assert {(str(s.dtype), s.op) for s in of["all_reduce"]} == {(d, op) for d in DTYPES for op in ops_of(d)}


def fake_comm(size: int) -> SimpleNamespace:
    @contextmanager
    def agreed():
        yield

    nodes = SimpleNamespace(nodes=(tuple(range(size)),), node_of=(0,) * size)
    return SimpleNamespace(rank=0, size=size, topology=nodes, agreed=agreed)


def test_sizes_beyond_memory_are_refused_with_what_would_fit(monkeypatch):
    monkeypatch.setattr(room, "available", lambda: 40 << 30)
    given = parsed(monkeypatch, "all_reduce", "-e", "8G", "--memory", "ordinary", "-a", "ring")
    with pytest.raises(ValueError, match=r"^--end 8G: 8 vectors for each of a node's 4 ranks don't fit into the "):
        room.refuse_too_large(fake_comm(4), given)
    given.end = 1280 << 20  # as the message says
    room.refuse_too_large(fake_comm(4), given)
    given.end += 1
    with pytest.raises(ValueError, match="use --end 1280M at most"):
        room.refuse_too_large(fake_comm(4), given)
    shared = SimpleNamespace(f_bavail=3 << 20, f_frsize=1)
    monkeypatch.setattr(room.os, "statvfs", lambda path: shared)
    given = parsed(monkeypatch, "broadcast", "-e", "1M", "--memory", "symmetric")
    with pytest.raises(ValueError, match="the 3 MiB of /dev/shm: use --end 768K at most"):
        room.refuse_too_large(fake_comm(4), given)


def test_nccl_is_refused_where_ranks_share_a_gpu():
    from collectives.bench.device import sharing
    from collectives.bench.peers import refuse_absent

    together = sharing(["node1 0000:01:00.0", "node2 0000:01:00.0", "node1 0000:01:00.0"])
    message = "needs a GPU for each rank, but ranks 0 and 2 share node1 0000:01:00.0|this torch has no nccl"
    with pytest.raises(ValueError, match=message):
        refuse_absent("nccl", "cuda", together)
