"""The script that runs PyTorch's own tests: its table and exit status, also if tests fail or hang."""

import re
import sys

import pytest

from mpi_tests.helpers.launch import ROOT, environment, watched

pytestmark = pytest.mark.shares_cores

pytest.importorskip("expecttest")
SCRIPT = ROOT / "benchmarks" / "torch_suite.py"


def run(path, *words):
    """Run the script; return its completed process and the outcomes in its table."""
    result = watched([sys.executable, SCRIPT, "--ranks", 2, "--out", path, *words], environment(), 300)
    assert path.exists(), result.stdout + result.stderr
    rows = re.findall(r"^\| (test_\w+) \| (.*) \|$", path.read_text(), re.MULTILINE)
    return result, {test: cells.split(" | ") for test, cells in rows}


def test_outcomes_beside_gloo(tmp_path):
    tests = ("test_all_to_all_single_unequal_split_full_group", "test_sparse_all_reduce_sum")
    result, rows = run(tmp_path / "suite.md", "--only", *tests)
    assert result.returncode == 0, result.stdout + result.stderr
    for test in tests:
        assert rows[test][:2] == ["passed", "passed"]
    no_gpu = rows["test_sparse_all_reduce_sum_cuda"]
    assert no_gpu == ["skipped", "skipped", "CUDA is not available."]
    assert re.search(r"^collectives: \d+ passed, \d+ skipped$", result.stdout, re.MULTILINE)


def test_failures_are_told(tmp_path):
    """The backend is torch's `fake`, which communicates nothing."""
    result, rows = run(tmp_path / "suite.md", "--backends", "fake", "--only", "test_scatter_complex")
    assert result.returncode == 1, result.stdout + result.stderr
    assert rows["test_scatter_complex"][0] == "failed"
    assert "AssertionError" in rows["test_scatter_complex"][1]
    assert "fake fails where gloo does not: test_scatter_complex" in result.stdout


def test_what_does_not_end_is_told(tmp_path):
    words = ["--backends", "collectives", "--limit", 0.01, "--only", "test_scatter_complex"]
    result, rows = run(tmp_path / "suite.md", *words)
    assert result.returncode == 1, result.stdout + result.stderr
    assert rows["test_scatter_complex"][0] == "hung"


def test_a_folder_that_is_not_there():
    result = watched([sys.executable, SCRIPT, "--out", "there/is/none.md"], environment(), 60)
    assert result.returncode == 2
    assert "there is no folder there/is, so make it first" in result.stderr
