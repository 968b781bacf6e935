"""The script that runs PyTorch's own tests: its table and exit status, also where tests fail or do not end."""

import re
import sys

import pytest

from mpi_tests.helpers.launch import ROOT, environment, watched

pytest.importorskip("expecttest")
SCRIPT = ROOT / "benchmarks" / "torch_suite.py"


def run(path, *words):
    """Run the script; return how it ended, and the outcomes in its table."""
    ended = watched([sys.executable, SCRIPT, "--ranks", 2, "--out", path, *words], environment(), 300)
    rows = re.findall(r"^\| (test_\w+) \| (.*) \|$", path.read_text(), re.MULTILINE)
    return ended, {test: cells.split(" | ") for test, cells in rows}


def test_outcomes_beside_gloo(tmp_path):
    tests = ("test_all_to_all_single_unequal_split_full_group", "test_sparse_all_reduce_sum")
    ended, rows = run(tmp_path / "suite.md", "--only", *tests)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    for test in tests:
        assert rows[test][:2] == ["passed", "passed"]
    no_gpu = rows["test_sparse_all_reduce_sum_cuda"]
    assert no_gpu == ["skipped", "skipped", "CUDA is not available."]
    assert re.search(r"^collectives: \d+ passed, \d+ skipped$", ended.stdout, re.MULTILINE)


def test_failures_are_told(tmp_path):
    """By a backend of torch that does nothing."""
    ended, rows = run(tmp_path / "suite.md", "--backends", "fake", "--only", "test_scatter_complex")
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert rows["test_scatter_complex"][0] == "failed"
    assert "AssertionError" in rows["test_scatter_complex"][1]
    assert "fake fails where gloo does not: test_scatter_complex" in ended.stdout


def test_what_does_not_end_is_told(tmp_path):
    words = ["--backends", "collectives", "--limit", 0.01, "--only", "test_scatter_complex"]
    ended, rows = run(tmp_path / "suite.md", *words)
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert rows["test_scatter_complex"][0] == "hung"


def test_a_folder_that_is_not_there():
    ended = watched([sys.executable, SCRIPT, "--out", "there/is/none.md"], environment(), 60)
    assert ended.returncode == 2
    assert "there is no folder there/is, so make it first" in ended.stderr
