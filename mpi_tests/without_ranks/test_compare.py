"""Comparisons of two benchmarks' documents, all of them made up."""

import json
import re
import subprocess
import sys
from functools import cache
from statistics import mean

import pytest

from collectives.bench.compare import compare, lines
from collectives.bench.document import parse, read
from collectives.bench.documents import main
from mpi_tests.helpers.documents import NAMES, document, noisy, row
from mpi_tests.helpers.launch import ROOT

SEEDS = 30
SCALES = (0.05, 0.15)
each_scale = pytest.mark.parametrize("scale", SCALES)


def ours(factor, *names):
    """Slow our rows down, or some of them."""
    return lambda result: factor if result["name"] != "mpi" and result["name"] in (names or (result["name"],)) else 1


def everything(factor):
    return lambda result: factor


def same(result):
    return 1


@cache
def before(seed, scale, **fields):
    return parse(noisy(2 * seed, scale, **fields), "a.json")


def compared(seed, scale, slowed=same, **fields):
    return compare(before(seed, scale, **fields), parse(noisy(2 * seed + 1, scale, slowed, **fields), "b.json"))


def share(outcomes):
    return mean(map(bool, outcomes))


@each_scale
def test_two_runs_of_one_build_are_equal(scale):
    results = [compared(seed, scale) for seed in range(SEEDS)]
    assert share(result.slower for result in results) < 0.02
    assert share("equal" not in list(lines(result))[-1] for result in results) < 0.04


@each_scale
def test_a_build_slowed_by_a_fifth_is_slower(scale):
    results = [compared(seed, scale, ours(1.2)) for seed in range(SEEDS)]
    assert share(result.slower for result in results) > 0.95
    assert share(result.whole.verdict == "faster" for result in results) == 0


def test_a_build_faster_by_a_third_is_faster_and_not_slower():
    results = [compared(seed, 0.1, ours(0.7)) for seed in range(SEEDS)]
    assert share(result.whole.verdict == "faster" for result in results) > 0.95
    assert share(result.slower for result in results) < 0.02


@each_scale
def test_one_algorithm_slowed_twofold_is_named_and_no_other(scale):
    found = [
        {part.words[1] for part in compared(seed, scale, ours(2, "ring")).parts if part.verdict == "slower"} - {""}
        for seed in range(SEEDS)
    ]
    assert share(names == {"ring"} for names in found) > 0.95
    assert share(names - {"ring"} for names in found) < 0.02


@each_scale
def test_a_slower_machine_is_no_slower_build(scale):
    results = [compared(seed, scale, everything(1.5)) for seed in range(SEEDS)]
    assert share(result.slower for result in results) < 0.05
    assert share("the machine changed" in "\n".join(lines(result)) for result in results) > 0.95


def test_a_slower_build_on_a_slower_machine():
    def slowed(result):
        return 1.5 if result["name"] == "mpi" else 2.0

    assert share(compared(seed, 0.05, slowed).slower for seed in range(SEEDS)) > 0.95


SEVERAL = ("all_gather", "all_reduce", "broadcast")
FEW = SEEDS // 4  # such documents are larger


def one_of_several(factor, *names):
    """Slow one collective down, or some of its algorithms."""
    return lambda result: factor if result["collective"] == "all_gather" and result["name"] in (names or NAMES) else 1


@each_scale
def test_several_collectives_of_one_build_are_equal(scale):
    results = [compared(seed, scale, collectives=SEVERAL) for seed in range(FEW)]
    assert share(result.slower for result in results) < 0.02


@each_scale
@pytest.mark.parametrize("factor", [1.5, 0.7])
def test_a_machine_that_changes_for_one_collective_only(scale, factor):
    results = [compared(seed, scale, one_of_several(factor), collectives=SEVERAL) for seed in range(FEW)]
    assert share(result.slower for result in results) < 0.05
    assert share("all_gather" in result.machine for result in results) > 0.95


@each_scale
def test_a_machine_that_changes_for_the_large_arrays_of_one_collective_only(scale):
    def slowed(result):
        return one_of_several(2)(result) if result["bytes"] >= 1024 else 1

    results = [compared(seed, scale, slowed, collectives=SEVERAL) for seed in range(FEW)]
    assert share(result.slower for result in results) < 0.05


@each_scale
def test_one_collective_of_the_build_slowed_is_named_and_no_other(scale):
    slowed = one_of_several(1.3, "ring", "binomial", "rabenseifner", "chain")
    results = [compared(seed, scale, slowed, collectives=SEVERAL) for seed in range(FEW)]
    named = [{part.words[0] for part in result.parts if part.verdict == "slower"} for result in results]
    assert share(names == {"all_gather"} for names in named) > 0.95


def test_without_peers_the_machine_is_a_suspect():
    result = compared(1, 0.05, everything(1.5), names=("ring", "binomial"))
    assert result.slower
    assert "without peers in both documents this may be the machine" in "\n".join(lines(result))


def test_a_document_equals_itself():
    same = parse(noisy(1), "a.json")
    result = compare(same, same)
    assert not result.slower
    assert {change.log for change in (*result.parts, result.whole)} == {0.0}
    assert list(lines(result))[-1] == "equal, as far as the noise lets see"


