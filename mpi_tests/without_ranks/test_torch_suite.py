"""Outcomes of PyTorch's own tests that count as worse than gloo's."""

import importlib.util

import pytest

from mpi_tests.helpers.launch import ROOT

SCRIPT = ROOT / "benchmarks" / "torch_suite.py"


def load():
    spec = importlib.util.spec_from_file_location("torch_suite", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("gloo", "ours", "is_behind"),
    [
        ("passed", "passed", False),
        ("passed", "failed", True),
        ("passed", "hung", True),
        ("passed", "skipped", True),
        ("skipped", "failed", True),
        ("failed", "failed", False),
        ("hung", "skipped", False),
        (None, "failed", True),
        (None, "skipped", False),
    ],
)
def test_what_counts(gloo, ours, is_behind):
    outcomes = {"gloo": gloo, "collectives": ours}
    of = {name: {"backend": name, "outcome": outcome, "why": ""} for name, outcome in outcomes.items() if outcome}
    assert load().behind({"test_x": of}, "collectives") == ["test_x"] * is_behind
    assert load().behind({"test_x": of}, "gloo") == []
