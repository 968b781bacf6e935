"""The list of mutants fits the sources."""

import pytest

from mpi_tests.helpers.launch import ROOT
from mpi_tests.mutants_list import MUTANTS


@pytest.mark.parametrize("file", sorted({mutant.file for mutant in MUTANTS}))
def test_each_place_is_there_once(file):
    text = (ROOT / file).read_text()
    assert not [mutant.old for mutant in MUTANTS if mutant.file == file and text.count(mutant.old) != 1]


def test_each_selection_names_a_file():
    names = {path.name for path in (ROOT / "mpi_tests").rglob("test_*.py")}
    assert {test.file.partition("::")[0] for mutant in MUTANTS for test in mutant.tests} <= names