def test_one_size_is_named_where_it_is_far_off():
    def slowed(result):
        return 10 if (result["name"], result["memory"], result["bytes"]) == ("ring", "ordinary", 512) else 1

    result = compared(3, 0.05, slowed)
    (single,) = result.singles
    assert (single.words, single.verdict) == (
        ("all_reduce", "ring", "ordinary cpu float32 sum in place 512 B"),
        "slower",
    )
    assert result.slower
    assert not result.whole.verdict


def test_ratios_are_of_the_medians():
    before, after = (document(row(nbytes=8 << n, samples=[t] * 9) for n in range(9)) for t in (10.0, 13.0))
    result = compare(parse(before, "a"), parse(after, "b"))
    assert [line.split()[-3] for line in lines(result) if line.startswith(("all_reduce", "all "))] == ["1.30"] * 3


def test_what_is_not_compared_is_said():
    before = document([row("ring"), row("binomial"), row("binomial", 2048)])
    after = document([row("ring"), row("chain")], environment={"mpi": "Open MPI v5.0.11"})
    told = "\n".join(lines(compare(parse(before, "a.json"), parse(after, "b.json"))))
    assert "only in a.json: 2 rows (all_reduce binomial)\nonly in b.json: 1 rows (all_reduce chain)\n" in told
    assert "the environments differ in mpi\n" in told


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (document([row()], ranks=8), "ranks are 4 in a.json, 8 in b.json: measure both alike"),
        (document([row()], nodes=[2, 2]), "nodes are (4,) in a.json, (2, 2) in b.json: measure both alike"),
        (document([row(dtype="float64")]), "a.json and b.json have no row in common: dtype float32 and float64"),
        (document([row(nbytes=8)]), "a.json and b.json have no row in common: other sizes"),
    ],
)
def test_documents_that_cannot_be_compared(other, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        compare(parse(document([row()]), "a.json"), parse(other, "b.json"))


def test_peers_alone_are_nothing_to_compare():
    peers = parse(document([row("mpi"), row("gloo")]), "a.json")
    with pytest.raises(ValueError, match=r"^a\.json and a\.json share rows of gloo, mpi, nccl only: nothing of ours$"):
        compare(peers, peers)


def without(data, name):
    return {key: value for key, value in data.items() if key != name}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"schema": 1,', "not JSON (Expecting property name"),
        ("[]", "'schema' is missing"),
        ("[" * 100000, "not JSON (maximum recursion depth"),
        (json.dumps(document([], schema=2)), "schema is 2, but this build reads 1"),
        (json.dumps(without(document([]), "results")), "'results' is missing"),
        (json.dumps(document([], nodes=[1, 1])), "'nodes' is [1, 1], but must have the ranks of each node, 4 in all"),
        (json.dumps(document([row(), row(samples_us=[])])), "results[1]: 'samples_us' is empty"),
        (json.dumps(document([row(samples_us=[1, "x"])])), "results[0]: 'samples_us' has \"x\", but must be above 0"),
        (json.dumps(document([row(samples_us=[float("nan")])])), "results[0]: 'samples_us' has NaN"),
        (json.dumps(document([row(median_us=0)])), "results[0]: 'median_us' has 0, but must be above 0"),
        (json.dumps(document([row(bytes=-4)])), "results[0]: 'bytes' is -4"),
        (json.dumps(document([without(row(), "memory")])), "results[0]: 'memory' is missing"),
        (json.dumps(document([row(root="x")])), "results[0]: 'root' is \"x\", but must be of type int"),
        (json.dumps(document([3])), "results[0]: 'collective' is missing"),
        (json.dumps(document([row(), row()])), "two results are of all_reduce ring, 1024 bytes"),
    ],
)
def test_a_broken_document_is_named(tmp_path, text, message):
    path = tmp_path / "broken.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=f"^{re.escape(f'{path}: {message}')}.*: measure it anew by python -m"):
        read(path)


def test_a_missing_document_and_one_of_bytes(tmp_path):
    with pytest.raises(ValueError, match=r"none\.json: can't be read \(No such file or directory\): check the path"):
        read(tmp_path / "none.json")
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match=r"bytes\.json: not JSON \("):
        read(tmp_path / "bytes.json")


def written(path, data):
    path.write_text(json.dumps(data))
    return str(path)


def test_the_command_says_so_and_exits(tmp_path, capsys):
    before, slow = written(tmp_path / "a.json", noisy(1)), written(tmp_path / "b.json", noisy(2, slowed=ours(2)))
    assert [main(["--compare", *two]) for two in ((before, before), (before, slow), (slow, before))] == [0, 1, 0]
    assert "slower, 0 faster, of " in capsys.readouterr().out
    assert main(["--compare", before, str(tmp_path / "c.json")]) == 2
    assert (
        capsys.readouterr().err
        == f"error: {tmp_path}/c.json: can't be read (No such file or directory): check the path\n"
    )


def test_no_mpi_is_needed(tmp_path):
    before = written(tmp_path / "a.json", noisy(1))
    script = "import sys; sys.modules['mpi4py'] = None; from collectives.bench.__main__ import main; sys.exit(main())"
    words = [sys.executable, "-c", script, "--compare", before, before]
    ran = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert (ran.returncode, ran.stderr) == (0, "")
