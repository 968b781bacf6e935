"""The list of mutants fits the sources, and parts of it make one table."""

import pytest

from mpi_tests.helpers.launch import ROOT
from mpi_tests.mutants import CAUGHT, Verdict, earlier, row, table
from mpi_tests.mutants_list import MUTANTS


@pytest.mark.parametrize("file", sorted({mutant.file for mutant in MUTANTS}))
def test_each_place_is_there_once(file):
    text = (ROOT / file).read_text()
    assert not [mutant.old for mutant in MUTANTS if mutant.file == file and text.count(mutant.old) != 1]


def test_each_selection_names_a_file():
    names = {path.name for path in (ROOT / "mpi_tests").rglob("test_*.py")}
    assert {test.file.partition("::")[0] for mutant in MUTANTS for test in mutant.tests} <= names


def test_parts_make_one_table(tmp_path):
    """What another part has examined keeps its row, and what is no mutant any more loses it."""
    path, (first, second, third, *_) = tmp_path / "mutants.md", MUTANTS
    path.write_text(table({first: row(first, Verdict(CAUGHT, "", 3.0)), third: "gone"}, [first, second, third]))
    assert path.read_text().endswith("\n1 of 3 caught, 1 not run\n")
    known = earlier(path, [first, second])
    assert list(known) == [first]
    lines = table(known | {second: row(second, Verdict("SURVIVED", ""))}, [first, second]).splitlines()
    assert lines[4] in path.read_text()
    assert " **SURVIVED** |" in lines[5]
    assert lines[-1] == "1 of 2 caught, 0 not run"
