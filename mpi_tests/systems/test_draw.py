"""Space-time diagrams of recorded runs."""

import pytest

from mpi_tests.helpers.launch import launch, refusal

pytestmark = pytest.mark.shares_cores

BOTH = ("python", "-m", "collectives.bench", "all_reduce")


def test_what_happened_is_drawn_beside_the_plan(tmp_path):
    """The algorithm uses shared memory and messages; test_documents.py draws one that uses messages only."""
    words = ["-A", "hierarchical_direct", "-b", "64K", "-n", "2", "--space-time", tmp_path / "both.png"]
    result = launch(4, *BOTH, *words, env={"COLLECTIVES_FAKE_NODES": "2x2"})
    assert "all_reduce hierarchical_direct/" in result.stdout, result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["both.png"]


def test_bad_input_is_one_line():
    result = launch(3, *BOTH, "-A", "ring", "--space-time", "no/such/x.png")
    assert "--space-time no/such/x.png can't be written (No such file or directory): pass a path" in refusal(result)
