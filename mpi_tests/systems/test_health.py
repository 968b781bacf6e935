"""Training runs name the rank, or the link, in which a fault is planted.

They compare times, and so run alone.
"""

import json
import re
import sys

import pytest

from mpi_tests.helpers.cpu_limit import is_available
from mpi_tests.helpers.faults import TINY, Fault, changes, changes_on_rig
from mpi_tests.helpers.launch import environment, launch, watched
from mpi_tests.rig import Rig, UnavailableError

FIRST = 25  # the first step with the fault
STEPS = f"--max_iters {FIRST + 50}"
SAME_BITS = "--reproducible --micro_batch_size 1 --num_micro_batches 4 --hash_interval 40 --max_iters 40"
NAMED = {"cpu": "load"}  # the finding's kind, if it is not the fault's


@pytest.mark.parametrize(
    ("kind", "rank", "amount", "num_ranks", "layout"),
    [
        ("slow", 0, 0.4, 2, "--pp 2 --num_micro_batches 4"),
        ("slow", 2, 0.4, 4, "--pp 2 --num_micro_batches 2"),
        ("cpu", 1, 0.4, 2, "--zero_stage 3"),
        ("input", 0, 0.5, 2, ""),
    ],
)
def test_a_rank_with_a_fault_is_named(tmp_path, kind, rank, amount, num_ranks, layout):
    if kind == "cpu" and not is_available():
        pytest.skip("limits of the CPU time need root and control groups")
    outcome = changes(Fault(kind, rank, FIRST, amount), num_ranks, f"{STEPS} {layout}", tmp_path)
    [first, *_] = [each for each in outcome if each["ranks"] == [rank]]
    assert first["begins"]
    assert first["kind"] == NAMED.get(kind, kind)
    assert first["iter"] > FIRST


def test_a_slow_rank_gets_fewer_micro_batches_and_the_bits_stay(tmp_path):
    hashes = []
    for name, rank, more in (("slow", 1, ["--balance_load"]), ("none", 0, [])):
        fault = ["mpi_tests.helpers.faults", name, rank, 5, 0.3]
        out = ["--out_dir", tmp_path / name]
        result = launch(2, sys.executable, "-m", *fault, *TINY.split(), *SAME_BITS.split(), *more, *out)
        records = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        hashes += [record["hash"] for record in records if "hash" in record]
        if more:
            first, second = re.findall(r"micro-batches by dp rank from now on: (\d), (\d)", result.stdout)[-1]
            assert int(first) + int(second) == 8
            assert int(first) > int(second)
    assert len(hashes) == 2
    assert hashes[0] == hashes[1]


def test_a_host_with_slow_links_is_named(tmp_path):
    try:
        with Rig(hosts=4, slots=1, rate="1gbit") as rig:
            outcome = changes_on_rig(rig, 3, "300mbit", FIRST + 10, f"--max_iters {FIRST + 36}", tmp_path)
    except UnavailableError as error:
        pytest.skip(str(error))
    [first, *_] = [each for each in outcome if each["kind"] == "link"]
    assert first["ranks"] == [2]
    assert "messages from and to rig3 take " in first["words"]


def test_a_slow_replica_is_named_in_print_records_prometheus_and_the_report(tmp_path):
    fault = ["mpi_tests.helpers.faults", "slow", 1, FIRST, 0.4]
    files = ["--out_dir", tmp_path / "out", "--prometheus", tmp_path / "run.prom", "--report", tmp_path / "run.html"]
    result = launch(2, sys.executable, "-m", *fault, *TINY.split(), *STEPS.split(), *files)
    records = map(json.loads, (tmp_path / "out" / "metrics.jsonl").read_text().splitlines())
    [record, *_] = [record for record in records if record.get("health", {}).get("ranks") == [1]]
    assert record["health"]["begins"]
    assert record["health"]["kind"] == "slow"
    assert record["iter"] > FIRST
    words = record["health"]["words"]
    assert f"\n{words}\n" in result.stdout
    assert words.startswith(f"step {record['iter']}: rank 1 (")
    assert "training_health_findings{" in (tmp_path / "run.prom").read_text()
    assert words in (tmp_path / "run.html").read_text()


@pytest.mark.proof
def test_the_benchmark(tmp_path):
    words = ["--faults", "1", "--kinds", "slow", "--ranks", "2", "--output", tmp_path / "out.json"]
    watched([sys.executable, "benchmarks/health.py", *words], environment(), 100)
    results = json.loads((tmp_path / "out.json").read_text())["results"]
    assert results["of"] == len(results["faults"]) == 1
    assert results["faults"][0][2] == "slow 0.7"
