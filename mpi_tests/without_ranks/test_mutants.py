"""mutants.py: the list fits the sources, outcomes are classified, and partial runs add up to one table."""

import ast

import pytest

from mpi_tests import mutants
from mpi_tests.helpers.launch import ROOT
from mpi_tests.mutants import BROKEN, CAUGHT, FAILED, LATE, PASSED, Verdict, earlier, examine, outcome, row, table
from mpi_tests.mutants_list import MUTANTS, Mutant, Selection

ON_RANKS = "\n==== rank 1 of 2: mpi_tests/with_ranks/test_a.py::test_b[2-ranks]: "
CRASH = "Fatal Python error: Aborted\n\nCurrent thread (most recent call first):\n"
A_PY = "import time\nfrom pathlib import Path\n\n\ndef f(x):\n    return x + 1\n"
TEST_A = "from a import f\n\n\ndef test_f():\n    assert f(1) == 2\n"
TESTS = Selection("test_a.py")


@pytest.mark.parametrize("file", sorted({mutant.file for mutant in MUTANTS}))
def test_each_place_is_there_once(file):
    text = (ROOT / file).read_text()
    assert not [mutant.old for mutant in MUTANTS if mutant.file == file and text.count(mutant.old) != 1]


@pytest.mark.parametrize("file", sorted({mutant.file for mutant in MUTANTS if mutant.file.endswith(".py")}))
def test_each_fault_can_be_parsed(file):
    text = (ROOT / file).read_text()
    for mutant in MUTANTS:
        if mutant.file == file:
            ast.parse(text.replace(mutant.old, mutant.new), file)


def test_each_selection_names_a_file():
    names = {path.name for path in (ROOT / "mpi_tests").rglob("test_*.py")}
    assert {test.file.partition("::")[0] for mutant in MUTANTS for test in mutant.tests} <= names


def test_parts_make_one_table(tmp_path):
    """Rows of other partial runs are kept, and those of removed mutants are dropped."""
    path, (first, second, third, *_) = tmp_path / "mutants.md", MUTANTS
    path.write_text(table({first: row(first, Verdict(CAUGHT, "", 3.0)), third: "gone"}, [first, second, third]))
    assert path.read_text().endswith("\n1 of 3 caught, 1 not run\n")
    rows = earlier(path, [first, second])
    assert list(rows) == [first]
    lines = table(rows | {second: row(second, Verdict("SURVIVED", ""))}, [first, second]).splitlines()
    assert lines[4] in path.read_text()
    assert " **SURVIVED** |" in lines[5]
    assert lines[-1] == "1 of 2 caught, 0 not run"


@pytest.mark.parametrize(
    ("status", "output", "word"),
    [
        (0, "2 passed, 1 skipped in 3 s", PASSED),
        (0, "1 skipped in 3 s", BROKEN),
        (1, "FAILED a.py::b - assert 0\n1 failed, 2 passed in 3 s", FAILED),
        (1, "ERROR a.py::b - OSError\n1 error in 3 s", FAILED),  # an error in a fixture
        (1, "FAILED a.py::b - numba.core.errors.TypingError\n1 failed in 3 s", BROKEN),
        (1, "mpirun has found no slots", BROKEN),
        (1, f"{ON_RANKS}not finished after 60 s; here:", LATE),
        (1, f"{ON_RANKS}rank 0 failed 20 s ago; here:", FAILED),
        (1, "\n==== rank 1 of 2: collection: not finished after 600 s; here:", BROKEN),
        (2, "ERROR a.py - ImportError\n1 error in 3 s", BROKEN),
        (3, "INTERNALERROR> Traceback", BROKEN),
        (4, "ERROR: file or directory not found: a.py", BROKEN),
        (5, "2 deselected in 0 s", BROKEN),
        (134, f'{CRASH}  File "/mpi_tests/helpers/ranks.py", line 9 in pytest_runtest_protocol\n', FAILED),
        (-11, f'{CRASH}  File "python.py", line 9 in pytest_pyfunc_call\n', FAILED),
        (134, f'{CRASH}  File "python.py", line 9 in pytest_pycollect_makemodule\n', BROKEN),
        (137, "1 failed in 3 s", BROKEN),
    ],
)
def test_how_tests_ended(status, output, word):
    assert outcome(status, output)[0] == word


@pytest.fixture
def tree(tmp_path):
    """Make a tree with one file and its test."""
    folder = tmp_path / "mpi_tests"
    folder.mkdir()
    (tmp_path / "a.py").write_text(A_PY)
    (folder / "test_a.py").write_text(TEST_A)
    return tmp_path


@pytest.mark.parametrize(
    ("old", "new", "word"),
    [
        ("x + 1", "x - 1", CAUGHT),
        ("x + 1", "1 + x", "SURVIVED"),
        ("def f", "def g", "BROKEN BUILD"),
        ("x + 2", "x", "DOES NOT APPLY"),
    ],
)
def test_a_fault_is_caught_only_by_a_test_that_fails(tree, old, new, word):
    assert examine({}, 1, tree, Mutant("a.py", old, new, (TESTS,))).word == word
    assert (tree / "a.py").read_text() == A_PY


def test_no_fault_is_judged_by_tests_that_fail_without_it(tree):
    (tree / "mpi_tests" / "test_a.py").write_text("def test_f():\n    assert False\n")
    assert examine({}, 1, tree, Mutant("a.py", "x + 1", "x - 1", (TESTS,))).word == "BROKEN SELECTION"


@pytest.mark.parametrize(("late", "word"), [("True", CAUGHT), ("not done.exists()", "SURVIVED")], ids=["ever", "once"])
def test_what_goes_on_without_end_does_so_twice(monkeypatch, tree, late, word):
    for name, value in (("MORE_S", 1), ("SLOWER", 2), ("AGAIN", 1)):
        monkeypatch.setattr(mutants, name, value)
    wait = f"done = Path('{tree}/done'); late = {late}; done.touch(); time.sleep(60 * late)\n    return x + 1"
    assert examine({}, 1, tree, Mutant("a.py", "return x + 1", wait, (TESTS,))).word == word
